"""Who moves next: bounds on moves at once, with those that a client waits for first."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

FIRST, LAST = 0, 1


class Queue:
    """At most `at_once` inside; of those who wait, lower ranks first, and within one in the order they came.

    A rank is asked for when a place is free: somebody may have come to wait for one that nobody waited for.
    """

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: dict[int, tuple[Callable[[], int], asyncio.Future[None]]] = {}
        self._numbers = itertools.count()

    @asynccontextmanager
    async def turn(self, rank: Callable[[], int] = lambda: FIRST) -> AsyncIterator[None]:
        """Wait for a place, and hold it inside."""
        if self._free > 0:
            self._free -= 1
        else:
            number = next(self._numbers)
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[number] = (rank, place)
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._pass_on()
                raise
            finally:
                self._waiting.pop(number, None)
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        best: tuple[int, int] | None = None
        for number, (rank, place) in self._waiting.items():  # in the order they came
            if not place.done() and (best is None or rank() < best[0]):
                best = rank(), number
                if best[0] == FIRST:  # nobody goes before that one
                    break
        if best is None:
            self._free += 1
        else:
            self._waiting.pop(best[1])[1].set_result(None)


class Turns:
    """The queues of one node: what goes to disk or comes from it takes a processor each; a stop takes next to none."""

    def __init__(self) -> None:
        cpus = os.cpu_count() or 1
        self.pauses = Queue(16 * cpus)
        self.page_outs = Queue(cpus)
        self.stores = Queue(cpus)
        self.wakes = Queue(2 * cpus)
