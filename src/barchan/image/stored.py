"""One layer in a blob store: under which keys, how its chunks come from there, and the file that stands for it here."""

import asyncio
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from barchan.errors import BlobCorrupt
from barchan.image.blobs import BlobStore
from barchan.image.chunks import INDEX_BYTES_MAX, ChunkIndex, decode_chunk, decode_index

LAZY_FORMAT = 1
_FILE_BYTES_MAX = INDEX_BYTES_MAX + (64 << 10)


def layer_prefix(layer: str) -> str:
    return f"layers/{layer}/"


def index_key(layer: str, index: str) -> str:
    """Where the index of digest `index` lies. The data's key names the index too, so that two encodings never mix."""
    return f"{layer_prefix(layer)}{index}.index"


def data_key(index: ChunkIndex) -> str:
    return f"{layer_prefix(index.layer)}{index.digest}.data"


async def read_index(store: BlobStore, layer: str, index: str) -> tuple[ChunkIndex, bytes]:
    """The index of that digest from a store, and as it is stored.

    Raises:
        BlobCorrupt: It is another, absurd, or of another layer.
        NotFound, Denied, TransportError: As `BlobStore.get`.
    """
    stored = await store.get(index_key(layer, index), INDEX_BYTES_MAX)
    found = await asyncio.to_thread(decode_index, stored, index)
    if found.layer != layer:
        raise BlobCorrupt(f"chunk index {index} in {store.url} is of layer {found.layer}, not of {layer}")
    return found, stored


async def read_chunks(store: BlobStore, index: ChunkIndex, chunks: range) -> list[bytes]:
    """The raw bytes of neighbouring chunks, by one request, each verified.

    Raises:
        BlobCorrupt: What came is not theirs. NotFound, Denied, TransportError: As `BlobStore.get_range`.
    """
    start, end = stored_range(index, chunks)
    stored = await store.get_range(data_key(index), start, end) if end > start else b""
    return await asyncio.to_thread(lambda: list(decode_all(index, chunks, stored)))


def stored_range(index: ChunkIndex, chunks: range) -> tuple[int, int]:
    """Where neighbouring chunks lie in the data."""
    last = index.stored(chunks[-1])
    return index.stored(chunks[0]).offset, last.offset + last.length


def decode_all(index: ChunkIndex, chunks: range, stored: bytes) -> Iterator[bytes]:
    """Each chunk of what lies at `stored_range`. Raises `BlobCorrupt`."""
    start = index.stored(chunks[0]).offset
    view = memoryview(stored)
    for chunk in chunks:
        place = index.stored(chunk)
        yield decode_chunk(index, chunk, view[place.offset - start : place.offset - start + place.length])


class _LazyForm(Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    url: str
    digest: str
    index: bytes


@dataclass(frozen=True, slots=True)
class LazyLayer:
    """What the file of a lazily kept layer says: where its data is, and its index, also as it is stored."""

    url: str
    index: ChunkIndex
    stored_index: bytes


def write_lazy(path: Path, url: str, index: str, stored_index: bytes) -> None:
    """Write the file that stands for a layer. `index`: the digest of `stored_index`."""
    form = _LazyForm(format=LAZY_FORMAT, url=url, digest=index, index=stored_index)
    write_durably(path, msgspec.msgpack.encode(form))


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is whole on the disk before it gets the name under which it is believed."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_lazy(path: Path) -> LazyLayer:
    """Read such a file; it blocks.

    Raises:
        BlobCorrupt: It is damaged, of another format, or of another layer than its name (DIGEST.lazy) says.
        FileNotFoundError: There is none.
    """
    with path.open("rb") as file:
        data = file.read(_FILE_BYTES_MAX)
    remedy = "(try: barchan image remove, then fetch the image again)"
    try:
        form = msgspec.msgpack.decode(data, type=_LazyForm)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BlobCorrupt(f"lazily kept layer {path.name} can't be read: {error} {remedy}") from error
    if form.format != LAZY_FORMAT:
        raise BlobCorrupt(f"lazily kept layer {path.name} has format {form.format}; this release reads {LAZY_FORMAT}")
    index = decode_index(form.index, form.digest)
    if index.layer != path.stem:
        raise BlobCorrupt(f"lazily kept layer {path.name} is of layer {index.layer} {remedy}")
    return LazyLayer(form.url, index, form.index)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
