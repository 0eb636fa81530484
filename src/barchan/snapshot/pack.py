"""A memory directory made one file: zeros left out, equal pages kept once, the rest in compressed chunks."""

import errno
import hashlib
import os
import re
import secrets
import stat
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from barchan.errors import BackendError
from barchan.image.disk import needs_room, sync_directory
from barchan.snapshot.form import (
    BASES_MAX,
    CHUNK_BYTES,
    CHUNK_PAGES,
    FILES_BYTES_MAX,
    FILES_MAX,
    FORMAT,
    HEADER_BYTES,
    KEY_BYTES,
    OWN,
    PAGES_MAX,
    ZEROS,
    Header,
    IndexForm,
    encode_chunk,
    encode_header,
    encode_index,
)
from barchan.snapshot.memory_file import PAGEMAP, RECORD, THREADS, MemoryFile
from barchan.snapshot.pagemap import PAGE_BYTES, decode_pagemap

TEMPORARY = ".part"  # the end of the name of a file that is not finished
_BATCH_BYTES = 1 << 20
_JOBS_PER_THREAD = 8
_SEEN_MAX = 1 << 20  # pages by which equal ones are found: 4 GiB of them, in about 150 MB
_FILE_MODE = 0o600
_PAGES_FILE = re.compile(r"criu/pages-[0-9]+\.img|ram|disk")
_WITHOUT_MAP = ("ram", "disk")  # of a machine: all of its memory, and the disk that goes with it
_ZEROS = bytes(PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class PackedMemory:
    """What a pack made.

    Attributes:
        digest: Of the file: sha256 (hex) of its index.
        file_bytes: Its size.
        raw_bytes: Size of everything it holds, unpacked.
        pages: Pages of the dump; `pages_zero` of them are zeros, `pages_base` lie in bases.
        pages_own: Pages that the file itself stores, equal ones once.
        bases: Digests of the files that hold those of `pages_base`.
    """

    digest: str
    file_bytes: int
    raw_bytes: int
    pages: int
    pages_zero: int
    pages_own: int
    pages_base: int
    bases: tuple[str, ...]


def pack(memory: Path, target: Path, *, base: MemoryFile | None = None) -> PackedMemory:
    """Write a memory directory as the new file `target`; it blocks, and is durable when it returns.

    Args:
        base: Pages that it, or its bases, have are not stored again.

    Raises:
        BackendError: The directory is no complete dump of its own, or past the limits of the format.
        CapacityError: The disk is full; nothing is left.
        RequirementMissing: There is no zstd library.
    """
    found = _look(memory)
    beside = target.with_name(f"{target.name}.{secrets.token_hex(6)}{TEMPORARY}")
    try:
        with needs_room(target.parent, "a memory snapshot"):
            with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, _FILE_MODE)) as out:
                packed = _Packer(out, base).pack(found)
                out.flush()
                os.fsync(out.fileno())
            beside.rename(target)
            sync_directory(target.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return packed


@dataclass(frozen=True, slots=True)
class _Found:
    """A memory directory: its folders, small files with their sizes, pages files with their pages, in order."""

    root: Path
    folders: tuple[str, ...]
    files: tuple[tuple[str, int], ...]
    pages_files: tuple[tuple[str, int], ...]


def _look(memory: Path) -> _Found:
    folders, files, pages_files = [], [], []
    for top, inner, names in os.walk(memory, onerror=_raise):
        inner.sort()
        here = Path(top).relative_to(memory)
        folders += [(here / name).as_posix() for name in inner]
        for name in sorted([*names, *(name for name in inner if os.path.islink(os.path.join(top, name)))]):
            path = (here / name).as_posix()
            status = os.lstat(memory / path)
            if not stat.S_ISREG(status.st_mode):
                _refuse(memory, f"{path} is no plain file")
            if _PAGES_FILE.fullmatch(path):
                pages_files.append((path, status.st_size // PAGE_BYTES))
                if status.st_size % PAGE_BYTES:
                    _refuse(memory, f"{path} has {status.st_size} bytes, which are no whole pages")
            else:
                files.append((path, status.st_size))
    if RECORD not in (name for name, _ in files):
        _refuse(memory, f"it has no {RECORD}")
    if (pages := sum(pages for _, pages in pages_files)) > PAGES_MAX:
        _refuse(memory, f"it has {pages} pages, and no snapshot more than {PAGES_MAX}")
    if (size := sum(size for _, size in files)) > FILES_BYTES_MAX:
        _refuse(memory, f"its small files have {size} bytes, and those of no snapshot more than {FILES_BYTES_MAX}")
    if max(len(folders), len(files), len(pages_files)) > FILES_MAX:
        _refuse(memory, f"it has more than {FILES_MAX} files")
    _check_maps(memory, [name for name, _ in files if PAGEMAP.fullmatch(name)], dict(pages_files))
    return _Found(memory, tuple(folders), tuple(files), tuple(pages_files))


def _check_maps(memory: Path, maps: list[str], pages_files: dict[str, int]) -> None:
    """Each pages file belongs to one page map, and has the pages that the map says."""
    left = {name: pages for name, pages in pages_files.items() if name not in _WITHOUT_MAP}
    for name in maps:
        try:
            found = decode_pagemap((memory / name).read_bytes())
        except ValueError as error:
            _refuse(memory, f"{name}: {error}")
        if found.pages != left.pop(f"criu/pages-{found.pages_id}.img", 0):
            _refuse(memory, f"{name} and its pages file disagree on how many pages there are")
    if left:
        _refuse(memory, f"{min(left)} belongs to no page map")


def _raise(error: OSError) -> None:
    raise error


def _refuse(memory: Path, why: str) -> None:
    raise BackendError(f"the dump in {memory} can't be packed: {why} (try: dump the sandbox again)")


class _Packer:
    """One file while it is written. Keys and runs are made here, in order; threads compress behind."""

    def __init__(self, out: BinaryIO, base: MemoryFile | None) -> None:
        self._out = out
        self._lengths, self._hashes = array("I"), bytearray()
        self._run_pages, self._run_sources, self._run_slots = array("I"), bytearray(), array("I")
        self._keys = bytearray()
        self._slots = 0
        self._pending: list[bytes] = []  # pages of the chunk that is being filled
        self._seen: dict[bytes, tuple[int, int]] = {}
        self._bases: tuple[str, ...] = ()
        self._under_way: deque[Future[tuple[bytes, int, bytes]]] = deque()
        if base is not None:
            self._learn(base)

    def pack(self, found: _Found) -> PackedMemory:
        self._out.write(bytes(HEADER_BYTES))
        with ThreadPoolExecutor(THREADS, "barchan-memory") as self._pool:
            for chunk in _file_chunks(found):
                self._submit(chunk)
            for name, pages in found.pages_files:
                self._add_pages(found.root / name, pages)
            self._close_chunk()
            while self._under_way:
                self._write()
        self._out.write(self._keys)
        used = sorted({source for source in self._run_sources if source not in (OWN, ZEROS)})
        renumbered = bytes.maketrans(bytes(used), bytes(range(1, len(used) + 1)))
        bases = tuple(self._bases[source - 1] for source in used)
        form = IndexForm(
            format=FORMAT,
            bases=bases,
            folders=found.folders,
            files=found.files,
            pages_files=found.pages_files,
            slots=self._slots,
            run_pages=self._run_pages.tobytes(),
            run_sources=bytes(self._run_sources).translate(renumbered),
            run_slots=self._run_slots.tobytes(),
            lengths=self._lengths.tobytes(),
            hashes=bytes(self._hashes),
            keys_hash=hashlib.sha256(self._keys).digest(),
        )
        stored = encode_index(form)
        header = Header(hashlib.sha256(stored).hexdigest(), bases, self._out.tell(), len(stored))
        self._out.write(stored)
        self._out.seek(0)
        self._out.write(encode_header(header))
        by_source = Counter[int]()
        for count, source in zip(self._run_pages, self._run_sources, strict=True):
            by_source[source] += count
        pages = by_source.total()
        return PackedMemory(
            digest=header.digest,
            file_bytes=header.file_bytes,
            raw_bytes=pages * PAGE_BYTES + sum(size for _, size in found.files),
            pages=pages,
            pages_zero=by_source[ZEROS],
            pages_own=self._slots,
            pages_base=pages - by_source[ZEROS] - by_source[OWN],
            bases=bases,
        )

    def _learn(self, base: MemoryFile) -> None:
        """Which pages need not be stored: those of a base and of its bases, which come from where they lie.

        A file refers to each of its bases itself, so that a restore needs no chain; the bases that give this base
        the fewest pages are left out where they would be too many.
        """
        numbers = sorted(range(1, len(base.bases) + 1), key=base.index.pages_from, reverse=True)[: BASES_MAX - 1]
        held = [base, *(base.base(number) for number in numbers)]
        self._bases = tuple(one.digest for one in held)
        for number, one in enumerate(held, 1):
            keys = one.keys()
            for slot in range(min(one.index.slots, _SEEN_MAX - len(self._seen))):
                self._seen.setdefault(keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES], (number, slot))

    def _add_pages(self, path: Path, pages: int) -> None:
        at, end = 0, pages * PAGE_BYTES
        with path.open("rb") as file:
            while at < end:
                data = _next_data(file.fileno(), at, end)
                if data > at:
                    self._extend(ZEROS, 0, (data - at) // PAGE_BYTES)
                    at = data
                    file.seek(at)
                    continue
                batch = file.read(min(end - at, _BATCH_BYTES))
                if not batch or len(batch) % PAGE_BYTES:
                    raise BackendError(f"{path} became shorter while it was packed (try: dump the sandbox again)")
                at += len(batch)
                for start in range(0, len(batch), PAGE_BYTES):
                    self._add(batch[start : start + PAGE_BYTES])

    def _add(self, page: bytes) -> None:
        if page == _ZEROS:
            self._extend(ZEROS, 0)
            return
        # Of 128 bits: a guest that made two pages of one key, which it can't, would only find one of them changed.
        key = hashlib.sha256(page).digest()[:KEY_BYTES]
        known = self._seen.get(key)
        if known is not None:
            self._extend(*known)
            return
        slot = self._slots
        if len(self._seen) < _SEEN_MAX:
            self._seen[key] = (OWN, slot)
        self._slots += 1
        self._keys += key
        self._extend(OWN, slot)
        self._pending.append(page)
        if len(self._pending) == CHUNK_PAGES:
            self._close_chunk()

    def _extend(self, source: int, slot: int, pages: int = 1) -> None:
        """More pages: a longer run, or a new one."""
        if self._run_sources and self._run_sources[-1] == source:
            count = self._run_pages[-1]
            if source == ZEROS or self._run_slots[-1] + count == slot:
                self._run_pages[-1] = count + pages
                return
        self._run_pages.append(pages)
        self._run_sources.append(source)
        self._run_slots.append(slot)

    def _close_chunk(self) -> None:
        if self._pending:
            self._submit(b"".join(self._pending))
            self._pending.clear()

    def _submit(self, raw: bytes) -> None:
        self._under_way.append(self._pool.submit(encode_chunk, raw))
        if len(self._under_way) > _JOBS_PER_THREAD * THREADS:
            self._write()

    def _write(self) -> None:
        stored, length, sha256 = self._under_way.popleft().result()
        self._out.write(stored)
        self._lengths.append(length)
        self._hashes += sha256


def _next_data(fd: int, at: int, end: int) -> int:
    """Where the next page with data begins, from a page's beginning on; `end`: only holes follow."""
    try:
        return min(end, os.lseek(fd, at, os.SEEK_DATA) // PAGE_BYTES * PAGE_BYTES)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return end


def _file_chunks(found: _Found) -> Iterator[bytes]:
    """The small files one after the other, in pieces of a chunk."""
    pending = bytearray()
    for name, size in found.files:
        with (found.root / name).open("rb") as file:
            while size > 0:
                part = file.read(min(size, CHUNK_BYTES))
                if not part:
                    raise BackendError(f"{found.root / name} became shorter while it was packed (try: dump again)")
                size -= len(part)
                pending += part
                while len(pending) >= CHUNK_BYTES:
                    yield bytes(pending[:CHUNK_BYTES])
                    del pending[:CHUNK_BYTES]
    if pending:
        yield bytes(pending)
