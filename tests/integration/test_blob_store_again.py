"""Images of a blob store on a machine that has some of their layers already."""

import os
import shutil
from pathlib import Path

import pytest

from barchan.image.blobs import BlobStore
from barchan.image.pack import make_layer
from barchan.image.remote import fetch, pull, push
from barchan.image.store import ImageStore
from barchan.image.template import Template, TemplateConfig


def quiet(what: str, done: int, total: int) -> None:
    """No progress is shown."""


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore.open(os.fspath(tmp_path / "blobs"))


@pytest.fixture
def images(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
async def made(images: ImageStore, store: BlobStore, tmp_path: Path) -> Template:
    """An image of two layers, here and in the store."""
    layers = []
    with images.workspace() as workspace:
        for name in ("upper", "lower"):
            (tree := tmp_path / name).mkdir()
            (tree / name).write_bytes(os.urandom(100_000))
            (folder := workspace / name).mkdir()
            layers.append(make_layer(tree, folder, "erofs"))
        template = images.commit(TemplateConfig(name="one"), tuple(layers))
    await push(images, "one", store, quiet)
    return template


async def test_layers_that_are_here_are_not_fetched(
    images: ImageStore, store: BlobStore, made: Template, tmp_path: Path
) -> None:
    """A template that is made of layers of this store uses them as they are, lazily or whole."""
    found = await fetch(images, "one", store, local_name="again")
    assert found.layers == made.layers
    shutil.rmtree(tmp_path / "blobs" / "layers")
    assert (await pull(images, "one", store, quiet, local_name="pulled")).layers == made.layers


async def test_a_pull_mends_a_layer_that_is_damaged_here(images: ImageStore, store: BlobStore, made: Template) -> None:
    """What is right stays as it is, and what is not comes again: no other image has to be removed first."""
    bad, good = map(images.layer_path, made.layers)
    right, inode = bad.read_bytes(), good.stat().st_ino
    with bad.open("r+b") as file:
        file.write(b"damage")
    await pull(images, "one", store, quiet, local_name="pulled")
    assert bad.read_bytes() == right
    assert good.stat().st_ino == inode
