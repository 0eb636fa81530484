"""Whole layers out of a blob store: large ranges, several at once, each chunk verified before it is written."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from barchan.core.finished import finished
from barchan.errors import BlobCorrupt
from barchan.image.blobs import BlobStore, no_room
from barchan.image.chunks import ChunkIndex
from barchan.image.erofs import check_file
from barchan.image.stored import data_key, decode_all, file_sha256, stored_range

if TYPE_CHECKING:
    from barchan.image.remote import Progress

RANGE_BYTES = 8 << 20  # stored bytes of one request
RAW_BYTES = 32 << 20  # of one request, raw: what is in memory at once is this times the requests
REQUESTS_AT_ONCE = 4
TRIES = 2  # of a range whose bytes are wrong: the way from the store may have been at fault


class Downloads:
    """The layers of one pull, with a bound on their requests together."""

    def __init__(self, store: BlobStore, progress: "Progress") -> None:
        self._store, self._progress = store, progress
        self._requests = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def layer(self, index: ChunkIndex, target: Path) -> None:
        """Write the layer's whole file to the new file `target`; what is zeros stays a hole.

        Raises:
            BlobCorrupt: A chunk, or the whole, has another sha256, or it is no file system that our packer writes.
            RequirementMissing: The layer is compressed, as earlier releases made them.
            CapacityError: The disk is full.
            NotFound, Denied, TransportError: As `BlobStore.get_range`.
        """
        done = 0
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, index.raw_bytes)
            runs = _runs(index)

            async def work() -> None:
                nonlocal done
                for run in runs:  # shared: each worker takes the next
                    async with self._requests:
                        await self._run(index, run, fd)
                    start, end = stored_range(index, run)
                    done += end - start
                    self._progress(f"layer {index.layer[:12]}", done, index.stored_bytes)

            async with asyncio.TaskGroup() as group:
                for _ in range(REQUESTS_AT_ONCE):
                    group.create_task(work())
        finally:
            os.close(fd)
        found = await finished(asyncio.to_thread(file_sha256, target))
        if found != index.layer:
            raise BlobCorrupt(f"layer {index.layer} from {self._store.url} came out as {found}: its index is wrong")
        await finished(asyncio.to_thread(check_file, target))

    async def _run(self, index: ChunkIndex, run: range, fd: int) -> None:
        start, end = stored_range(index, run)
        for left in reversed(range(TRIES)):
            stored = await self._store.get_range(data_key(index), start, end)
            try:
                await finished(asyncio.to_thread(_write, index, run, stored, fd))
            except BlobCorrupt:
                if not left:
                    raise
            else:
                return


def _runs(index: ChunkIndex) -> Iterator[range]:
    """Neighbouring chunks that have bytes, by request."""
    first, stored = 0, 0
    for chunk in range(index.count):
        length = index.stored(chunk).length
        ends = stored + length > RANGE_BYTES or (chunk - first) * index.chunk_bytes >= RAW_BYTES
        if first < chunk and (not length or ends):
            yield range(first, chunk)
            first, stored = chunk, 0
        if not length:
            first = chunk + 1
        stored += length
    if first < index.count:
        yield range(first, index.count)


def _write(index: ChunkIndex, run: range, stored: bytes, fd: int) -> None:
    offset = run[0] * index.chunk_bytes
    try:
        for raw in decode_all(index, run, stored):
            view = memoryview(raw)
            while view:
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
    except OSError as error:
        raise no_room(error, f"layer {index.layer} of {index.raw_bytes} bytes") from error
