"""Time as one sandbox has it: it stands still while the platform has the sandbox asleep."""

import asyncio
from collections.abc import Callable
from typing import Any


class Timer:
    """A callback due after so much of a sandbox's own time."""

    __slots__ = ("_callback", "_clock", "_due_at", "_handle", "left_s")

    def __init__(self, clock: "Clock", left_s: float, callback: Callable[[], object]) -> None:
        self._clock = clock
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self.left_s = max(0.0, left_s)

    def cancel(self) -> None:
        """Repeating is harmless, also after the call."""
        self._clock.forget(self)
        self.hold()

    def run(self) -> None:
        """Count down from now on."""
        loop = asyncio.get_running_loop()
        self._due_at = loop.time() + self.left_s  # uvloop's handle of what is due at once does not know when
        self._handle = loop.call_later(self.left_s, self._due)

    def hold(self) -> None:
        """Keep what is left."""
        if self._handle is not None:
            self.left_s = max(0.0, self._due_at - asyncio.get_running_loop().time())
            self._handle.cancel()
            self._handle = None

    def _due(self) -> None:
        self._clock.forget(self)
        self._handle = None
        self._callback()


class Clock:
    """The clock of one sandbox, with its timers."""

    def __init__(self) -> None:
        self._timers: set[Timer] = set()
        self._slept_s = 0.0
        self.missed_s = 0.0  # of that, what the guest's own clock counted, too
        self._stopped_at: float | None = None
        self._went_on_at = asyncio.get_running_loop().time()
        self.change = asyncio.Event()  # another one after each; set when it stops or goes on next

    @property
    def is_stopped(self) -> bool:
        return self._stopped_at is not None

    @property
    def slept_s(self) -> float:
        """How long it has stood still, all added up, since this object was made."""
        since = self._stopped_at
        return self._slept_s + (0.0 if since is None else asyncio.get_running_loop().time() - since)

    @property
    def awake_s(self) -> float:
        """Seconds since it last went on, or was made; 0 while it stands still."""
        return 0.0 if self.is_stopped else asyncio.get_running_loop().time() - self._went_on_at

    def time(self) -> float:
        """Seconds of the event loop's clock, without those it stood still."""
        return asyncio.get_running_loop().time() - self.slept_s

    def call_later(self, delay_s: float, callback: Callable[..., object], *arguments: Any) -> Timer:
        """Call after `delay_s` of this clock's time."""
        timer = Timer(self, delay_s, lambda: callback(*arguments))
        self._timers.add(timer)
        if not self.is_stopped:
            timer.run()
        return timer

    def forget(self, timer: Timer) -> None:
        self._timers.discard(timer)

    def stop(self) -> None:
        """Stand still; repeating is harmless."""
        if self._stopped_at is None:
            self._stopped_at = asyncio.get_running_loop().time()
            for timer in self._timers:
                timer.hold()
            self.tell()

    def tell(self) -> None:
        """Have those look who wait for a change."""
        self.change.set()
        self.change = asyncio.Event()

    def go_on(self, missed_s: float | None = None) -> float:
        """Go on; returns for how many seconds it stood still.

        Args:
            missed_s: For how many of them the guest's own clock went on: not while it was on disk. None: for all.
        """
        if self._stopped_at is None:
            return 0.0
        self._went_on_at = asyncio.get_running_loop().time()
        slept_s = self._went_on_at - self._stopped_at
        self._stopped_at = None
        self._slept_s += slept_s
        self.missed_s += slept_s if missed_s is None else missed_s
        for timer in self._timers:
            timer.run()
        self.tell()
        return slept_s
