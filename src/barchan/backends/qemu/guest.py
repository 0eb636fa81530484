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
        self._counting: asyncio.Task[None] | None = None

    def take(self, frame: wire.Frame) -> None:
        if not frame.tag and frame.kind == wire.Pushed.EXIT and _was_killed(frame):
            before = self._counting
            self._counting = self.loop.create_task(self._count_then(frame, before))
            return
        super().take(frame)

    async def _count_then(self, frame: wire.Frame, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            await self.count()
        except (BarchanError, OSError):
            pass  # of a guest that is going, or stands still: what was known of it has to do
        super().take(frame)

    async def operate(self, start: wire.Start, reader: Reader | None) -> GuestProcess:
        """Start an operation of the init's own, also while the guest's programs stand still."""
        found: list[GuestProcess] = []

        def register(frame: wire.Frame) -> None:
            found.append(self._register(start.process_id, wire.decode_started(frame.body), reader))

        await self.request(start.encode, on_reply=register)
        return found[0]

    async def count(self) -> wire.Counters:
        """What the guest's kernel counts now."""
        frame = await self.request(wire.counters, timeout_s=COUNT_S)
        found = wire.decode_counters(frame.body)
        self.oom_kills = max(self.oom_kills, found.oom_kills)
        return found


def _was_killed(frame: wire.Frame) -> bool:
    """A program that SIGKILL ended, or a shell that says so of its child."""
    pushed = wire.decode_pushed(frame)
    if not isinstance(pushed, wire.Exit):
        return False
    if os.WIFSIGNALED(pushed.wstatus):
        return os.WTERMSIG(pushed.wstatus) == signal.SIGKILL
    return os.WEXITSTATUS(pushed.wstatus) == 128 + signal.SIGKILL
