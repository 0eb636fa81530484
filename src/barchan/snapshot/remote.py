"""Memory snapshots in a blob store: the template as all images are there, and each packed file under its digest.

    memory/DIGEST.mem    a packed file, as docs/formats/memory-file.md has it

A file is sent after those that it needs, so what can be found is complete; it is verified whole before it is used.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from msgspec import Struct

from barchan.core.finished import finished
from barchan.errors import BlobCorrupt, NotFound, SnapshotCorrupt
from barchan.image.blobs import BlobStore, no_room
from barchan.image.remote import Progress, fetch
from barchan.image.remote import push as push_image
from barchan.image.store import ImageStore
from barchan.image.template import Template
from barchan.snapshot.form import FILE_BYTES_MAX, HEADER_BYTES, Header, decode_header
from barchan.snapshot.memory_file import MemoryFile
from barchan.snapshot.shelf import Shelf

RANGE_BYTES = 8 << 20  # of one request
REQUESTS_AT_ONCE = 4
_FILE_MODE = 0o600


class SnapshotPushed(Struct, frozen=True, kw_only=True):
    """What a push did: the digests under which another node finds it, and bytes that were sent.

    Attributes:
        template: Of the image.
        memory: Of the packed file.
    """

    template: str
    memory: str
    bytes_sent: int


async def push(
    images: ImageStore, template: str, shelf: Shelf, snapshot_id: str, store: BlobStore, progress: Progress
) -> SnapshotPushed:
    """Put a memory snapshot into a store: its image, by name or digest, and its packed files; not what is there.

    Raises:
        NotFound: No such image or snapshot here.
        SnapshotCorrupt: The packed file, or one that it needs, is not whole.
        InvalidSpec, BlobCorrupt, CapacityError, Denied, TransportError: As `image.remote.push`.
    """
    image = await push_image(images, template, store, progress)
    digest = (await asyncio.to_thread(images.resolve, template)).digest
    entry = await asyncio.to_thread(shelf.entry, snapshot_id)
    sent = 0
    async with _holding(shelf, needed := (*entry.bases, entry.digest)):
        for one in needed:
            sent += await _send(shelf, one, store, progress)
    return SnapshotPushed(template=digest, memory=entry.digest, bytes_sent=image.bytes_sent + sent)


async def pull(
    images: ImageStore,
    template: str,
    shelf: Shelf,
    snapshot_id: str,
    memory: str,
    store: BlobStore,
    progress: Progress,
    *,
    local_name: str | None = None,
) -> Template:
    """Get a memory snapshot from a store: its image, whose layers come on demand, and its packed files, whole.

    Args:
        template, memory: Digests of the image and of the packed file.
        snapshot_id: What the snapshot is called on this shelf; a new id.
        local_name: What its image is called here; None: `sha256-` and 16 digits.

    Raises:
        NotFound: The store has no such image, or no such file.
        Conflict: There is a snapshot of that id.
        BlobCorrupt, SnapshotCorrupt: What the store has is damaged.
        CapacityError, Denied, TransportError: The disk is full, the store refuses, is slow or dead.

    Cancellation: What came whole may stay on the disk; no snapshot is made.
    """
    found = await fetch(images, template, store, local_name=local_name)
    header = await _header(store, memory)
    needed = (*header.bases, memory)
    async with _holding(shelf, needed):
        for digest in needed:
            if not shelf.has(digest):
                await _bring(shelf, digest, store, progress)
        await finished(asyncio.to_thread(shelf.name, snapshot_id, memory))
    return found


def memory_key(digest: str) -> str:
    return f"memory/{digest}.mem"


@asynccontextmanager
async def _holding(shelf: Shelf, digests: tuple[str, ...]) -> AsyncIterator[None]:
    """As `Shelf.holding`, whose end may remove large files, in threads."""
    entered = ExitStack()
    try:
        await finished(asyncio.to_thread(entered.enter_context, shelf.holding(digests)))
        yield
    finally:
        await finished(asyncio.to_thread(entered.close))


async def _send(shelf: Shelf, digest: str, store: BlobStore, progress: Progress) -> int:
    path = await asyncio.to_thread(shelf.find, digest)
    size = (await asyncio.to_thread(os.stat, path)).st_size
    if await _is_there(store, digest, size):
        return 0
    await store.put_file(memory_key(digest), path, lambda done: progress(f"memory {digest[:12]}: sending", done, size))
    return size


async def _is_there(store: BlobStore, digest: str, size: int) -> bool:
    if await store.size(memory_key(digest)) != size:
        return False
    try:
        return (await _header(store, digest)).file_bytes == size
    except (BlobCorrupt, SnapshotCorrupt):  # something else lies there, and is written over
        return False


async def _header(store: BlobStore, digest: str) -> Header:
    key = memory_key(digest)
    try:
        found = decode_header(await store.get_range(key, 0, HEADER_BYTES), Path(key))
    except NotFound as error:
        raise NotFound(f"no memory snapshot {digest} in {store.url}", memory=digest) from error
    if found.digest != digest or found.file_bytes > FILE_BYTES_MAX:
        raise SnapshotCorrupt(f"{key} in {store.url} is another file, or absurd (try: push the snapshot again)")
    return found


async def _bring(shelf: Shelf, digest: str, store: BlobStore, progress: Progress) -> None:
    size = (await _header(store, digest)).file_bytes
    await asyncio.to_thread(shelf.check_room, size)
    beside = shelf.beside()
    try:
        try:
            await _download(store, digest, size, beside, progress)
        except OSError as error:
            raise no_room(error, f"memory snapshot {digest} of {size} bytes") from error
        await finished(asyncio.to_thread(_check, beside, digest))
        await finished(asyncio.to_thread(shelf.take, beside))
    finally:
        await finished(asyncio.to_thread(beside.unlink, missing_ok=True))


async def _download(store: BlobStore, digest: str, size: int, target: Path, progress: Progress) -> None:
    done = 0
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    try:
        starts = iter(range(0, size, RANGE_BYTES))  # shared: each worker takes the next

        async def work() -> None:
            nonlocal done
            for start in starts:
                data = await store.get_range(memory_key(digest), start, min(start + RANGE_BYTES, size))
                await finished(asyncio.to_thread(_write, fd, data, start))
                done += len(data)
                progress(f"memory {digest[:12]}", done, size)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(REQUESTS_AT_ONCE):
                    group.create_task(work())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        await finished(asyncio.to_thread(os.fsync, fd))
    finally:
        os.close(fd)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _check(path: Path, digest: str) -> None:
    with MemoryFile.open(path) as opened:
        if opened.digest != digest:
            raise SnapshotCorrupt(f"instead of memory snapshot {digest}, the store gave {opened.digest}")
        opened.verify()
