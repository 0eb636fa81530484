"""The memory directory of a snapshot for one restore: all of it, or what a restore needs with the rest on demand.

A container's restore begins when all but the pages are there: CRIU needs a while until it reads pages, and waits for
the lock of a file beside them (guest/criu/pages.c), which says then whether they are complete.
"""

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from barchan.backends.base import Backend
from barchan.core.finished import finished
from barchan.errors import BootFailed, RequirementMissing
from barchan.model.snapshot import MemoryRecord
from barchan.node.memories import make_readable
from barchan.snapshot.pager.link import PagerLink
from barchan.snapshot.pager.source import may_come_late
from barchan.snapshot.shelf import Shelf

COMPLETE = "criu/complete"  # locked while pages are written, and empty unless all were
WAITS_FOR_PAGES = "container"  # the backend whose restores do


class Unpacked(Struct, frozen=True, kw_only=True):
    """What `Backend.restore` is given; `pager` is None where all memory is in the directory, or comes into it."""

    directory: Path
    record: MemoryRecord
    pager: PagerLink | None


class _Unpacking:
    """A directory that is made in a thread, in steps that are told of.

    Attributes:
        decided: Whether a pager is to bring what may come late.
        begun: The record, once a restore may begin.
        ended: All is there.
    """

    def __init__(self, shelf: Shelf, snapshot_id: str, directory: Path, *, may_be_late: bool) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self.decided: asyncio.Future[bool] = loop.create_future()
        self.begun: asyncio.Future[MemoryRecord] = loop.create_future()
        self.ended = asyncio.ensure_future(asyncio.to_thread(self._run, shelf, snapshot_id, directory, may_be_late))

    async def until(self, step: asyncio.Future[Any]) -> None:
        """Wait for a step. What stands in its way is raised."""
        either: set[asyncio.Future[Any]] = {step, self.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            self.ended.result()

    def _run(self, shelf: Shelf, snapshot_id: str, directory: Path, may_be_late: bool) -> None:
        with shelf.open(snapshot_id) as file:
            is_late = may_be_late and may_come_late(file)
            self._tell(self.decided, is_late)
            file.unpack_files(directory)
            record = file.record
            if record.backend != WAITS_FOR_PAGES:
                file.unpack_pages(directory)
                self._tell(self.begun, record)
                return
            complete = os.open(directory / COMPLETE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(complete, fcntl.LOCK_EX)
                make_readable(directory)
                self._tell(self.begun, record)
                file.unpack_pages(directory, leave_lazy=is_late)
                os.write(complete, b"1")
            finally:
                os.close(complete)

    def _tell(self, step: asyncio.Future[Any], value: object) -> None:
        self._loop.call_soon_threadsafe(step.set_result, value)


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
    unpacking = _Unpacking(shelf, snapshot_id, directory, may_be_late=True)
    try:
        try:
            link = await _pager(unpacking, backend, sandbox_id, snapshot_id)
        except (RequirementMissing, BootFailed):  # no pager: then all of it at once
            await asyncio.wait({unpacking.ended})
            await finished(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))
            unpacking = _Unpacking(shelf, snapshot_id, directory, may_be_late=False)
        await unpacking.until(unpacking.begun)
        yield Unpacked(directory=directory, record=unpacking.begun.result(), pager=link)
        await finished(unpacking.ended)
    except BaseException as error:
        await asyncio.wait({unpacking.ended})
        causes: list[asyncio.Future[Any]] = [unpacking.ended]
        if link is not None:
            await finished(link.drop())
            causes = [link.placed, unpacking.ended]
        for known in causes:
            cause = known.exception() if known.done() and not known.cancelled() else None
            if cause is not None and cause is not error and isinstance(error, Exception):
                raise cause from error
        raise
    finally:
        await finished(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))


async def _pager(unpacking: _Unpacking, backend: Backend, sandbox_id: str, snapshot_id: str) -> PagerLink | None:
    """It gets ready while the directory is made."""
    await unpacking.until(unpacking.decided)
    return await backend.pager.serve(sandbox_id, snapshot_id) if unpacking.decided.result() else None
