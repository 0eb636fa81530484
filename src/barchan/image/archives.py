"""Images in files of this machine: layout directories, the same in an archive, and what `docker save` writes."""

import io
import os
import posixpath
import re
import shutil
import stat
import tarfile
from asyncio import to_thread
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import BinaryIO, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from barchan.errors import BlobCorrupt, CapacityError, Denied, InvalidSpec, NotFound
from barchan.image.disk import NO_ROOM, RETRY_AFTER_MS
from barchan.image.oci import (
    DOCUMENT_BYTES_MAX,
    INDEX,
    LAYERS_READ_MAX,
    MANIFEST,
    REF_NAME,
    Descriptor,
    Found,
    Index,
    Manifest,
    decode,
    find_image,
    image_index,
    meant_by,
    read_config,
    sha256,
)

MEMBERS_MAX = 100_000  # of an archive: the oldest form of `docker save` has three for each layer
HEADER_BYTES_MAX = 1 << 20  # of what an archive says about one member
LINKS_MAX = 8
LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'


class Files(Protocol):
    """Named bytes: a directory's or an archive's."""

    def open(self, name: str) -> BinaryIO:
        """Raises `NotFound` if there is nothing of that name."""
        ...


class Directory:
    """The files of a layout directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, name: str) -> BinaryIO:
        try:
            # Not blocking: a pipe of that name would wait for a writer.
            fd = os.open(self._path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"{self._path} has no {name}", path=str(self._path / name)) from None
        except OSError as error:
            raise InvalidSpec(f"{self._path / name} can't be read: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InvalidSpec(f"{self._path / name} is no file")
        return os.fdopen(fd, "rb")


class _Member(NamedTuple):
    start: int
    size: int
    link: str  # name of the member that has its bytes


class Archive:
    """The members of a tar archive, read in place.

    Raises:
        NotFound: There is no such file.
        InvalidSpec: It is compressed, or no archive at all.
        BlobCorrupt: It is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                if file.read(2) == b"\x1f\x8b":
                    raise InvalidSpec(f"{path} is compressed as a whole (try: gunzip it first)")
                file.seek(0)
                self._members = dict(_members(_BoundedReads(file), path))
        except FileNotFoundError:
            raise NotFound(f"there is no file {path}", path=str(path)) from None
        except (tarfile.TarError, RecursionError) as error:  # headers of headers are read by recursion
            raise BlobCorrupt(f"{path} is no whole tar archive: {error} (try: copying or saving it again)") from error
        except (OSError, ValueError) as error:
            raise InvalidSpec(f"{path} can't be read: {error}") from error

    def open(self, name: str) -> BinaryIO:
        for _ in range(LINKS_MAX):
            member = self._members.get(name)
            if member is None:
                raise NotFound(f"{self._path} has no member {name[:200]!r}", path=str(self._path))
            if not member.link:
                return io.BufferedReader(_Section(self._path, member.start, member.size))
            name = member.link
        raise InvalidSpec(f"{self._path}: the member {name[:200]!r} is a link to itself")


class _BoundedReads:
    """What `tarfile` reads headers from: one that asks for gigabytes is not served."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= HEADER_BYTES_MAX:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


def _members(file: _BoundedReads, path: Path) -> list[tuple[str, _Member]]:
    found = []
    with tarfile.open(fileobj=file, mode="r:") as archive:  # type: ignore[call-overload]
        for count, member in enumerate(archive):
            if count >= MEMBERS_MAX:
                raise InvalidSpec(f"{path} has more than {MEMBERS_MAX} members")
            name = posixpath.normpath(member.name)
            if member.issym():
                link = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
            else:
                link = posixpath.normpath(member.linkname) if member.islnk() else ""
            if link or (member.isreg() and not member.issparse()):
                found.append((name, _Member(member.offset_data, member.size, link)))
        file.seek(archive.offset)
        if any(file.read(tarfile.BLOCKSIZE)):  # which is taken for the end
            raise tarfile.ReadError(f"the header after {len(found)} members is damaged")
    return found


class _Section(io.RawIOBase):
    """A part of a file."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._position, self._end = start, start + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        data = os.pread(self._file.fileno(), min(len(buffer), self._end - self._position), self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class LayoutSource:
    """An image of a layout, in a directory or an archive."""

    def __init__(self, files: Files, where: str, tag: str | None) -> None:
        self._files, self._where, self._tag = files, where, tag
        self._layers: tuple[Descriptor, ...] = ()

    async def image(self) -> Found:
        root = await to_thread(read_small, self._files, "index.json", self._where)
        found = await find_image(root, INDEX, self._document, self._where, self._tag)
        self._layers = found.manifest.layers
        return found

    async def _document(self, blob: Descriptor) -> bytes:
        return await to_thread(read_small, self._files, _blob_name(blob.check()), self._where)

    def open(self, position: int, stop: Event) -> BinaryIO:
        return self._files.open(_blob_name(self._layers[position]))


class _Saved(Struct, rename="pascal"):
    """One image of what `docker save` writes."""

    config: str
    layers: tuple[str, ...]
    repo_tags: tuple[str, ...] | None = None


class SavedSource:
    """An image of a `docker save` archive: its layers have no digests of their own, only those in its config."""

    def __init__(self, files: Files, where: str, tag: str | None) -> None:
        self._files, self._where, self._tag = files, where, tag
        self._layers: tuple[str, ...] = ()

    async def image(self) -> Found:
        return await to_thread(self._image)

    def _image(self) -> Found:
        data = read_small(self._files, "manifest.json", self._where)
        try:
            images = msgspec.json.decode(data, type=tuple[_Saved, ...])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BlobCorrupt(f"manifest.json of {self._where} can't be read: {error}") from error
        have = [tag for image in images for tag in image.repo_tags or ()]
        if self._tag is not None:
            meant = meant_by(self._tag)
            images = tuple(image for image in images if meant.intersection(image.repo_tags or ()))
        if len(images) != 1:
            listed = ", ".join(have) or "none with a name"
            raise NotFound(
                f"{self._where}: name one of the images that it holds: {listed} "
                f"(try: {self._where}:{have[0] if have else 'NAME'})"
            )
        (saved,) = images
        if len(saved.layers) > LAYERS_READ_MAX:
            raise InvalidSpec(f"{self._where} has {len(saved.layers)} layers; at most {LAYERS_READ_MAX} are read")
        config = read_small(self._files, posixpath.normpath(saved.config), self._where)
        digest = re.search(r"([0-9a-f]{64})(?:\.json)?$", saved.config)
        if digest is not None and sha256(config) != f"sha256:{digest[1]}":
            raise BlobCorrupt(f"{self._where}: its config {saved.config} has other bytes, of {sha256(config)}")
        self._layers = saved.layers
        layers = tuple(Descriptor("application/vnd.oci.image.layer.v1.tar", "", 0) for _ in saved.layers)
        manifest = Manifest(config=Descriptor("", sha256(config), len(config)), layers=layers)
        return Found(
            manifest, read_config(config, manifest, f"the config of {self._where}"), *(saved.repo_tags or ())[:1]
        )

    def open(self, position: int, stop: Event) -> BinaryIO:
        return self._files.open(posixpath.normpath(self._layers[position]))


def saved_or_layout(path: Path, where: str, tag: str | None) -> LayoutSource | SavedSource:
    """The image of a `docker save` archive; newer ones are layouts with a list in the older form beside it."""
    archive = Archive(path)
    try:
        archive.open("oci-layout").close()
    except NotFound:
        return SavedSource(archive, where, tag)
    return LayoutSource(archive, where, tag)


def read_small(files: Files, name: str, where: str) -> bytes:
    with files.open(name) as file:
        data = file.read(DOCUMENT_BYTES_MAX + 1)
    if len(data) > DOCUMENT_BYTES_MAX:
        raise BlobCorrupt(f"{name} of {where} has more than {DOCUMENT_BYTES_MAX} bytes")
    return data


def _blob_name(blob: Descriptor) -> str:
    return f"blobs/sha256/{blob.digest.removeprefix('sha256:')}"


class LayoutSink:
    """A layout directory that images are added to; another image of the same tag gives way.

    Each file appears whole or not at all, and the index last.
    """

    def __init__(self, path: Path, tag: str | None) -> None:
        self._path, self._tag = path, tag

    async def has(self, blob: Descriptor) -> bool:
        path = self._path / _blob_name(blob)
        return await to_thread(lambda: path.is_file() and path.stat().st_size == blob.size)

    async def put(self, path: Path, blob: Descriptor) -> None:
        await to_thread(self._put, path, blob)

    def _put(self, path: Path, blob: Descriptor) -> None:
        with _replaced(self._path / _blob_name(blob), makes_folders=True) as beside:
            shutil.copyfile(path, beside)

    async def finish(self, manifest: bytes) -> None:
        await to_thread(self._finish, manifest)

    def _finish(self, manifest: bytes) -> None:
        notes = {REF_NAME: self._tag} if self._tag is not None else None
        described = Descriptor(MANIFEST, sha256(manifest), len(manifest), annotations=notes)
        old = self._old_index()
        kept = [item for item in old if (item.annotations or {}).get(REF_NAME) != self._tag]
        self._write(_blob_name(described), manifest)
        self._write("oci-layout", LAYOUT)
        self._write("index.json", image_index([*kept, described]))

    def _old_index(self) -> tuple[Descriptor, ...]:
        try:
            data = read_small(Directory(self._path), "index.json", str(self._path))
        except NotFound:
            return ()
        return decode(data, Index, f"the index of {self._path}").manifests

    def _write(self, name: str, data: bytes) -> None:
        with _replaced(self._path / name, makes_folders=True) as beside:
            beside.write_bytes(data)


def write_archive(layout: Path, target: Path) -> None:
    """Put a layout into an archive that says nothing of this machine, its users or the time; whole or not at all.

    Raises:
        Denied, CapacityError: It can't be written there, or the disk is full.
    """
    with _replaced(target) as beside, tarfile.open(beside, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(layout.rglob("*")):
            member = tarfile.TarInfo(path.relative_to(layout).as_posix())
            if path.is_dir():
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(member)
                continue
            member.size, member.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)


@contextmanager
def _replaced(target: Path, *, makes_folders: bool = False) -> Iterator[Path]:
    """A path beside a file, to write what is to take its place.

    Raises:
        Denied, CapacityError: It can't be written there, or the disk is full.
    """
    beside = target.with_name(f".{target.name}.new")
    try:
        try:
            if makes_folders:
                target.parent.mkdir(parents=True, exist_ok=True)
            yield beside
            beside.rename(target)
        except BaseException:
            with suppress(OSError):  # what went wrong is said already
                beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        message = f"{target} can't be written: {error.strerror}"
        if error.errno in NO_ROOM:
            raise CapacityError(f"{message} (try: with more room there)", retry_after_ms=RETRY_AFTER_MS) from error
        raise Denied(f"{message} (try: another path, in a directory that you may write)") from error
