"""What the packed file of a memory snapshot says of itself; docs/formats/memory-file.md has the format.

    header    256 bytes: which format, where the index is and its sha256, which other files hold pages of this one
    chunks    stored back to back: first those of the small files, then those of the pages
    keys      16 bytes a stored page, by which later snapshots find equal pages
    index     one zstd frame: files, page runs, lengths and sha256 of all chunks

The sha256 of the index is the file's digest: it vouches for every byte, since the index has the sha256 of all others.
"""

import hashlib
import itertools
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, NamedTuple, NoReturn

import msgspec
from msgspec import Meta, Struct

from barchan.errors import SnapshotCorrupt
from barchan.image.zstd import compress, decompress
from barchan.snapshot.pagemap import PAGE_BYTES

FORMAT = 1
CHUNK_PAGES = 32
CHUNK_BYTES = CHUNK_PAGES * PAGE_BYTES
BASES_MAX = 4  # other files whose pages one may use; a restore opens them all
PAGES_MAX = 1 << 24  # 64 GiB
FILES_MAX = 1 << 16
FILES_BYTES_MAX = 4 << 30  # of small files: spools, and files that the guest has unlinked
INDEX_BYTES_MAX = 512 << 20
KEY_BYTES = 16
FILE_BYTES_MAX = PAGES_MAX * (PAGE_BYTES + KEY_BYTES) + FILES_BYTES_MAX + INDEX_BYTES_MAX + (1 << 10)
LEVEL = 1
ZEROS, OWN = 255, 0  # sources of a run; from 1 on: the base of that number
_MAGIC = b"BARCHMEM"
_HEADER = struct.Struct("<8sIIQQ32s128s32x")
_SEAL_BYTES = 32
HEADER_BYTES = _HEADER.size + _SEAL_BYTES
_HASH_BYTES = 32
_AS_IT_IS = 1 << 31  # in a stored length: not compressed
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
_PathName = Annotated[str, Meta(min_length=1, max_length=4096)]
_Bytes = Annotated[int, Meta(ge=0, le=FILES_BYTES_MAX)]
_Pages = Annotated[int, Meta(ge=0, le=PAGES_MAX)]


class Header(NamedTuple):
    """Where the index of a file is, in bytes, and which bases it has."""

    digest: str
    bases: tuple[str, ...]
    index_start: int
    index_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.index_start + self.index_bytes


class IndexForm(Struct, frozen=True, forbid_unknown_fields=True):
    """The index as it is stored.

    Attributes:
        folders: Folders of the memory directory, parents first.
        files: Small files, as path and size; their bytes lie one after the other in the first chunks.
        pages_files: CRIU's pages files, as path and size in pages; their pages are numbered through.
        slots: Pages that this file stores; slot S is in the chunk S // 32 of the pages.
        run_pages, run_sources, run_slots: Runs of pages, in order: u32 how many, u8 whence, u32 the slot of the first.
        lengths: u32 a chunk. hashes: sha256 of each chunk as it is stored.
        keys_hash: sha256 of the keys.
    """

    format: int
    bases: Annotated[tuple[_Digest, ...], Meta(max_length=BASES_MAX)]
    folders: Annotated[tuple[_PathName, ...], Meta(max_length=FILES_MAX)]
    files: Annotated[tuple[tuple[_PathName, _Bytes], ...], Meta(max_length=FILES_MAX)]
    pages_files: Annotated[tuple[tuple[_PathName, _Pages], ...], Meta(max_length=FILES_MAX)]
    slots: _Pages
    run_pages: bytes
    run_sources: bytes
    run_slots: bytes
    lengths: bytes
    hashes: bytes
    keys_hash: bytes


class Stored(NamedTuple):
    """Where a chunk lies in the file."""

    offset: int
    length: int
    is_compressed: bool


class Place(NamedTuple):
    """Where neighbouring pages are: `source` ZEROS, OWN or a base's number; `slot` of the first one there."""

    first: int
    pages: int
    source: int
    slot: int


class Index:
    """An index, checked to be within bounds and to agree with itself.

    Attributes:
        digest: Its sha256 (hex).
        pages: Pages of all pages files together, zeros and those of bases included.
    """

    def __init__(self, form: IndexForm, header: Header) -> None:
        self.header = header
        self.digest, self.bases = header.digest, header.bases
        self.folders, self.files, self.pages_files = form.folders, form.files, form.pages_files
        self.slots, self.keys_hash = form.slots, form.keys_hash
        self.file_bytes = sum(size for _, size in form.files)
        self.file_chunks = -(-self.file_bytes // CHUNK_BYTES)
        self._run_pages, self._run_slots = _u32(form.run_pages), _u32(form.run_slots)
        self._run_sources = form.run_sources
        self._starts = array("Q", itertools.accumulate(self._run_pages, initial=0))
        self.pages = self._starts[-1]
        self._lengths, self._hashes = _u32(form.lengths), form.hashes
        self._offsets = array("Q", itertools.accumulate((n & ~_AS_IT_IS for n in self._lengths), initial=HEADER_BYTES))
        self.keys_start = self._offsets[-1]
        self._check()

    @property
    def chunks(self) -> int:
        return len(self._lengths)

    def stored(self, chunk: int) -> Stored:
        length = self._lengths[chunk]
        return Stored(self._offsets[chunk], length & ~_AS_IT_IS, not length & _AS_IT_IS)

    def chunk_bytes(self, chunk: int) -> int:
        """Of a chunk when unpacked."""
        if chunk < self.file_chunks:
            return min(CHUNK_BYTES, self.file_bytes - chunk * CHUNK_BYTES)
        return min(CHUNK_PAGES, self.slots - (chunk - self.file_chunks) * CHUNK_PAGES) * PAGE_BYTES

    def decode(self, chunk: int, stored: bytes) -> bytes:
        """The bytes of a chunk. Raises `SnapshotCorrupt`: these are not its."""
        try:
            if hashlib.sha256(stored).digest() != self._hashes[chunk * _HASH_BYTES : (chunk + 1) * _HASH_BYTES]:
                raise ValueError("its sha256 is another")
            size = self.chunk_bytes(chunk)
            if self._lengths[chunk] & _AS_IT_IS:
                if len(stored) != size:
                    raise ValueError(f"it has {len(stored)} bytes instead of {size}")
                return stored
            return decompress(stored, size, exactly=True)
        except ValueError as error:
            corrupt(self.digest, f"chunk {chunk}: {error}")

    def places(self, first: int, pages: int) -> Iterator[Place]:
        """Where the pages from number `first` on are, in order. Raises `IndexError` if there are not so many."""
        if not 0 <= first <= first + pages <= self.pages:
            raise IndexError(f"pages {first} to {first + pages} of {self.pages}")
        run = bisect_right(self._starts, first) - 1
        while pages > 0:
            skipped = first - self._starts[run]
            count = min(pages, self._run_pages[run] - skipped)
            source = self._run_sources[run]
            yield Place(first, count, source, 0 if source == ZEROS else self._run_slots[run] + skipped)
            first, pages, run = first + count, pages - count, run + 1

    def pages_from(self, source: int) -> int:
        """How many pages come from there."""
        return sum(pages for pages, found in zip(self._run_pages, self._run_sources, strict=True) if found == source)

    def _check(self) -> None:
        digest = self.digest
        _check_names(self)
        if not len(self._run_pages) == len(self._run_slots) == len(self._run_sources):
            corrupt(digest, "its runs are cut short")
        if self.pages > PAGES_MAX or sum(pages for _, pages in self.pages_files) != self.pages:
            corrupt(digest, f"its runs have {self.pages} pages, and its pages files others")
        if self.file_bytes > FILES_BYTES_MAX:
            corrupt(digest, f"its small files have {self.file_bytes} bytes")
        for pages, source, slot in zip(self._run_pages, self._run_sources, self._run_slots, strict=True):
            if not pages or (source != ZEROS and source > len(self.bases)):
                corrupt(digest, "it has a run of nothing, or from nowhere")
            if source == OWN and slot + pages > self.slots:
                corrupt(digest, f"it has a run past its {self.slots} stored pages")
        chunks = self.file_chunks + -(-self.slots // CHUNK_PAGES)
        if self.chunks != chunks or len(self._hashes) != _HASH_BYTES * chunks:
            corrupt(digest, f"it does not describe {chunks} chunks")
        for chunk, length in enumerate(self._lengths):
            if not 0 < length & ~_AS_IT_IS <= self.chunk_bytes(chunk):
                corrupt(digest, f"chunk {chunk} is said to be stored as {length & ~_AS_IT_IS} bytes")
        if self.header.index_start != self.keys_start + KEY_BYTES * self.slots:
            corrupt(digest, "its header and its index disagree on its size")


def decode_header(data: bytes, path: Path) -> Header:
    """Read the first `HEADER_BYTES` of a file. Raises `SnapshotCorrupt`."""
    if len(data) != HEADER_BYTES or data[: len(_MAGIC)] != _MAGIC:
        corrupt(path.name, "it is no packed memory snapshot")
    if hashlib.sha256(data[:-_SEAL_BYTES]).digest() != data[-_SEAL_BYTES:]:
        corrupt(path.name, "its header is damaged")
    _, version, bases, index_start, index_bytes, digest, names = _HEADER.unpack(data[: _HEADER.size])
    if version != FORMAT:
        corrupt(path.name, f"it has format {version}, and this release reads {FORMAT}")
    if bases > BASES_MAX or index_bytes > INDEX_BYTES_MAX or index_start < HEADER_BYTES:
        corrupt(path.name, "its header is past the limits")
    found = tuple(names[_HASH_BYTES * n : _HASH_BYTES * (n + 1)].hex() for n in range(bases))
    return Header(digest.hex(), found, index_start, index_bytes)


def encode_header(header: Header) -> bytes:
    names = b"".join(bytes.fromhex(base) for base in header.bases)
    digest = bytes.fromhex(header.digest)
    head = _HEADER.pack(_MAGIC, FORMAT, len(header.bases), header.index_start, header.index_bytes, digest, names)
    return head + hashlib.sha256(head).digest()


def decode_index(stored: bytes, header: Header) -> Index:
    """Read an index, of the digest that the header names. Raises `SnapshotCorrupt`."""
    if hashlib.sha256(stored).hexdigest() != header.digest:
        corrupt(header.digest, "its index has another sha256")
    try:
        form = msgspec.msgpack.decode(decompress(stored, INDEX_BYTES_MAX), type=IndexForm)
        if form.format != FORMAT or form.bases != header.bases:
            raise ValueError("its header and its index disagree")
        return Index(form, header)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        corrupt(header.digest, f"its index can't be read: {error}")


def encode_index(form: IndexForm) -> bytes:
    return compress(msgspec.msgpack.encode(form), LEVEL)


def encode_chunk(raw: bytes) -> tuple[bytes, int, bytes]:
    """A chunk as it is stored, its length as the index has it, and its sha256."""
    small = compress(raw, LEVEL)
    stored, flag = (small, 0) if len(small) < len(raw) else (raw, _AS_IT_IS)
    return stored, len(stored) | flag, hashlib.sha256(stored).digest()


def corrupt(what: str, why: str) -> NoReturn:
    raise SnapshotCorrupt(f"memory snapshot {what}: {why} (try: an older snapshot; this one can't be restored)")


def _u32(data: bytes) -> "array[int]":
    return array("I", data)


def _check_names(index: Index) -> None:
    """Each path is one below the memory directory, there once, in a folder that is made before."""
    folders = {PurePosixPath(".")}
    seen: set[PurePosixPath] = set()
    names = [*index.folders, *(name for name, _ in index.files), *(name for name, _ in index.pages_files)]
    for number, name in enumerate(names):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name or path in seen:
            corrupt(index.digest, f"it has a file of the name {name!r}")
        if path.parent not in folders:
            corrupt(index.digest, f"it has {name!r}, and no folder for it")
        seen.add(path)
        if number < len(index.folders):
            folders.add(path)
