"""Who moves next: bounds on moves at once, with those that a client waits for first."""

import asyncio
import heapq
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

FIRST, LAST = 0, 1


class Queue:
    """At most `at_once` inside; of those who wait, lower ranks first, and within one in the order they came."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def turn(self, rank: int = FIRST) -> AsyncIterator[None]:
        """Wait for a place, and hold it inside."""
        if self._free > 0:
            self._free -= 1
        else:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (rank, next(self._numbers), place))
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            *_, place = heapq.heappop(self._waiting)
            if not place.done():
                place.set_result(None)
                return
        self._free += 1


class Turns:
    """The queues of one node: what goes to disk or comes from it takes a processor each; a stop takes next to none."""

    def __init__(self) -> None:
        cpus = os.cpu_count() or 1
        self.pauses = Queue(16 * cpus)
        self.page_outs = Queue(cpus)
        self.stores = Queue(cpus)
        self.wakes = Queue(2 * cpus)
