"""The packed file of a memory snapshot: opened, read at any place, unpacked."""

import hashlib
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from barchan.image.disk import needs_room
from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.form import (
    CHUNK_BYTES,
    CHUNK_PAGES,
    HEADER_BYTES,
    KEY_BYTES,
    OWN,
    ZEROS,
    Header,
    Index,
    Place,
    corrupt,
    decode_header,
    decode_index,
)
from barchan.snapshot.pagemap import PAGE_BYTES, decode_pagemap

RECORD = "record.json"
PAGEMAP = re.compile(r"criu/pagemap-(?:shmem-)?[0-9]+\.img")
THREADS = min(4, os.cpu_count() or 1)
_PART = ".part"  # the end of the name of a file whose pages are not there yet
_JOB_CHUNKS = 8  # for one thread at a time: long enough that handing them over costs little
_ALONE_MAX = 48  # chunks that one thread has unpacked before several have begun
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700  # what a guest had in memory is nobody else's

FindBase = Callable[[str], Path]
"""Where the file of a digest is. Raises `NotFound` or `SnapshotCorrupt` if it is not there."""


class PageRun(NamedTuple):
    """Pages of an address space: where they begin, how many, and the number of the first in the memory file.

    `is_lazy`: they may come after the process goes on; CRIU reads others from the pages file itself.
    """

    address: int
    pages: int
    first: int
    is_lazy: bool


class _Piece(NamedTuple):
    """Where some pages of one chunk go: a file, an offset there, the first page in the chunk, how many."""

    fd: int
    offset: int
    page: int
    pages: int


def read_header(path: Path) -> Header:
    """What the header of a file says, if the file has the size that it should have; the rest is not looked at.

    Raises:
        SnapshotCorrupt: It is no such file, or is cut short.
        FileNotFoundError: There is none.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _header(fd, path)
    finally:
        os.close(fd)


def _header(fd: int, path: Path) -> Header:
    header = decode_header(os.pread(fd, HEADER_BYTES, 0), path)
    if (size := os.fstat(fd).st_size) != header.file_bytes:
        corrupt(path.name, f"it has {size} bytes instead of {header.file_bytes}")
    return header


class MemoryFile:
    """One file, open; safe to use from several threads. Closed by `close` or as a context manager.

    Attributes:
        index: What it holds.
    """

    def __init__(self, path: Path, fd: int, index: Index) -> None:
        self.path, self.index = path, index
        self._fd = fd
        self._bases: list[MemoryFile] = []

    @classmethod
    def open(cls, path: Path, bases: FindBase | None = None) -> Self:
        """Open a file and its bases; it blocks. Headers and indexes are verified now, everything else when it is read.

        Args:
            bases: None leaves the bases closed: their pages can't be read then.

        Raises:
            SnapshotCorrupt: It is not what was written.
            RequirementMissing: There is no zstd library.
            FileNotFoundError: There is none.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = _header(fd, path)
            stored = os.pread(fd, header.index_bytes, header.index_start)
            opened = cls(path, fd, decode_index(stored, header))
        except BaseException:
            os.close(fd)
            raise
        try:
            if bases is not None:
                opened._open_bases(bases)
        except BaseException:
            opened.close()
            raise
        return opened

    @property
    def digest(self) -> str:
        return self.index.digest

    @property
    def bases(self) -> tuple[str, ...]:
        """Digests of the files that hold some of its pages."""
        return self.index.bases

    @property
    def record(self) -> MemoryRecord:
        """What the dump's record says. Raises `SnapshotCorrupt`: it is none."""
        try:
            return msgspec.json.decode(self.read_file(RECORD), type=MemoryRecord)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            corrupt(self.digest, f"its record can't be read: {error}")

    def close(self) -> None:
        for base in self._bases:
            base.close()
        self._bases.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def files(self) -> dict[str, int]:
        """Its small files, and how many bytes each has."""
        return dict(self.index.files)

    def read_file(self, name: str) -> bytes:
        """A small file. Raises `SnapshotCorrupt`, also if there is none."""
        start = 0
        for found, size in self.index.files:
            if found == name:
                return self._file_bytes(start, size)
            start += size
        corrupt(self.digest, f"it has no {name}")

    def page_maps(self) -> dict[str, list[PageRun]]:
        """The runs of pages of each of CRIU's page maps, by the map's path (`criu/pagemap-17.img`).

        Pages that a map does not list are zeros, or the content of a file that the guest has mapped.

        Raises:
            SnapshotCorrupt: A map is damaged, or disagrees with its pages file.
        """
        starts, start = {}, 0
        for name, pages in self.index.pages_files:
            starts[name] = (start, pages)
            start += pages
        maps = {}
        for name in filter(PAGEMAP.fullmatch, self.files()):
            try:
                found = decode_pagemap(self.read_file(name))
            except ValueError as error:
                corrupt(self.digest, f"{name}: {error}")
            first, pages = starts.get(f"criu/pages-{found.pages_id}.img", (0, 0))
            if found.pages != pages:
                corrupt(self.digest, f"{name} has {found.pages} pages, and its pages file {pages}")
            runs = []
            for run in found.runs:
                if run.is_present:
                    runs.append(PageRun(run.address, run.pages, first, run.is_lazy))
                    first += run.pages
            maps[name] = runs
        return maps

    def places(self, first: int, pages: int) -> list[Place]:
        """Where pages are, from number `first` on. Raises `IndexError`."""
        return list(self.index.places(first, pages))

    def read_chunk(self, source: int, chunk: int) -> bytes:
        """Up to 32 stored pages: those from slot `chunk` * 32 on, of this file (source 0) or of a base.

        Raises:
            SnapshotCorrupt: They are not what was written, or the base is not here.
        """
        holder = self if source == OWN else self.base(source)
        number = holder.index.file_chunks + chunk
        if not 0 <= chunk < holder.index.chunks - holder.index.file_chunks:
            corrupt(self.digest, f"it uses chunk {chunk} of {holder.digest}, which has none such")
        return holder._read(number)

    def read_pages(self, first: int, pages: int) -> bytes:
        """The content of pages, from number `first` on. Raises `IndexError`, `SnapshotCorrupt`."""
        out = bytearray(pages * PAGE_BYTES)
        for place in self.index.places(first, pages):
            at = (place.first - first) * PAGE_BYTES
            for chunk, page, count in _chunks(place):
                raw = self.read_chunk(place.source, chunk)
                out[at : at + count * PAGE_BYTES] = self._part(raw, page, count)
                at += count * PAGE_BYTES
        return bytes(out)

    def unpack(self, target: Path, *, leave_lazy: bool = False) -> None:
        """Make the memory directory again at `target`, which must not exist; it blocks. Zeros become holes.

        Args:
            leave_lazy: Pages that may come on demand after the restore are holes, too.

        Raises:
            SnapshotCorrupt: Something is not what was written; `target` is then there in part.
            CapacityError: The disk is full; the same.
        """
        self.unpack_files(target)
        self.unpack_pages(target, leave_lazy=leave_lazy)

    def unpack_files(self, target: Path) -> None:
        """The first part of `unpack`: all but the files of pages, which have other names and are holes."""
        with needs_room(target, "a memory snapshot"):
            target.mkdir(_FOLDER_MODE)
            for name in self.index.folders:
                (target / name).mkdir(_FOLDER_MODE)
            self._unpack_files(target)
            for name, pages in self.index.pages_files:
                with open(target / f"{name}{_PART}", "xb", opener=_private) as file:
                    file.truncate(pages * PAGE_BYTES)

    def unpack_pages(self, target: Path, *, leave_lazy: bool = False) -> None:
        """The second part of `unpack`."""
        wanted = [(0, self.index.pages)]
        if leave_lazy:
            runs = sorted((run.first, run.pages, run.is_lazy) for found in self.page_maps().values() for run in found)
            wanted = [(first, pages) for first, pages, is_lazy in runs if not is_lazy]
        with needs_room(target, "a memory snapshot"):
            self._unpack_pages(target, wanted)
            for name, _ in self.index.pages_files:
                (target / f"{name}{_PART}").rename(target / name)

    def verify(self) -> None:
        """Read everything of this file, not of its bases. Raises `SnapshotCorrupt`."""
        with ThreadPoolExecutor(THREADS, "barchan-memory") as pool:
            for _ in pool.map(self._read, range(self.index.chunks)):
                pass
        self.keys()

    def keys(self) -> bytes:
        """16 bytes for each page that it stores, by slot: equal pages have equal keys. Raises `SnapshotCorrupt`."""
        found = os.pread(self._fd, KEY_BYTES * self.index.slots, self.index.keys_start)
        if hashlib.sha256(found).digest() != self.index.keys_hash:
            corrupt(self.digest, "its keys have another sha256")
        return found

    def base(self, source: int) -> "MemoryFile":
        """The open base of that number, from 1 on."""
        if not 0 < source <= len(self._bases):
            corrupt(self.digest, f"its base {source} was not opened with it")
        return self._bases[source - 1]

    def _open_bases(self, find: FindBase) -> None:
        for digest in self.bases:
            self._bases.append(base := MemoryFile.open(find(digest)))
            if base.digest != digest:
                corrupt(self.digest, f"instead of its base {digest} there is {base.digest}")

    def _read(self, chunk: int) -> bytes:
        place = self.index.stored(chunk)
        return self.index.decode(chunk, os.pread(self._fd, place.length, place.offset))

    def _part(self, raw: bytes, page: int, pages: int) -> memoryview:
        start, end = page * PAGE_BYTES, (page + pages) * PAGE_BYTES
        if end > len(raw):
            corrupt(self.digest, "it uses pages of a base that the base does not have")
        return memoryview(raw)[start:end]

    def _file_bytes(self, start: int, size: int) -> bytes:
        if not size:
            return b""
        chunks = range(start // CHUNK_BYTES, -(-(start + size) // CHUNK_BYTES))
        whole = b"".join(map(self._read, chunks))
        skipped = start - chunks[0] * CHUNK_BYTES
        return whole[skipped : skipped + size]

    def _unpack_files(self, target: Path) -> None:
        """Chunk by chunk: a small file is as large as a guest can make it."""
        chunk, raw, start = -1, b"", 0
        for name, size in self.index.files:
            with open(target / name, "xb", opener=_private) as out:
                while size > 0:
                    if start // CHUNK_BYTES != chunk:
                        chunk = start // CHUNK_BYTES
                        raw = self._read(chunk)
                    part = raw[start % CHUNK_BYTES :][:size]
                    out.write(part)
                    start, size = start + len(part), size - len(part)

    def _unpack_pages(self, target: Path, wanted: list[tuple[int, int]]) -> None:
        """Fill the pages files with what they have of the ranges of pages `wanted`, which are in order."""
        with ExitStack() as opened:
            pieces: dict[tuple[int, int], list[_Piece]] = defaultdict(list)
            ranges = deque(wanted)
            start = 0
            for name, pages in self.index.pages_files:
                fd = os.open(target / f"{name}{_PART}", os.O_WRONLY | os.O_CLOEXEC)
                opened.callback(os.close, fd)
                while ranges and ranges[0][0] < start + pages:
                    first, left = ranges.popleft()
                    inside = min(left, start + pages - first)
                    if inside < left:
                        ranges.appendleft((first + inside, left - inside))
                    for place in self.index.places(first, inside):
                        at = (place.first - start) * PAGE_BYTES
                        for chunk, page, count in _chunks(place):
                            pieces[place.source, chunk].append(_Piece(fd, at, page, count))
                            at += count * PAGE_BYTES
                start += pages
            by_chunk = list(pieces.items())
            if len(by_chunk) <= _ALONE_MAX:
                self._write_pages(by_chunk)
                return
            jobs = [by_chunk[at : at + _JOB_CHUNKS] for at in range(0, len(by_chunk), _JOB_CHUNKS)]
            with ThreadPoolExecutor(THREADS, "barchan-memory") as pool:
                for _ in pool.map(self._write_pages, jobs):
                    pass

    def _write_pages(self, job: list[tuple[tuple[int, int], list[_Piece]]]) -> None:
        for (source, chunk), pieces in job:
            raw = self.read_chunk(source, chunk)
            for piece in pieces:
                view, offset = self._part(raw, piece.page, piece.pages), piece.offset
                while view:
                    written = os.pwrite(piece.fd, view, offset)
                    view, offset = view[written:], offset + written


def _chunks(place: Place) -> Iterator[tuple[int, int, int]]:
    """A place by chunk: its number, the first page in it, how many pages. None of zeros."""
    slot, pages = place.slot, 0 if place.source == ZEROS else place.pages
    while pages > 0:
        page = slot % CHUNK_PAGES
        count = min(pages, CHUNK_PAGES - page)
        yield slot // CHUNK_PAGES, page, count
        slot, pages = slot + count, pages - count


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, _FILE_MODE)
