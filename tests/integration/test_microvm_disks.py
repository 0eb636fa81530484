"""The disks of microVMs on the host: layers as links, merged where they are too many, and what nobody needs is told."""

import asyncio
import os
from pathlib import Path

import pytest

from barchan.backends.microvm import disks
from barchan.backends.qemu.links import Links
from barchan.errors import BlobCorrupt, BlobUnavailable, NotFound
from barchan.image.blobs import BlobStore
from barchan.image.erofs import Erofs
from barchan.image.pack import pack_tree
from barchan.image.remote import fetch, push
from barchan.image.stack import Stack
from barchan.image.store import ImageStore, NewLayer
from barchan.image.stored import file_sha256
from barchan.image.template import Layer, Template, TemplateConfig
from barchan.image.unpack import unpack

pytestmark = pytest.mark.requires("root")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def links(tmp_path: Path) -> Links:
    return Links("microvm", tmp_path / "layers")


def image(store: ImageStore, tmp_path: Path, count: int) -> Template:
    """Of so many layers: each has a file of its own and one that all have, and the topmost removes the lowest's own."""
    layers: list[NewLayer] = []
    with store.workspace() as workspace:
        for number in range(count):
            tree = tmp_path / f"tree-{number}"
            (tree / "srv").mkdir(parents=True)
            (tree / f"srv/own-{number}").write_text(f"{number}")
            (tree / "srv/same").write_text(f"{number}")
            if 0 < number == count - 1:
                os.mknod(tree / "srv/own-0", 0o20000, 0)
            packed = workspace / f"{number}.erofs"
            layers.insert(0, NewLayer(Layer(pack_tree(tree, packed), "erofs"), packed))
        return store.commit(TemplateConfig(name="many", source="a test"), tuple(layers))


def shown(layer: Path, count: int) -> dict[str, bytes]:
    """The files of all disks together, as an overlay of them shows them."""
    opened = [Erofs.open(layer / f"layers/{number}.erofs") for number in range(count)]
    try:
        stack = Stack(opened)
        found = {name.decode(): node for name, node in stack.walk()}
        return {name: b"".join(stack.stream(node)) for name, node in found.items() if name.startswith("srv/")}
    finally:
        for erofs in opened:
            erofs.close()


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (4, 4), (7, 4)])
def test_an_image_is_at_most_four_disks_that_show_the_same(
    store: ImageStore, links: Links, tmp_path: Path, count: int, expected: int
) -> None:
    """Those on top are merged where there are more; made once."""
    template = image(store, tmp_path, count)
    layer, disks_made = disks.image_layer(links, store, template.layers)
    own = {f"srv/own-{number}": b"%d" % number for number in range(0 if count == 1 else 1, count)}
    assert disks_made == expected
    assert shown(layer.path, disks_made) == {**own, "srv/same": b"%d" % (count - 1)}
    assert disks.image_layer(links, store, template.layers) == (layer, expected)
    assert os.listdir(store.root / "tmp") == []


def test_what_no_machine_needs_any_more_is_told(store: ImageStore, links: Links, tmp_path: Path) -> None:
    """Layers of an image that was removed, other kernels, and empty disks beyond a number."""
    template = image(store, tmp_path, 2)
    layer, _ = disks.image_layer(links, store, template.layers)
    (tmp_path / "vmlinux").touch()
    for name in ("kernel-old", "kernel-new"):
        links.make(name, {"/kernel/vmlinux": tmp_path / "vmlinux"})
    assert disks.unneeded(links, store, "new") == ["kernel-old"]
    store.remove("many")
    assert disks.unneeded(links, store, "new") == ["kernel-old", layer.path.name]
    links.remove(layer.path.name)
    assert links.names() == ["kernel-new", "kernel-old"]


def kept_as_directories(store: ImageStore, template: Template) -> tuple[Layer, ...]:
    """The same layers, as a host keeps them that can't mount EROFS files."""
    for layer in template.layers:
        unpack(store.layer_path(layer), store.layer_path(Layer(layer.digest, "dir")))
        store.layer_path(layer).unlink()
    return tuple(Layer(layer.digest, "dir") for layer in template.layers)


@pytest.mark.parametrize("count", [1, 6])
def test_layers_that_are_directories_become_disks(store: ImageStore, links: Links, tmp_path: Path, count: int) -> None:
    """They show the same; a single one is, byte for byte, what it was before it was unpacked."""
    layers = kept_as_directories(store, image(store, tmp_path, count))
    layer, made = disks.image_layer(links, store, layers)
    assert shown(layer.path, made)["srv/same"] == b"%d" % (count - 1)
    if count == 1:
        assert file_sha256(layer.path / "layers/0.erofs") == layers[0].digest
    assert os.listdir(store.root / "tmp") == []


def test_a_directory_that_was_changed_is_told(store: ImageStore, links: Links, tmp_path: Path) -> None:
    """It is not what its image says, and no guest is given it."""
    (layer,) = kept_as_directories(store, image(store, tmp_path, 1))
    (store.layer_path(layer) / "srv/same").write_text("other")
    with pytest.raises(BlobCorrupt, match="packed again"):
        disks.image_layer(links, store, [layer])
    assert links.names() == []


async def test_a_layer_without_its_data_is_fetched(store: ImageStore, links: Links, tmp_path: Path) -> None:
    """All of it, at the first use; where the blob store is gone by then, that is said."""
    template, other = image(store, tmp_path, 1), ImageStore(tmp_path / "other")
    blobs = BlobStore.open(f"file://{tmp_path}/blobs")
    await push(store, "many", blobs, lambda what, done, total: None)
    (lazy,) = (await fetch(other, "many", blobs)).layers
    assert lazy == Layer(template.layers[0].digest, "lazy")
    layer, _ = await asyncio.to_thread(disks.image_layer, links, other, [lazy])
    assert file_sha256(layer.path / "layers/0.erofs") == lazy.digest
    links.remove(layer.path.name)
    (tmp_path / "blobs").rename(tmp_path / "gone")
    with pytest.raises(BlobUnavailable, match="can't be fetched"):
        await asyncio.to_thread(disks.image_layer, links, other, [lazy])
    with pytest.raises(NotFound):
        await asyncio.to_thread(disks.image_layer, links, other, [Layer("0" * 64, "lazy")])


@pytest.mark.requires("mkfs.ext4")
def test_an_empty_disk_has_room_for_what_was_asked(links: Links) -> None:
    """And for what the init keeps; made once for each size, and sparse."""
    for disk_mib in (1, 32, 1024):
        layer = disks.fresh_disk(links, disk_mib)
        file = layer.path / "machine/disk"
        assert file.stat().st_size == disks.disk_bytes(disk_mib) > disk_mib << 20
        assert file.stat().st_blocks * 512 < 16 << 20
        assert disks.fresh_disk(links, disk_mib) == layer
