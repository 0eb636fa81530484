"""One sandbox whose memory comes in: from CRIU's connection to the last page."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from msgspec import Struct

from barchan.errors import BackendError, BarchanError
from barchan.snapshot.form import CHUNK_PAGES, ZEROS
from barchan.snapshot.pager.handover import Handover
from barchan.snapshot.pager.keeper import KILL_S, Group, Keeper
from barchan.snapshot.pager.layout import Layout
from barchan.snapshot.pager.link import Placed
from barchan.snapshot.pager.regions import Part
from barchan.snapshot.pager.source import Source
from barchan.snapshot.pager.space import Counts, Space, SpaceGone

SPACES_MAX: Final = 1024
"""Processes of one sandbox at a time that lack pages."""
STALL_S: Final = 60.0
"""How long the kernel may refuse to fill pages of an address space before its sandbox is given up."""
_AHEAD = 4  # chunks
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.0005, 0.05
_SWEEP_AT = 64  # spaces; from here on those of ended processes are looked for


class _Blocked(Struct):
    """A space that can't be filled at the moment: since when, for how long it is left alone, and what ends that."""

    since_s: float
    pause_s: float
    again: asyncio.TimerHandle


class Dropped(BackendError):
    """The node wants no more of it."""


class Served:
    """Owns the source, the directory and all descriptors of the processes.

    Args:
        directory: Made here; CRIU's work directory.
        group: The sandbox's control group of version 2, which must be there when CRIU connects.
        turn: Held while pages are filled unasked, so that sandboxes take turns.
        before_end: Awaited before the sandbox is ended for want of pages.
        is_alone: Nothing else is to be done here: chunks are read while CRIU still restores the rest.

    Raises:
        OSError: The directory can't be made.
    """

    def __init__(
        self,
        sandbox_id: str,
        source: Source,
        directory: Path,
        group: str,
        keeper: Keeper,
        executor: Executor,
        turn: asyncio.Lock,
        before_end: Callable[[str, BaseException], Awaitable[None]],
        *,
        is_alone: bool,
    ) -> None:
        self.sandbox_id = sandbox_id
        self._source = source
        self._directory = directory
        self._group_path = group
        self._group: Group | None = None
        self._keeper = keeper
        self._entry: int | None = None
        self._executor = executor
        self._turn = turn
        self._before_end = before_end
        self._is_alone = is_alone
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._counts = Counts()
        self._spaces: dict[Space, None] = {}
        self._blocked: dict[Space, _Blocked] = {}
        self._sweep_at = _SWEEP_AT
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(mode=0o700)
        try:
            self._handover = Handover(directory, self._connected, self._received)
        except BaseException:
            shutil.rmtree(directory)
            raise

    def drop(self) -> None:
        """Let go; whatever lives in its control group is ended."""
        self._break(Dropped(f"sandbox {self.sandbox_id} was ended while its memory came in"))

    async def run(self) -> Placed:
        """Serve until nothing is missing.

        Raises:
            Exception: Pages can't be had, for whatever reason. All processes of the sandbox were ended.
        """
        warming = self._loop.run_in_executor(self._executor, self._warm)
        filling = self._loop.create_task(self._fill())
        self._broken.add_done_callback(lambda _: filling.cancel())
        try:
            return await filling
        except asyncio.CancelledError as cancelled:
            if not self._broken.done():
                raise
            error = self._broken.exception() or cancelled
            await self._end(error)
            raise error from None
        except Exception as error:
            await self._end(error)
            raise
        finally:
            self._is_over = True
            await warming
            self._close()

    def _warm(self) -> None:
        """Have what is needed first, or all there is, read and unpacked before anybody waits for it."""
        for source, chunk in self._source.chunks() if self._is_alone else ():
            if self._is_over:
                return
            try:
                self._source.load(source, chunk)
            except (BarchanError, OSError):
                return  # whoever needs it fails at it again, and says so

    async def _fill(self) -> Placed:
        await self._handover.restored
        started_s = self._loop.time()
        for space in tuple(self._spaces):
            self._settle(space)
        while self._spaces:
            ready = [space for space in self._spaces if space not in self._blocked]
            if not ready:
                await asyncio.sleep(_PAUSE_S_MIN)
                continue
            space = ready[0]  # those that CRIU restored come first
            units = space.regions.units(_AHEAD)
            if not all(self._is_at_hand(unit) for unit in units):
                await self._loop.run_in_executor(self._executor, self._read_ahead, units)
            async with self._turn:
                for _ in units:
                    if space not in self._spaces or space in self._blocked:
                        break
                    self._step(space, space.stream)
            await asyncio.sleep(0)  # whoever waits comes first
        return Placed(
            faults=self._counts.faults,
            faulted_bytes=self._counts.faulted_bytes,
            streamed_bytes=self._counts.streamed_bytes,
            elapsed_ms=int((self._loop.time() - started_s) * 1000),
        )

    def _is_at_hand(self, unit: Part) -> bool:
        return unit.source == ZEROS or self._source.has(unit.source, unit.slot // CHUNK_PAGES)

    def _read_ahead(self, units: list[Part]) -> None:
        for unit in units:
            if unit.source != ZEROS:
                self._source.load(unit.source, unit.slot // CHUNK_PAGES)

    # what CRIU hands over, and what happens to it

    def _connected(self) -> None:
        self._group = Group(self._group_path)
        self._entry = self._keeper.enter(self._group)

    def _received(self, pid: int, fd: int) -> None:
        try:
            layout = Layout(self._source.areas(pid), self._source.regions(pid))
        except BaseException:
            os.close(fd)
            raise
        self._add(fd, layout)

    def _add(self, fd: int, layout: Layout) -> None:
        """A process that CRIU restored, or one that was forked since."""
        if not layout.missing and self._handover.restored.done():
            os.close(fd)
            return
        os.set_blocking(fd, False)
        space = Space(fd, layout, self._counts, self._source.load, self._add)
        self._spaces[space] = None
        self._loop.add_reader(fd, self._attend, space)
        if len(self._spaces) >= self._sweep_at:
            self._loop.call_soon(self._sweep)

    def _sweep(self) -> None:
        for space in tuple(self._spaces):
            if space in self._spaces and space.is_gone():
                self._forget(space)
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._spaces))
        if len(self._spaces) > SPACES_MAX:
            self._break(BackendError(f"more than {SPACES_MAX} processes lack pages: the sandbox forks without end"))

    def _attend(self, space: Space) -> None:
        if space in self._spaces:
            self._step(space, space.attend)

    def _step(self, space: Space, step: Callable[[], bool]) -> None:
        """Do something for a space, and note what came of it."""
        if self._broken.done():
            return
        try:
            is_done = step()
        except SpaceGone:
            self._forget(space)
            return
        except Exception as error:
            self._break(error)
            return
        if is_done:
            self._unblock(space)
            self._settle(space)
        else:
            self._block(space)

    def _block(self, space: Space) -> None:
        """Try again a little later."""
        now_s = self._loop.time()
        before = self._unblock(space)
        since_s, pause_s = (before.since_s, before.pause_s * 2) if before else (now_s, _PAUSE_S_MIN)
        if now_s - since_s > STALL_S:
            self._break(
                BackendError(f"no page could be filled for {STALL_S:g} s: the sandbox has no memory left, or hangs")
            )
            return
        pause_s = min(pause_s, _PAUSE_S_MAX)
        self._blocked[space] = _Blocked(since_s, pause_s, self._loop.call_later(pause_s, self._attend, space))

    def _unblock(self, space: Space) -> _Blocked | None:
        blocked = self._blocked.pop(space, None)
        if blocked is not None:
            blocked.again.cancel()
        return blocked

    def _settle(self, space: Space) -> None:
        """Let go of a space that lacks nothing; not before CRIU is done with it."""
        if not space.regions and self._handover.restored.done():
            self._forget(space)

    def _forget(self, space: Space) -> None:
        self._unblock(space)
        del self._spaces[space]
        self._loop.remove_reader(space.fd)
        space.close()

    # the end

    def _break(self, error: Exception) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    async def _end(self, error: BaseException) -> None:
        """End the sandbox while its missing pages are still held back."""
        self._handover.close()
        for space in self._spaces:
            self._loop.remove_reader(space.fd)
            self._unblock(space)
        if self._group is None:
            return
        restored = self._handover.restored
        if restored.done() and not restored.exception() and not isinstance(error, Dropped):
            await self._before_end(self.sandbox_id, error)
        self._group.kill()
        await asyncio.to_thread(self._group.wait_empty, KILL_S)

    def _close(self) -> None:
        self._handover.close()
        for space in tuple(self._spaces):
            self._forget(space)
        if self._group is not None:
            if self._entry is not None:
                self._keeper.leave(self._entry)
            self._group.close()
        self._source.close()
        shutil.rmtree(self._directory, ignore_errors=True)  # CRIU may still write there; the next to use it removes it
