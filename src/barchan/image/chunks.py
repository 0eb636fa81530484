"""A layer cut into chunks, each compressed on its own, so that any bytes of it can be had without the rest.

    data    the stored chunks back to back; a chunk of zeros has no bytes, one that does not shrink is kept as it is
    index   says where each chunk lies and what its sha256 is; itself named by its sha256

docs/formats/blob-store.md has the formats. Encoding the same file with the same zstd library gives the same bytes.
"""

import hashlib
import itertools
import os
import struct
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple, NoReturn

import msgspec
from msgspec import Meta, Struct

from barchan.errors import BlobCorrupt
from barchan.image.zstd import compress, decompress

FORMAT = 1
CHUNK_BYTES = 64 << 10
CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 4 << 10, 4 << 20
LAYER_BYTES_MAX = 64 << 30
CHUNKS_MAX = 1 << 20
INDEX_BYTES_MAX = 48 << 20  # 36 bytes a chunk, and some
FIRST_BYTES_MAX = 256 << 20
FIRST_RANGES_MAX = 16
THREADS = 4
_LEVEL = 3
_BATCH_BYTES = 4 << 20  # work for one thread at a time: long enough that handing it over costs nothing
_AS_IT_IS = 1 << 31  # in a stored length: not compressed
_HASH_BYTES = 32
_EROFS_MAGIC = 0xE0F5E1E2
_SUPERBLOCK = 1024
_BLOCK_BYTES = 4096
_REMEDY = "(try: push the image to another store, or remove the layer's blobs there and push again)"


class _IndexForm(Struct, frozen=True, forbid_unknown_fields=True):
    """The index as it is stored. `lengths`: u32 little-endian a chunk; `hashes`: sha256 of each raw chunk."""

    format: int
    layer: str
    raw_bytes: int
    chunk_bytes: int
    first: Annotated[tuple[tuple[int, int], ...], Meta(max_length=FIRST_RANGES_MAX)]
    lengths: bytes
    hashes: bytes


class Stored(NamedTuple):
    """Where a chunk lies in the data; `length` 0: it is all zeros."""

    offset: int
    length: int
    compressed: bool


class ChunkIndex:
    """Where the bytes of one layer are, checked to be within bounds.

    Attributes:
        digest: sha256 (hex) of the stored index, which is its name.
        layer: sha256 (hex) of the layer's whole file of `raw_bytes` bytes.
        chunk_bytes: Raw size of each chunk but the last.
        stored_bytes: Size of the data.
        first: Byte ranges (start, end) of the layer that a mount reads before all others.
    """

    def __init__(self, digest: str, form: _IndexForm) -> None:
        self.digest = digest
        self.layer = form.layer
        self.raw_bytes = form.raw_bytes
        self.chunk_bytes = form.chunk_bytes
        self.first = form.first
        self.count = -(-form.raw_bytes // form.chunk_bytes)
        self._lengths = array("I", form.lengths)
        self._offsets = array("Q", itertools.accumulate((n & ~_AS_IT_IS for n in self._lengths), initial=0))
        self._hashes = form.hashes
        self.stored_bytes = self._offsets[-1]

    def stored(self, chunk: int) -> Stored:
        length = self._lengths[chunk]
        return Stored(self._offsets[chunk], length & ~_AS_IT_IS, not length & _AS_IT_IS)

    def sha256(self, chunk: int) -> bytes:
        """Of the raw chunk."""
        return self._hashes[chunk * _HASH_BYTES : (chunk + 1) * _HASH_BYTES]

    def describes(self, other: "ChunkIndex") -> bool:
        """Whether both say the same of the raw bytes; they may be stored differently."""
        return (self.raw_bytes, self.chunk_bytes, self._hashes) == (other.raw_bytes, other.chunk_bytes, other._hashes)

    def size(self, chunk: int) -> int:
        """Raw bytes of a chunk."""
        return min(self.chunk_bytes, self.raw_bytes - chunk * self.chunk_bytes)

    def chunks(self, start: int, end: int) -> range:
        """The chunks that hold bytes `start` up to `end` of the layer."""
        end = min(end, self.raw_bytes)
        return range(start // self.chunk_bytes, -(-end // self.chunk_bytes)) if start < end else range(0)

    def first_chunks(self) -> list[int]:
        """The chunks of `first`, in order, each once."""
        return sorted({chunk for start, end in self.first for chunk in self.chunks(start, end)})


def decode_index(stored: bytes, digest: str) -> ChunkIndex:
    """Read an index as it came from a store.

    Raises:
        BlobCorrupt: It is not the one of that digest, or says what can't be.
    """
    if hashlib.sha256(stored).hexdigest() != digest:
        _refuse(digest, "its sha256 is another")
    try:
        form = msgspec.msgpack.decode(decompress(stored, INDEX_BYTES_MAX), type=_IndexForm)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise BlobCorrupt(
            f"chunk index {digest}: {error} (try: push the image again from where it is whole)"
        ) from error
    _check(digest, form)
    return ChunkIndex(digest, form)


def _check(digest: str, form: _IndexForm) -> None:
    if form.format != FORMAT:
        _refuse(digest, f"it has format {form.format}, and this release reads {FORMAT}")
    if len(form.layer) != 64 or set(form.layer) - set("0123456789abcdef"):
        _refuse(digest, "it names no layer")
    size = form.chunk_bytes
    if not CHUNK_BYTES_MIN <= size <= CHUNK_BYTES_MAX or size & (size - 1):
        _refuse(digest, f"chunks of {size} bytes are not a power of two from {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}")
    count = -(-form.raw_bytes // size)
    if not 0 < form.raw_bytes <= LAYER_BYTES_MAX or count > CHUNKS_MAX:
        _refuse(digest, f"a layer of {form.raw_bytes} bytes in {count} chunks is past the limits")
    if len(form.lengths) != 4 * count or len(form.hashes) != _HASH_BYTES * count:
        _refuse(digest, f"it does not describe {count} chunks")
    for chunk, length in enumerate(array("I", form.lengths)):
        raw = min(size, form.raw_bytes - chunk * size)
        stored = length & ~_AS_IT_IS
        if stored > raw or (length & _AS_IT_IS and stored != raw):
            _refuse(digest, f"chunk {chunk} of {raw} bytes is said to be stored as {stored}")
    before = 0
    for start, end in form.first:
        if not before <= start < end <= form.raw_bytes:
            _refuse(digest, "what is to be read first is outside of the layer, or not in order")
        before = end
    if sum(end - start for start, end in form.first) > FIRST_BYTES_MAX:
        _refuse(digest, f"more than {FIRST_BYTES_MAX} bytes are to be read first")


def _refuse(digest: str, why: str) -> NoReturn:
    raise BlobCorrupt(f"chunk index {digest}: {why} {_REMEDY}")


def decode_chunk(index: ChunkIndex, chunk: int, stored: bytes | memoryview) -> bytes:
    """The raw bytes of a chunk.

    Args:
        stored: What lies at `index.stored(chunk)`; empty for a chunk of zeros.

    Raises:
        BlobCorrupt: These are not its bytes.
    """
    size = index.size(chunk)
    place = index.stored(chunk)
    try:
        if len(stored) != place.length:
            raise ValueError(f"{len(stored)} bytes instead of {place.length}")
        if place.length == 0:
            raw = bytes(size)
        else:
            raw = decompress(stored, size, exactly=True) if place.compressed else bytes(stored)
        if hashlib.sha256(raw).digest() != index.sha256(chunk):
            raise ValueError("its sha256 is another")
    except ValueError as error:
        raise BlobCorrupt(
            f"chunk {chunk} of layer {index.layer}: {error} {_REMEDY}", layer=index.layer, chunk=chunk
        ) from error
    return raw


def encode_layer(
    source: Path, layer: str, data: Path, *, chunk_bytes: int = CHUNK_BYTES, threads: int = THREADS
) -> tuple[ChunkIndex, bytes]:
    """Write a layer's chunks to the new file `data`; returns their index, and the index as it is stored.

    It blocks. Memory: 8 MiB a thread and 36 bytes a chunk.

    Args:
        source: An EROFS file.
        layer: Its sha256 (hex).

    Raises:
        BlobCorrupt: The file has another sha256.
        RequirementMissing: There is no zstd library.
    """
    lengths, hashes, whole = array("I"), bytearray(), hashlib.sha256()
    with source.open("rb") as file, data.open("xb") as out:
        raw_bytes = os.fstat(file.fileno()).st_size
        if not 0 < raw_bytes <= min(LAYER_BYTES_MAX, CHUNKS_MAX * chunk_bytes):
            raise BlobCorrupt(f"layer {layer} has {raw_bytes} bytes, which no store takes")
        first = _first_ranges(file, raw_bytes)
        file.seek(0)
        with ThreadPoolExecutor(threads, "barchan-chunks") as pool:
            under_way: deque[Future[list[_Packed]]] = deque()
            for batch in _batches(file, chunk_bytes):
                under_way.append(pool.submit(_pack, batch, chunk_bytes))
                whole.update(batch)
                if len(under_way) > threads:
                    _write(under_way.popleft().result(), out, lengths, hashes)
            while under_way:
                _write(under_way.popleft().result(), out, lengths, hashes)
    if whole.hexdigest() != layer:
        raise BlobCorrupt(f"layer {layer} is damaged here: its sha256 is {whole.hexdigest()} (try: build it again)")
    form = _IndexForm(
        format=FORMAT,
        layer=layer,
        raw_bytes=raw_bytes,
        chunk_bytes=chunk_bytes,
        first=first,
        lengths=lengths.tobytes(),
        hashes=bytes(hashes),
    )
    stored = compress(msgspec.msgpack.encode(form), _LEVEL)
    return ChunkIndex(hashlib.sha256(stored).hexdigest(), form), stored


def is_index_of(index: ChunkIndex, source: Path) -> bool:
    """Whether every chunk of a file has the sha256 that the index says. Blocking: it reads the whole file."""
    with source.open("rb") as file:
        if os.fstat(file.fileno()).st_size != index.raw_bytes:
            return False
        return all(
            hashlib.sha256(file.read(index.chunk_bytes)).digest() == index.sha256(chunk) for chunk in range(index.count)
        )


class _Packed(NamedTuple):
    stored: bytes
    length: int  # as the index has it
    sha256: bytes


def _batches(file: BinaryIO, chunk_bytes: int) -> Iterator[bytes]:
    size = max(_BATCH_BYTES, chunk_bytes)  # a multiple of the chunk size: both are powers of two
    while batch := file.read(size):
        yield batch


def _pack(batch: bytes, chunk_bytes: int) -> list[_Packed]:
    found = []
    for start in range(0, len(batch), chunk_bytes):
        raw = batch[start : start + chunk_bytes]
        sha256 = hashlib.sha256(raw).digest()
        if raw == bytes(len(raw)):
            found.append(_Packed(b"", 0, sha256))
            continue
        small = compress(raw, _LEVEL)
        if len(small) < len(raw):
            found.append(_Packed(small, len(small), sha256))
        else:
            found.append(_Packed(raw, len(raw) | _AS_IT_IS, sha256))
    return found


def _write(packed: list[_Packed], out: BinaryIO, lengths: "array[int]", hashes: bytearray) -> None:
    for chunk in packed:
        out.write(chunk.stored)
        lengths.append(chunk.length)
        hashes += chunk.sha256


def _first_ranges(file: BinaryIO, raw_bytes: int) -> tuple[tuple[int, int], ...]:
    """The superblock, and the metadata where it is one region at the end, as `barchan-pack` writes it."""
    file.seek(_SUPERBLOCK)
    head = file.read(128)
    superblock = (0, min(_BLOCK_BYTES, raw_bytes))
    if len(head) < 128 or struct.unpack_from("<I", head)[0] != _EROFS_MAGIC:
        return (superblock,)
    start = struct.unpack_from("<I", head, 40)[0] * _BLOCK_BYTES
    if not _BLOCK_BYTES <= start < raw_bytes or raw_bytes - start > FIRST_BYTES_MAX - _BLOCK_BYTES:
        return (superblock,)
    return (superblock, (start, raw_bytes))
