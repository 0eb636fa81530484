"""Templates that are a machine's disk."""

import struct
from pathlib import Path

import pytest
from msgspec.structs import replace

from barchan.errors import InvalidSpec
from barchan.image.compose import compose, config_of
from barchan.image.disks import Boot, add_disk
from barchan.image.erofs import Erofs
from barchan.image.qcow2 import empty_above
from barchan.image.store import ImageStore, image_info
from barchan.image.template import Disk, TemplateConfig, need_root, template_digest

MIB = 1 << 20


def silent(_: str) -> None:
    """A progress that nobody watches."""


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A disk of 8 MiB of which most was never written."""
    path = tmp_path / "disk.raw"
    with path.open("wb") as file:
        file.write(b"boot" * 1000)
        file.truncate(8 * MIB)
    return path


def test_a_raw_disk_is_stored_whole(store: ImageStore, raw: Path) -> None:
    """The layer has the disk's bytes and not its holes, readable for everybody; the template says what it is."""
    template = add_disk(store, TemplateConfig(name="machine", user="root"), raw, "erofs", silent)
    assert template.disk == Disk(format="raw", base_bytes=8 * MIB, size_bytes=8 * MIB)
    assert (template.kind, image_info(template).kind) == ("disk", "disk")
    assert store.resolve("machine") == template
    assert template.size_bytes < MIB
    with Erofs.open(store.layer_path(template.layers[0])) as layer:
        inode = layer.lookup(Disk.file_at(0))
        assert inode is not None
        assert inode.mode & 0o777 == 0o444
        assert b"".join(layer.stream(inode)) == raw.read_bytes()


def test_a_kernel_lies_beside_its_disk(store: ImageStore, raw: Path, tmp_path: Path) -> None:
    """What boots directly has its kernel, initrd and their words in the template."""
    for name in ("kernel", "ramdisk"):
        (tmp_path / name).write_bytes(name.encode())
    boot = Boot(kernel=tmp_path / "kernel", initrd=tmp_path / "ramdisk", append="root=/dev/vda")
    template = add_disk(store, TemplateConfig(name="machine"), raw, "erofs", silent, boot=boot)
    assert template.disk is not None
    assert (template.disk.boot, template.disk.append) == ("kernel", "root=/dev/vda")
    with Erofs.open(store.layer_path(template.layers[0])) as layer:
        names = sorted(entry.name for entry in layer.entries(layer.lookup(Disk.FOLDER) or pytest.fail("no folder")))
        assert [name for name in names if name not in (b".", b"..")] == [b"disk", b"initrd", b"vmlinuz"]


def test_an_image_that_reads_other_files_is_refused(store: ImageStore, tmp_path: Path) -> None:
    """A disk that lies above a file of this host would show it to a guest: nothing is stored."""
    path = tmp_path / "above.qcow2"
    path.write_bytes(empty_above("/etc/shadow", "raw", MIB))
    with pytest.raises(InvalidSpec, match="lies above another"):
        add_disk(store, TemplateConfig(name="machine"), path, "erofs", silent)
    assert store.templates() == []


def test_qcow2_keeps_its_size(store: ImageStore, tmp_path: Path) -> None:
    """Of a qcow2 image the size is what a guest sees, not the file's."""
    data = bytearray(empty_above("x", "raw", 64 * MIB))
    struct.pack_into(">QI", data, 8, 0, 0)
    path = tmp_path / "disk.qcow2"
    path.write_bytes(data)
    template = add_disk(store, TemplateConfig(name="machine"), path, "erofs", silent)
    assert template.disk == Disk(format="qcow2", base_bytes=64 * MIB, size_bytes=64 * MIB)


def test_disks_and_roots_do_not_mix(store: ImageStore, raw: Path) -> None:
    """A backend of roots refuses a disk, nothing is put above or below one, and its digest is none of a root's."""
    template = add_disk(store, TemplateConfig(name="machine"), raw, "erofs", silent)
    root = replace(template, name="root", disk=None)
    with pytest.raises(InvalidSpec, match='backend="vm"'):
        need_root(template, "container")
    need_root(root, "container")
    for base, above in ((template, root), (root, template)):
        with pytest.raises(InvalidSpec, match="machine's disk"):
            compose(base, [above])
    config = config_of(template)
    assert template_digest(config, template.layers) == template.digest
    assert template_digest(replace(config, disk=None), template.layers) != template.digest


def test_each_sandbox_has_a_disk_above() -> None:
    """Room counts from the lowest disk: a snapshot's sandbox has as much as the one before, and never less."""
    lowest = Disk(format="raw", base_bytes=8 * MIB, size_bytes=8 * MIB)
    first = lowest.above(100)
    assert (first.depth, first.size_bytes) == (1, 108 * MIB)
    assert (first.above(100).depth, first.above(100).size_bytes) == (2, 108 * MIB)
    assert first.above(10).size_bytes == 108 * MIB
    assert [Disk.file_at(depth) for depth in (0, 1, 12)] == ["machine/disk", "machine/disk-1", "machine/disk-12"]
