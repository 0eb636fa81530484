"""Templates that are the disk of a machine: what a user has, checked and put into the store as a layer."""

import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

from msgspec import UNSET, Struct
from msgspec.structs import replace

from barchan.errors import InvalidSpec
from barchan.image.pack import DEFAULT_LIMITS, MTIME_UNIX_S, Limits, keep_as, pack_tar
from barchan.image.qcow2 import look
from barchan.image.store import ImageStore
from barchan.image.template import USER_DATA_CHARS_MAX, Disk, LayerKind, Template, TemplateConfig
from barchan.image.tools import Progress

PART_BYTES = 1 << 20
KERNEL, INITRD = "vmlinuz", "initrd"


class Boot(Struct, frozen=True, kw_only=True):
    """A kernel that is started directly, without a boot loader, and the words it is given."""

    kernel: Path
    initrd: Path
    append: str


def add_disk(
    store: ImageStore,
    config: TemplateConfig,
    disk: Path,
    kind: LayerKind,
    progress: Progress,
    *,
    boot: Boot | None = None,
    user_data: str = "",
    limits: Limits = DEFAULT_LIMITS,
) -> Template:
    """Make a template of a disk image, `raw` or qcow2; the file itself stays as it is and may go. Blocking.

    Args:
        config: Without `disk`. `user` is one that the guest has.
        boot: None: the disk has a boot loader that a BIOS starts.
        user_data: For cloud-init in the guest, in any form that it knows.

    Raises:
        InvalidSpec: It is no disk, or one that can't stand alone, or `user_data` is too long.
        NotFound, CapacityError, RequirementMissing: As of any layer.
    """
    config.check()
    if len(user_data) > USER_DATA_CHARS_MAX:
        raise InvalidSpec(f"user data of {len(user_data)} characters is too long: at most {USER_DATA_CHARS_MAX}")
    with ExitStack() as opened:
        files = {Disk.file_at(0): _opened(opened, disk)}
        image = look(files[Disk.file_at(0)], str(disk))
        if boot is not None:
            files[f"{Disk.FOLDER}/{KERNEL}"] = _opened(opened, boot.kernel)
            files[f"{Disk.FOLDER}/{INITRD}"] = _opened(opened, boot.initrd)
        with store.workspace() as workspace:
            progress("storing the disk")
            packed = workspace / "layer.erofs"
            digest = pack_files(files, packed, limits)
            layer = keep_as(packed, digest, workspace, kind)
            form = Disk(
                format=image.format,
                base_bytes=image.size_bytes,
                size_bytes=image.size_bytes,
                boot="bios" if boot is None else "kernel",
                append="" if boot is None else boot.append,
                user_data=user_data or UNSET,
            )
            return store.commit(replace(config, disk=form), (layer,))


def _opened(opened: ExitStack, path: Path) -> BinaryIO:
    try:
        return opened.enter_context(path.open("rb"))
    except OSError as error:
        raise InvalidSpec(f"{path} can't be read: {error.strerror}") from error


def pack_files(files: Mapping[str, BinaryIO], target: Path, limits: Limits = DEFAULT_LIMITS) -> str:
    """Pack files, by their paths in the new layer, where everybody may read them; returns its digest. Blocking.

    Raises:
        As `image.pack.pack_tar`.
    """
    return pack_tar(cast(BinaryIO, _Pieces(_tar(files))), target, limits=limits)


def _tar(files: Mapping[str, BinaryIO]) -> Iterator[bytes]:
    for folder in sorted({name.rpartition("/")[0] for name in files if "/" in name}):
        yield _header(folder, tarfile.DIRTYPE, 0o755, 0)
    for name, file in files.items():
        size = file.seek(0, 2)
        file.seek(0)
        yield _header(name, tarfile.REGTYPE, 0o444, size)
        left = size
        while left:
            data = file.read(min(left, PART_BYTES))
            if not data:
                raise InvalidSpec(f"the file for {name} has become shorter while it was read")
            left -= len(data)
            yield data
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, kind: bytes, mode: int, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size, info.mtime = kind, mode, size, MTIME_UNIX_S
    return info.tobuf(tarfile.PAX_FORMAT)


class _Pieces:
    """What an iterator gives, to be read as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, _size: int = -1) -> bytes:
        return next((piece for piece in self._pieces if piece), b"")
