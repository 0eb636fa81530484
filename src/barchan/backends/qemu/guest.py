"""The connection to an init whose kernel is its own: out-of-memory kills are counted in there."""

import asyncio
import os
import signal

from barchan.backends.guest import GuestConnection, GuestProcess, Reader
from barchan.errors import BarchanError
from barchan.wire import guest as wire

COUNT_S = 5.0


class CountingGuest(GuestConnection):
    """Before the end of a program that was killed is told, the guest's counters are asked for.

    Attributes:
        oom_kills: As they were when they were last asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.oom_kills = 0
        self._late: dict[int, wire.Frame] = {}  # ends that wait for the counters, by their process's handle
        self._counting: asyncio.Task[None] | None = None

    def take(self, frame: wire.Frame) -> None:
        killed = None if frame.tag or frame.kind != wire.Pushed.EXIT else _killed(frame)
        process = None if killed is None else self.processes.get(killed)
        if killed is None or process is None or process.exit is not None:
            super().take(frame)
        elif killed not in self._late:  # a guest may tell one end any number of times, and is heard once
            self._late[killed] = frame
            if self._counting is None or self._counting.done():
                self._counting = self.loop.create_task(self._count_then_tell())

    async def _count_then_tell(self) -> None:
        """Tell the ends that wait; of those that came before it asks, one look at the counters says enough."""
        while self._late:
            waiting = list(self._late)
            try:
                await self.count()
            except (BarchanError, OSError):
                pass  # of a guest that is going, or stands still: what was known of it has to do
            for handle in waiting:
                super().take(self._late.pop(handle))

    async def operate(self, start: wire.Start, reader: Reader | None) -> GuestProcess:
        """Start an operation of the init's own, also while the guest's programs stand still."""
        found: list[GuestProcess] = []

        def register(frame: wire.Frame) -> None:
            found.append(self._register(start.process_id, wire.decode_started(frame.body), reader))

        await self.request(start.encode, on_reply=register)
        return found[0]

    async def count(self, within_s: float = COUNT_S) -> wire.Counters:
        """What the guest's kernel counts now."""
        frame = await self.request(wire.counters, timeout_s=within_s)
        found = wire.decode_counters(frame.body)
        self.oom_kills = max(self.oom_kills, found.oom_kills)
        return found


def _killed(frame: wire.Frame) -> int | None:
    """The handle of a program that SIGKILL ended, or of a shell that says so of its child."""
    pushed = wire.decode_pushed(frame)
    if not isinstance(pushed, wire.Exit):
        return None
    if os.WIFSIGNALED(pushed.wstatus):
        is_killed = os.WTERMSIG(pushed.wstatus) == signal.SIGKILL
    else:
        is_killed = os.WEXITSTATUS(pushed.wstatus) == 128 + signal.SIGKILL
    return pushed.handle if is_killed else None
