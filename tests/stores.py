"""An image store of a test's own, so that what it builds goes with it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.image.store import ImageStore
from tests.nodes import NodeProcess


def copy_base(machine: Path, to: Path, *names: str) -> Path:
    """A new store at `to` with images of the machine's store in it: the base image `debian`, and those of `names`."""
    store = ImageStore(machine)
    for folder in ("templates", "layers"):
        (to / folder).mkdir(parents=True)
    for name in ("debian", *names):
        template = store.resolve(name)
        subprocess.run(["cp", "-a", machine / f"templates/{name}.json", to / "templates"], check=True)
        for layer in template.layers:
            subprocess.run(["cp", "-a", store.layer_path(layer), to / "layers"], check=True)
    return to


def node_of_its_own(images: Path, folders: pytest.TempPathFactory, *options: str) -> Iterator[NodeProcess]:
    """For a fixture: a node with an image store of its own, with the base image in it; it must leave nothing."""
    node = NodeProcess(folders.mktemp("node"), copy_base(images, folders.mktemp("store") / "images"))
    node.start(*options)
    yield node
    assert node.end() == []
