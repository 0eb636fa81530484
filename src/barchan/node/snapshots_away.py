"""Snapshots in a blob store: sent there by one node, and had from there by any number of others, under the same id."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from barchan.errors import BlobUnavailable, Conflict, NotFound, TransportError
from barchan.image import remote as images_remote
from barchan.image.blobs import BlobStore
from barchan.image.template import Template
from barchan.model.snapshot_info import SnapshotInfo, SnapshotPush
from barchan.node import snapshots
from barchan.node.away import store_of
from barchan.node.snapshot_journal import SnapshotRow
from barchan.snapshot import catalog, remote
from barchan.snapshot.catalog import StoredSnapshot

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes


async def push(sandboxes: "Sandboxes", snapshot_id: str) -> SnapshotPush:
    """Send a snapshot to the node's store: its image, its memory, then what says so.

    Raises:
        NotFound: No such snapshot here. Conflict: The node has no store, or another snapshot lies there under this id.
        BlobUnavailable: The store is slow or dead. CapacityError, Denied, InvalidSpec: It takes nothing.
        SnapshotCorrupt: The packed memory is not whole.

    Cancellation: What was sent stays there, and nobody finds it; a repetition goes on from it.
    """
    row = sandboxes.tree.row(snapshot_id)
    store = store_of(sandboxes)
    assert row.digest is not None
    async with _reaching(store, f"snapshot {snapshot_id} can't be sent to"):
        if row.kind == "memory":
            pushed = await remote.push(sandboxes.images, row.digest, sandboxes.shelf, snapshot_id, store, _quiet)
            memory, bytes_sent = pushed.memory, pushed.bytes_sent
        else:
            image = await images_remote.push(sandboxes.images, row.digest, store, _quiet)
            memory, bytes_sent = "", image.bytes_sent
        await catalog.write(store, _stored(row, row.digest, memory))
    return SnapshotPush(snapshot_id=snapshot_id, store=store.url, bytes_sent=bytes_sent)


async def pull(sandboxes: "Sandboxes", snapshot_id: str, name: str | None) -> SnapshotInfo:
    """Have a snapshot of the node's store here: its memory whole, its files on demand. One that is here stays as it is.

    Whether its memory can go on here is seen when a sandbox is made of it.

    Raises:
        NotFound: The store has no such snapshot.
        Conflict: The node has no store, or another image has that name.
        BlobUnavailable: The store is slow or dead. BlobCorrupt, SnapshotCorrupt: What it has is damaged.
        CapacityError: No room on the disk.
    """
    async with sandboxes.tree.turn(snapshot_id):
        try:
            return await sandboxes.tree.info(snapshot_id)
        except NotFound:
            pass
        store = store_of(sandboxes)
        async with _reaching(store, f"snapshot {snapshot_id} can't be had from"):
            found = await catalog.read(store, snapshot_id)
            row = _row(found, name)
            is_here = _is_here(sandboxes, row.image, found.template)
            return await sandboxes.tree.receive(row, lambda: _bring(sandboxes, store, found, row.image, is_here))


async def _bring(
    sandboxes: "Sandboxes", store: BlobStore, found: StoredSnapshot, image: str, is_here: bool
) -> Template:
    images = sandboxes.images
    try:
        if found.kind == "fs":
            return await images_remote.fetch(images, found.template, store, local_name=image)
        return await remote.pull(
            *(images, found.template, sandboxes.shelf, found.snapshot_id, found.memory, store, _quiet),
            local_name=image,
        )
    except BaseException:
        if not is_here and images.find(image) is not None:
            await asyncio.shield(snapshots.remove_image(sandboxes, image))
        raise


def _is_here(sandboxes: "Sandboxes", image: str, digest: str) -> bool:
    """Whether the image is here already. Raises `Conflict` if its name is another one's."""
    there = sandboxes.images.find(image)
    if there is not None and there.digest != digest:
        raise Conflict(
            f"another image of this node is called {image} (try: pull the snapshot under another name)", image=image
        )
    return there is not None


def _stored(row: SnapshotRow, template: str, memory: str) -> StoredSnapshot:
    return StoredSnapshot(
        snapshot_id=row.snapshot_id,
        kind=row.kind,
        image=row.image,
        is_named=row.is_named,
        template=template,
        memory=memory,
        parent=row.parent,
        sandbox_id=row.sandbox_id,
        spec=row.spec,
        metadata=row.metadata,
        created_unix_s=row.created_unix_s,
        memory_bytes=row.memory_bytes,
        resident_bytes=row.resident_bytes,
        frozen_s=row.frozen_s,
    )


def _row(found: StoredSnapshot, name: str | None) -> SnapshotRow:
    return SnapshotRow(
        snapshot_id=found.snapshot_id,
        kind=found.kind,
        image=name or found.image,
        digest=None,
        parent=found.parent,
        is_named=name is not None or found.is_named,
        sandbox_id=found.sandbox_id,
        spec=found.spec,
        metadata=found.metadata,
        created_unix_s=found.created_unix_s,
        memory_bytes=found.memory_bytes,
        resident_bytes=found.resident_bytes,
        frozen_s=found.frozen_s,
    )


@asynccontextmanager
async def _reaching(store: BlobStore, what: str) -> AsyncIterator[None]:
    try:
        yield
    except TransportError as error:  # which a client would take for its own way to this node
        raise BlobUnavailable(f"{what} {store.url} now: {error}") from error


def _quiet(_what: str, _done: int, _total: int) -> None:
    return
