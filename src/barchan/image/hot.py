"""What sandboxes of a template read first, kept beside it in the store, so that the next node can have it before.

A record is a hint: it says what to fetch early, never what the bytes are.
"""

from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from barchan.errors import BlobCorrupt, NotFound
from barchan.image.blobs import BlobStore
from barchan.image.chunks import CHUNKS_MAX

HOT_BYTES_MAX = 64 << 20  # of raw layer data that one record names
_FILE_BYTES_MAX = 4 << 20

_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
_Chunk = Annotated[int, Meta(ge=0, lt=CHUNKS_MAX)]
HotRecord: TypeAlias = tuple[tuple[_Digest, tuple[_Chunk, ...]], ...]
"""(layer digest, numbers of chunks) in the order of their first touch; a layer may come several times."""


def hot_key(template_digest: str) -> str:
    return f"hot/{template_digest}.json"


async def read_hot(store: BlobStore, template_digest: str) -> HotRecord:
    """The record of a template; empty: there is none.

    Raises:
        BlobCorrupt: It is no record. Denied, TransportError: As `BlobStore.get`.
    """
    key = hot_key(template_digest)
    try:
        data = await store.get(key, _FILE_BYTES_MAX)
    except NotFound:
        return ()
    try:
        return msgspec.json.decode(data, type=HotRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BlobCorrupt(f"{key} in {store.url}: {error} (try: remove it; the next sandbox makes another)") from error


def cut_hot(record: HotRecord, chunk_bytes: Mapping[str, int]) -> HotRecord:
    """What is wanted of a record that anybody may have written: of known layers, and no more than one may name.

    Args:
        chunk_bytes: Of each layer, by its digest; others are left out.
    """
    left, wanted = HOT_BYTES_MAX, list[tuple[str, tuple[int, ...]]]()
    for layer, chunks in record:
        if layer in chunk_bytes and (some := chunks[: left // chunk_bytes[layer]]):
            left -= len(some) * chunk_bytes[layer]
            wanted.append((layer, some))
    return tuple(wanted)


async def write_hot(store: BlobStore, template_digest: str, record: HotRecord) -> None:
    """Store the record of a template; of two that do so at once, one stays. Raises as `BlobStore.put`."""
    await store.put(hot_key(template_digest), msgspec.json.encode(record))


def merge_hot(one: HotRecord, other: HotRecord, *, chunk_bytes: int, bytes_max: int = HOT_BYTES_MAX) -> HotRecord:
    """Both records as one of at most `bytes_max`: what came early in either comes early."""
    rank: dict[tuple[str, int], int] = {}
    for record in (one, other):
        touched = dict.fromkeys((layer, chunk) for layer, chunks in record for chunk in chunks)
        for position, touch in enumerate(touched):
            rank[touch] = min(position, rank.get(touch, position))
    merged: list[tuple[str, list[int]]] = []
    for layer, chunk in sorted(rank, key=rank.__getitem__)[: bytes_max // chunk_bytes]:
        if not merged or merged[-1][0] != layer:
            merged.append((layer, []))
        merged[-1][1].append(chunk)
    return tuple((layer, tuple(chunks)) for layer, chunks in merged)
