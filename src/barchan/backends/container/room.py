"""Room above a sandbox's memory limit, for what the platform does within the group that the limit is of.

What stores or loads a sandbox's memory may run beside its programs, which may have filled the limit: the kernel of a
gVisor guest takes memory to write down what it has. For that long the limit is higher, while the guest's programs stand
still; it goes back as soon as what was taken is free again. Nothing is killed for it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from barchan.backends.container.cgroup import Counters
from barchan.core.finished import finished
from barchan.errors import BackendError

AGAIN_S: Final = 1.0  # doubled from one look at whether it can go back to the next
AGAIN_S_MAX: Final = 60.0
SETTLE_S: Final = 300.0  # for which some of it stays; a sentry collects its garbage every 120 s
SLACK_BYTES: Final = 16 << 20  # of that, for what one that has filled its limit needs to go on, dropped code above all


class Room:
    """That of one sandbox. Close it.

    Args:
        limit_bytes: Its memory limit.
        room_bytes: What it may have above that.
        own: Bytes that what stores has now, beside the guest's. For a while, what it keeps of what it took is no loss
            of the guest's.
    """

    def __init__(
        self, counters: Counters, limit_bytes: int, room_bytes: int, own: Callable[[], int] = lambda: 0
    ) -> None:
        self._counters = counters
        self._limit_bytes = limit_bytes
        self._room_bytes = room_bytes
        self._own = own
        self._turn = asyncio.Lock()
        self._is_used = False
        self._own_before = 0
        self._settled_at = 0.0
        self._going_back: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Look no more: it has ended, or the next node does."""
        if self._going_back is not None:
            self._going_back.cancel()

    @property
    def _is_going_back(self) -> bool:
        return self._going_back is not None and not self._going_back.done()

    @asynccontextmanager
    async def given(self) -> AsyncIterator[None]:
        """Inside, the limit is raised; one at a time. Afterwards most of it is gone, and in a while the rest.

        Raises:
            BackendError: It can't be raised.
        """
        async with self._turn:
            if not self._is_going_back:
                self._own_before = self._own()
            self._is_used = True
            try:
                self._counters.give_room(self._limit_bytes + self._room_bytes)
            except OSError as error:
                self._is_used = False
                raise BackendError(f"the memory limit can't be raised for a while: {error}") from error
        try:
            yield
        finally:
            self._is_used = False
            self._settled_at = asyncio.get_running_loop().time() + SETTLE_S
            await finished(self.go_back())

    async def go_back(self) -> None:
        """Lower the limit, if somebody has raised it: now, or by and by."""
        if not await self._lower() and not self._is_going_back:
            self._going_back = asyncio.get_running_loop().create_task(self._try_again())

    async def _try_again(self) -> None:
        after_s = AGAIN_S
        while True:
            await asyncio.sleep(after_s)
            if await self._lower():
                return
            after_s = min(AGAIN_S_MAX, 2 * after_s)

    async def _lower(self) -> bool:
        """Whether it is as before."""
        async with self._turn:
            if self._is_used:
                return False
            kept = 0
            if asyncio.get_running_loop().time() < self._settled_at:
                kept = min(self._room_bytes, max(0, self._own() - self._own_before) + SLACK_BYTES)
            return await asyncio.to_thread(self._counters.take_room, self._limit_bytes, self._room_bytes, kept)
