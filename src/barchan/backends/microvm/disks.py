"""The disks of a microVM: its image's layers as files that many guests read, and what each one writes to."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from barchan.backends.hosted.outer import HostLayer
from barchan.backends.qemu.links import Links
from barchan.errors import NotFound
from barchan.image.diff_tar import merge
from barchan.image.erofs import Erofs
from barchan.image.store import ImageStore, layer_gone
from barchan.image.template import Layer
from barchan.image.tools import require, run
from barchan.image.whole import whole_file

LAYERS_MAX = 4  # disks: a machine has eight places for devices, and the others have theirs
LAYER_PATH = "/layers/{}.erofs"
DISK_PATH = "/machine/disk"
DIGESTS_PATH = "/layers/digests"
SPOOL_BYTES_MAX = 64 << 20  # of the disk, for the output that the init keeps
_OF_SIZE = 64  # of a file system, one part of so many is its own tables
_LEAST_BYTES = 8 << 20
EMPTY_DISKS_MAX = 16  # that are kept, each of another size
KERNEL = "kernel-"
_IMAGE, _DISK = "image-", "disk-"


def spool_bytes(disk_mib: int) -> int:
    """Room on a disk for the output that the init keeps: less than half of it, which is all that can be set aside."""
    return min(SPOOL_BYTES_MAX, disk_mib << 20)


def disk_bytes(disk_mib: int) -> int:
    """Size of a file system in which a guest has so much room, and its init the room for what it keeps."""
    wanted = (disk_mib << 20) + spool_bytes(disk_mib)
    return (wanted + wanted // _OF_SIZE + _LEAST_BYTES) & -4096


def image_layer(links: Links, images: ImageStore, layers: Sequence[Layer]) -> tuple[HostLayer, int]:
    """A template's layers as files, and how many these are; those on top are merged where they are too many. Blocking.

    A guest reads files of EROFS: what is kept otherwise becomes one, once for each image, and takes its room again.
    One that is kept without its data is fetched, all of it.

    Raises:
        NotFound: A layer was removed. BlobUnavailable, BlobCorrupt: Its data can't be had, or are damaged.
        CapacityError: There is no room for it.
    """
    key = hashlib.sha256(":".join(layer.digest for layer in layers).encode()).hexdigest()[:32]
    count = min(len(layers), LAYERS_MAX)
    found = links.layer(_IMAGE + key)
    if found.path.exists():
        return found, count
    with images.workspace() as made:
        own = len(layers) - (count - 1)  # that become the topmost file
        paths = [_whole(images, layer, made) for layer in layers]
        if own > 1:
            paths[:own] = [_merged(paths, own, made / "merged")]
        digests = made / "digests"
        digests.write_text("\n".join(layer.digest for layer in layers))
        files = {LAYER_PATH.format(index): path for index, path in enumerate(paths)}
        try:
            return links.make(_IMAGE + key, {**files, DIGESTS_PATH: digests}), count
        except FileNotFoundError as error:
            raise NotFound(f"a layer of the image is gone: {error.filename}") from error


def _whole(images: ImageStore, layer: Layer, made: Path) -> Path:
    try:
        return whole_file(images, layer, made)
    except FileNotFoundError as error:
        raise layer_gone(layer) from error


def _merged(paths: Sequence[Path], count: int, target: Path) -> Path:
    with ExitStack() as closing:
        try:
            opened = [closing.enter_context(Erofs.open(path)) for path in paths]
        except FileNotFoundError as error:
            raise NotFound(f"a layer of the image is gone: {error.filename}") from error
        merge(opened[:count], target, below=opened[count:])
    return target


def unneeded(links: Links, images: ImageStore, kernel: str) -> list[str]:
    """Names of layers that no new machine needs. Blocking.

    These are of images of which the store has a layer no more, of kernels but `kernel` if that is known, and of empty
    disks the oldest, where there are many.
    """
    names = links.names()
    found = [name for name in names if kernel and name.startswith(KERNEL) and name != KERNEL + kernel]
    for name in names:
        if name.startswith(_IMAGE):
            digests = (links.layer(name).path / DIGESTS_PATH.lstrip("/")).read_text().split()
            if not all(map(images.has_layer, digests)):
                found.append(name)
    empty = [name for name in names if name.startswith(_DISK)]
    empty.sort(key=lambda name: links.layer(name).path.stat().st_mtime)
    return found + empty[: -EMPTY_DISKS_MAX or None]


def fresh_disk(links: Links, disk_mib: int) -> HostLayer:
    """An empty file system of which each machine gets a copy, at the moment when it writes to it. Blocking.

    Raises:
        RequirementMissing: There is no mkfs.ext4.
    """
    size = disk_bytes(disk_mib)
    name = f"{_DISK}{size}"
    found = links.layer(name)
    if found.path.exists():
        return found
    mkfs = require("mkfs.ext4", "e2fsprogs", needed_for="a microVM's disk")
    found.path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="disk-", dir=found.path.parent.parent))
    try:
        image = made / "disk"
        with open(image, "wb") as file:
            os.truncate(file.fileno(), size)
        reserved = f"{100 * spool_bytes(disk_mib) / size:.2f}"
        options = ("-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=1,root_owner=0:0", "-m", reserved)
        run([mkfs, *options, image])
        return links.make(name, {DISK_PATH: image})
    finally:
        shutil.rmtree(made, ignore_errors=True)
