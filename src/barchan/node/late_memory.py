"""The memory directory of a snapshot for one restore: all of it, or what a restore needs with the rest on demand."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from barchan.backends.base import Backend
from barchan.core.finished import finished
from barchan.errors import RequirementMissing
from barchan.model.snapshot import MemoryRecord
from barchan.node.memories import make_readable
from barchan.snapshot.pager.link import PagerLink
from barchan.snapshot.pager.source import may_come_late
from barchan.snapshot.shelf import Shelf


class Unpacked(Struct, frozen=True, kw_only=True):
    """What `Backend.restore` is given; `pager` is None where all memory is in the directory."""

    directory: Path
    record: MemoryRecord
    pager: PagerLink | None


@asynccontextmanager
async def unpacked(
    backend: Backend, shelf: Shelf, sandbox_id: str, snapshot_id: str, directory: Path
) -> AsyncIterator[Unpacked]:
    """Make `directory` for the restore of a sandbox, which happens inside; it is removed at the end.

    When what happens inside fails, no process of the sandbox is left, and if its memory could not be had, that is
    the error.

    Raises:
        NotFound, SnapshotCorrupt: The snapshot can't be used.
        CapacityError: The disk is full, or too much is being restored.
    """
    link = None
    try:
        try:
            record, link = await _prepare(backend, shelf, sandbox_id, snapshot_id, directory)
        except RequirementMissing:  # no pager: then all of it at once
            await finished(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))
            record = await finished(asyncio.to_thread(_unpack, shelf, snapshot_id, directory, None))
        yield Unpacked(directory=directory, record=record, pager=link)
    except BaseException as error:
        if link is not None:
            await finished(link.drop())
            cause = link.placed.exception() if link.placed.done() and not link.placed.cancelled() else None
            if cause is not None and isinstance(error, Exception):
                raise cause from error
        raise
    finally:
        await finished(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))


async def _prepare(
    backend: Backend, shelf: Shelf, sandbox_id: str, snapshot_id: str, directory: Path
) -> tuple[MemoryRecord, PagerLink | None]:
    """The pager gets ready while the directory is made."""
    loop = asyncio.get_running_loop()
    decided: asyncio.Future[bool] = loop.create_future()

    def decide(is_late: bool) -> None:
        loop.call_soon_threadsafe(decided.set_result, is_late)

    link = None
    unpacking = asyncio.ensure_future(asyncio.to_thread(_unpack, shelf, snapshot_id, directory, decide))
    try:
        either: set[asyncio.Future[Any]] = {decided, unpacking}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if decided.done() and decided.result():
            link = await backend.pager.serve(sandbox_id, snapshot_id)
        return await finished(unpacking), link
    except BaseException:
        await asyncio.wait({unpacking})
        if link is not None:
            await finished(link.drop())
        raise


def _unpack(shelf: Shelf, snapshot_id: str, directory: Path, decide: Callable[[bool], None] | None) -> MemoryRecord:
    """All of it, or, where `decide` is told of a pager, without what may come late."""
    with shelf.open(snapshot_id) as file:
        is_late = decide is not None and may_come_late(file)
        if decide is not None:
            decide(is_late)
        file.unpack(directory, leave_lazy=is_late)
        make_readable(directory)
        return file.record
