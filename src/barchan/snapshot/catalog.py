"""Snapshots in a blob store by their ids: what a node has to know of one before it can start sandboxes of it.

    snapshots/ID.json

It is written last, after the image and the memory that it names, and never changed: an id stands for one moment of one
sandbox, wherever it lies.
"""

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from barchan.errors import BlobCorrupt, Conflict, NotFound
from barchan.image.blobs import BlobStore
from barchan.model.sandbox import Name, SandboxSpec
from barchan.model.snapshot_info import SnapshotId, SnapshotKind

FORMAT = 1
_BYTES_MAX = 4 << 20
_ID = re.compile(r"snap_[0-9a-f]{16}")
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, Meta(ge=0)]


class StoredSnapshot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One snapshot.

    Attributes:
        image: Name of its image; `is_named`: somebody chose that.
        template: Digest of its image in the store.
        memory: Digest of its packed memory there; empty: it has none.
        parent: Id of the snapshot that it came of; empty: of none.
        spec: Of the sandbox that it was made of.
        memory_bytes: Size of the packed memory; `resident_bytes`: what that took before.
        frozen_s: For how long its guest had stood still when its memory was stored.
    """

    snapshot_id: SnapshotId
    kind: SnapshotKind
    image: Name
    is_named: bool
    template: _Digest
    memory: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$")] = ""
    parent: Annotated[str, Meta(pattern=r"^(snap_[0-9a-f]{16})?$")] = ""
    sandbox_id: Annotated[str, Meta(max_length=128)]
    spec: SandboxSpec
    metadata: dict[str, str]
    created_unix_s: float
    memory_bytes: _Count = 0
    resident_bytes: _Count = 0
    frozen_s: Annotated[float, Meta(ge=0)] = 0.0
    format: int = FORMAT


async def write(store: BlobStore, snapshot: StoredSnapshot) -> None:
    """Say that a snapshot lies in the store. Its image and memory must be there already. Safe to repeat.

    Raises:
        Conflict: Another one lies there under this id.
        InvalidSpec, BlobCorrupt, CapacityError, Denied, TransportError: As `BlobStore.put_new`.
    """
    if await store.put_new(_key(snapshot.snapshot_id), msgspec.json.encode(snapshot)):
        return
    there = await read(store, snapshot.snapshot_id)
    if (there.template, there.memory) != (snapshot.template, snapshot.memory):
        raise Conflict(f"another snapshot lies in {store.url} as {snapshot.snapshot_id}", snapshot=snapshot.snapshot_id)


async def read(store: BlobStore, snapshot_id: str) -> StoredSnapshot:
    """What the store has under an id.

    Raises:
        NotFound: No snapshot of this id.
        BlobCorrupt: It can't be read, or is of another one.
        Denied, TransportError: As `BlobStore.get`.
    """
    key = _key(snapshot_id)
    try:
        data = await store.get(key, _BYTES_MAX)
    except NotFound as error:
        raise NotFound(f"no snapshot {snapshot_id} in {store.url}", snapshot_id=snapshot_id) from error
    try:
        found = msgspec.json.decode(data, type=StoredSnapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BlobCorrupt(
            f"{key} in {store.url} can't be read: {error} (try: a node of the release that wrote it)"
        ) from error
    if (found.format, found.snapshot_id, bool(found.memory)) != (FORMAT, snapshot_id, found.kind == "memory"):
        raise BlobCorrupt(f"{key} in {store.url} is of another snapshot, kind or format")
    return found


def _key(snapshot_id: str) -> str:
    if not _ID.fullmatch(snapshot_id):
        raise NotFound(f"{snapshot_id!r} is no id of a snapshot")
    return f"snapshots/{snapshot_id}.json"
