"""A host without FUSE: images on demand are refused with what is missing, and everything else works."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import barchan
from barchan.errors import RequirementMissing
from barchan.image.blobs import BlobStore
from barchan.image.remote import pull, push
from barchan.image.store import ImageStore
from tests.nodes import NodeProcess
from tests.stores import copy_base

pytestmark = [pytest.mark.requires("root", "cgroup", "fuse"), pytest.mark.timeout(120)]

# In a mount namespace of its own: a /dev that has all nodes of the host's but one.
WITHOUT_FUSE = """#!/bin/sh
exec unshare --mount --propagation private sh -c '
set -e
mount -t tmpfs -o mode=755 barchan-test {dev}
for node in /dev/*; do
    if [ ! -d "$node" ] && [ "$node" != /dev/fuse ]; then cp -a "$node" {dev}; fi
done
mkdir {dev}/shm {dev}/pts
mount --move {dev} /dev
exec {python} "$@"' sh "$@"
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeProcess]:
    """A node for which there is no /dev/fuse; it has no image, and a blob store at `blobs`."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "images").mkdir()
    python = tmp_path / "python"
    python.write_text(WITHOUT_FUSE.format(dev=tmp_path / "dev", python=sys.executable))
    python.chmod(0o755)
    node = NodeProcess(tmp_path / "node", tmp_path / "images")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(python))
        node.start("--store", str(tmp_path / "blobs"))
    yield node
    assert node.end() == []


async def test_what_is_missing_is_said(images: Path, tmp_path: Path, node: NodeProcess) -> None:
    """Create names FUSE and both ways out, of which one is taken: the whole image needs none."""
    store = BlobStore.open(str(tmp_path / "blobs"))
    await push(ImageStore(copy_base(images, tmp_path / "machine")), "debian", store, lambda what, done, total: None)
    async with barchan.connect_async(url=f"unix://{node.socket}") as client:
        for _ in range(2):
            with pytest.raises(RequirementMissing, match=r"FUSE.*modprobe fuse, or .*barchan image pull"):
                await client.create("debian")
        await pull(ImageStore(tmp_path / "images"), "debian", store, lambda what, done, total: None)
        async with await client.create("debian") as sandbox:
            assert (await sandbox.exec(["echo", "there"])).text == "there\n"
