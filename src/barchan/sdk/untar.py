"""Unpack a tar from a sandbox, which is hostile, below a local directory.

Every entry is reached from a descriptor of the target, one component at a time, no link followed. Files and directories
come first, links last, so that no entry is written through a link of the archive. A link's target climbs only at its
beginning (`../../a/b`): it climbs through real directories, and by induction no chain of links leads out. tarfile only
parses here; its reads are bounded, since it reads extended headers whole.
"""

import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from barchan.errors import Conflict, QuotaExceeded, RemoteProtocolError

ENTRIES_MAX = 1_000_000
_HEADER_BYTES_MAX = 1 << 20
_PIECE_BYTES = 256 << 10
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class _BoundedReads:
    """The archive as tarfile may read it: what it reads for the headers of one entry is bounded."""

    def __init__(self, archive: IO[bytes]) -> None:
        self._archive = archive
        self._header_left: int | None = _HEADER_BYTES_MAX

    def expect_headers(self) -> None:
        self._header_left = _HEADER_BYTES_MAX

    def expect_content(self) -> None:
        self._header_left = None

    def read(self, size: int) -> bytes:
        if self._header_left is not None:
            self._header_left -= size
            if size < 0 or self._header_left < 0:
                raise RemoteProtocolError(f"the sandbox sent a tar with more than {_HEADER_BYTES_MAX} bytes of headers")
        return self._archive.read(size)

    def seek(self, offset: int) -> int:
        return self._archive.seek(offset)

    def tell(self) -> int:
        return self._archive.tell()


def unpack(archive: IO[bytes], target: Path, bytes_max: int) -> None:
    """Unpack all of it; what was unpacked before an error stays.

    Raises:
        QuotaExceeded: The files are more than `bytes_max` bytes, or there are more than 1,000,000 entries.
        RemoteProtocolError: Not a tar, or an entry that may not be written; `details["entry"]` names it.
        Conflict: A local file or link is in the way.
    """
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        reads = _BoundedReads(archive)
        with tarfile.open(fileobj=reads, mode="r:") as tar:  # type: ignore[call-overload]
            _unpack_members(tar, reads, root, bytes_max)
    except (tarfile.TarError, RecursionError, EOFError, ValueError, OverflowError) as error:
        raise RemoteProtocolError(f"the sandbox did not send a proper tar: {error}") from error
    except OSError as error:
        raise Conflict(f"can't unpack below {target}: {error}") from error
    finally:
        os.close(root)


def _unpack_members(tar: tarfile.TarFile, reads: _BoundedReads, root: int, bytes_max: int) -> None:
    files: set[tuple[str, ...]] = set()
    links: list[tuple[tuple[str, ...], tarfile.TarInfo]] = []
    total = entries = 0
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every header
        reads.expect_headers()
        entries, total = entries + 1, total + (member.size if member.isreg() else 0)
        if entries > ENTRIES_MAX or total > bytes_max:
            raise QuotaExceeded(f"the tree is larger than max_bytes={bytes_max}, or has over {ENTRIES_MAX} entries")
        parts = _parts(member.name, member.name)
        if member.isdir():
            with _directory(root, parts):
                continue
        elif member.isreg():
            reads.expect_content()
            _write_file(tar, member, root, parts)
            reads.expect_headers()
            files.add(parts)
        elif member.islnk() or member.issym():
            links.append((parts, member))
        else:
            raise _refused(member.name, "is neither file, directory nor link")
    for parts, member in links:
        if member.islnk():
            _hard_link(root, parts, member, files)
    for parts, member in links:
        if member.issym():
            _symbolic_link(root, parts, member)


def _refused(name: str, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the sandbox's entry {name[:200]!r} {why}", entry=name[:200])


def _parts(path: str, name: str) -> tuple[str, ...]:
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise _refused(name, "does not stay below the directory")
    return parts


@contextmanager
def _directory(root: int, parts: tuple[str, ...]) -> Iterator[int]:
    """A descriptor of a directory below root, made if missing."""
    current = os.dup(root)
    try:
        for part in parts:
            try:
                os.mkdir(part, 0o755, dir_fd=current)
            except FileExistsError:
                pass  # a directory is opened below, anything else is refused there
            below = os.open(part, _DIRECTORY, dir_fd=current)
            os.close(current)
            current = below
        yield current
    finally:
        os.close(current)


@contextmanager
def _place(root: int, parts: tuple[str, ...], name: str) -> Iterator[tuple[int, str]]:
    """Where a new entry goes: its directory and its last name, with an older file or link of that name removed."""
    if not parts:
        raise _refused(name, "has no name")
    with _directory(root, parts[:-1]) as directory:
        try:
            os.unlink(parts[-1], dir_fd=directory)
        except FileNotFoundError:
            pass
        yield directory, parts[-1]


def _write_file(tar: tarfile.TarFile, member: tarfile.TarInfo, root: int, parts: tuple[str, ...]) -> None:
    content = tar.extractfile(member)
    assert content is not None
    with _place(root, parts, member.name) as (directory, last):
        out = os.open(last, _NEW_FILE, 0o600, dir_fd=directory)
        with os.fdopen(out, "wb") as file:
            left = member.size
            while left:
                piece = content.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise _refused(member.name, "is cut short")
                file.write(piece)
                left -= len(piece)
            file.flush()
            os.fchmod(out, (stat.S_IMODE(member.mode) & 0o755) | 0o600)


def _hard_link(root: int, parts: tuple[str, ...], member: tarfile.TarInfo, files: set[tuple[str, ...]]) -> None:
    source = _parts(member.linkname, member.name)
    if source not in files:
        raise _refused(member.name, "is a hard link to no file of the tree")
    if source == parts:
        return
    with _directory(root, source[:-1]) as origin, _place(root, parts, member.name) as (directory, last):
        os.link(source[-1], last, src_dir_fd=origin, dst_dir_fd=directory, follow_symlinks=False)


def _symbolic_link(root: int, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
    steps = [part for part in member.linkname.split("/") if part not in ("", ".")]
    climbs = next((index for index, part in enumerate(steps) if part != ".."), len(steps))
    if member.linkname.startswith("/") or "\0" in member.linkname or ".." in steps[climbs:] or climbs > len(parts) - 1:
        raise _refused(member.name, f"links to {member.linkname[:200]!r}, which may lead out of the directory")
    with _place(root, parts, member.name) as (directory, last):
        os.symlink(member.linkname, last, dir_fd=directory)
