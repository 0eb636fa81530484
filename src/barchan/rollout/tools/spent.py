"""What a call takes of the agent's time, noted meanwhile: whoever goes on with one that was cut short counts on."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from barchan.errors import BarchanError
from barchan.rollout.ports import Clock

NOTE_S = 10.0


class Spent:
    """One call's time.

    Args:
        before_s: What it had taken when it was cut short.
        note: Told how much that is by now, every `NOTE_S` and as it is cut short.
    """

    def __init__(self, before_s: float = 0.0, note: Callable[[float], None] | None = None) -> None:
        self._before_s = before_s
        self._note = note

    @asynccontextmanager
    async def counted(self, clock: Clock) -> AsyncIterator[Callable[[], float]]:
        """Inside, the call goes on; gives what it has taken by now."""
        started = clock.time()

        def now_s() -> float:
            return self._before_s + clock.time() - started

        noting = asyncio.create_task(self._go_on(now_s))
        try:
            yield now_s
        except BaseException:
            self._tell(now_s)
            raise
        finally:
            noting.cancel()
            await asyncio.wait({noting})

    async def _go_on(self, now_s: Callable[[], float]) -> None:
        while self._note is not None:
            await asyncio.sleep(NOTE_S)
            self._tell(now_s)

    def _tell(self, now_s: Callable[[], float]) -> None:
        if self._note is not None:
            with suppress(BarchanError):  # trouble with the log is told by whatever is written next
                self._note(round(now_s(), 4))
