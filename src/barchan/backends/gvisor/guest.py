"""The connection to an init in gVisor: what that kernel tells otherwise than Linux is put right here."""

import asyncio
import os
import resource
import signal
from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec.structs import replace

from barchan.backends.guest import REPLY_TIMEOUT_S, GuestConnection, GuestProcess, Reader
from barchan.errors import ReadTimeout
from barchan.wire import guest as wire

STUB_KILLED: Final = 1 << 8  # the wait status of a program whose process on the host was killed
STUCK_S: Final = 15.0  # for a program that is killed to end: on a busy host, beside a hundred others
_KILLED: Final = int(signal.SIGKILL)


class _Begun(NamedTuple):
    """A program that has not ended: the kernel's count before its start, and whether it is the guest's own."""

    kills: int
    is_guests: bool


class GvisorConnection(GuestConnection):
    """See `GuestConnection`.

    A program whose memory the host's kernel has reclaimed by killing it ends with exit code 1 there; where the kernel's
    count of such kills has risen during its life, the end is SIGKILL, as on Linux. That is the guest's word for its own
    programs: the platform's, whose exit code may be a verdict, keep what they end with. And each user may have so many
    processes, beside the limit for all together, which that kernel counts loosely.

    Where the host's kernel kills many of those processes at once, the guest's may wait for ever for one that is gone.
    Then the program can't be killed any more, or nothing of the guest answers: `on_stuck` is called, where there were
    such kills in the program's life, or since the guest's kernel was last seen to be able to start one.

    Args:
        pids_max: Processes and threads of one user.
        oom_kills: The kernel's count.
    """

    on_stuck: Callable[[], None] | None = None

    def __init__(self, pids_max: int, oom_kills: Callable[[], int]) -> None:
        super().__init__()
        self._pids_max = pids_max
        self._oom_kills = oom_kills
        self._kills_seen = self._kills_whole = self._kills()
        self._begun: dict[str, _Begun] = {}
        self._killing: set[asyncio.Task[None]] = set()

    def take(self, frame: wire.Frame) -> None:
        """See `GuestConnection.take`."""
        if frame.kind == wire.Pushed.EXIT and self._was_killed(frame):
            at = 4  # behind the handle
            frame = replace(frame, body=frame.body[:at] + _KILLED.to_bytes(4, "little") + frame.body[at + 4 :])
        super().take(frame)

    def _was_killed(self, frame: wire.Frame) -> bool:
        pushed = wire.decode_pushed(frame)
        process = self.processes.get(pushed.handle)
        begun = self._begun.pop(process.process_id, None) if process is not None else None
        kills = self._kills()
        if begun is None or not begun.is_guests or not isinstance(pushed, wire.Exit) or pushed.wstatus != STUB_KILLED:
            return False
        if kills <= max(begun.kills, self._kills_seen):
            return False
        self._kills_seen = kills
        return True

    def _kills(self) -> int:
        try:
            return self._oom_kills()
        except FileNotFoundError:  # it has ended, and its group went with it
            return 0

    @property
    def is_hurt(self) -> bool:
        """The kernel has killed at the sandbox's own limit, and no program was started since that shows the guest's
        kernel to be whole.
        """
        return self._kills() > self._kills_whole

    def _register(self, process_id: str, started: wire.Started, reader: Reader | None) -> GuestProcess:
        begun = self._begun.get(process_id)
        if begun is not None and not started.existing:
            self._kills_whole = max(self._kills_whole, begun.kills)
        return super()._register(process_id, started, reader)

    async def take_over(self, other: GuestConnection) -> None:
        """See `GuestConnection.take_over`. It counts anew: what runs the guest is in another group."""
        if isinstance(other, GvisorConnection):
            self._oom_kills, self._kills_seen, self._kills_whole = other._oom_kills, 0, 0
            self.on_stuck, other.on_stuck = other.on_stuck, None
            self._begun = {process_id: begun._replace(kills=0) for process_id, begun in self._begun.items()}
        await super().take_over(other)

    async def request(
        self,
        make: Callable[[int], bytes],
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        on_reply: Callable[[wire.Frame], object] | None = None,
    ) -> wire.Frame:
        """See `GuestConnection.request`."""
        try:
            return await super().request(make, timeout_s=timeout_s, on_reply=on_reply)
        except ReadTimeout as error:
            if timeout_s >= REPLY_TIMEOUT_S and self.is_hurt and self.on_stuck is not None:
                self.on_stuck()
            if self._gone is not None:
                raise self._gone from error
            raise

    async def signal(self, process: GuestProcess, signo: int, scope: wire.Scope) -> int:
        """See `GuestConnection.signal`."""
        count = await super().signal(process, signo, scope)
        if signo == _KILLED and scope is not wire.Scope.CHILDREN and process.exit is None:
            task = self.loop.create_task(self._see_end(process))
            self._killing.add(task)
            task.add_done_callback(self._killing.discard)
        return count

    async def _see_end(self, process: GuestProcess) -> None:
        await asyncio.wait({process.ended}, timeout=STUCK_S)
        begun = self._begun.get(process.process_id)
        if process.ended.done() or begun is None or not self.at_work.is_set() or self._kills() <= begun.kills:
            return
        if self.on_stuck is not None:
            self.on_stuck()

    def close(self) -> None:
        """See `GuestConnection.close`."""
        for task in self._killing:
            task.cancel()
        super().close()

    async def start(self, start: wire.Start, reader: Reader | None) -> GuestProcess:
        """See `GuestConnection.start`."""
        most = self._pids_max - 1  # it does not count the first
        if not start.applet and all(limit[0] != resource.RLIMIT_NPROC for limit in start.limits):
            start = replace(start, limits=(*start.limits, (resource.RLIMIT_NPROC, most, most)))
        is_platforms = start.applet or start.operation or start.flags & wire.StartFlag.PLATFORM
        self._begun.setdefault(start.process_id, _Begun(self._kills(), not is_platforms))
        process: GuestProcess | None = None
        try:
            process = await super().start(start, reader)
        finally:
            if process is None or process.exit is not None:
                self._begun.pop(start.process_id, None)
        return process


def end_of(wstatus: int) -> int:
    """The wait status of what ran the guest, from that of the starter, which passes a signal on as 128 + n."""
    code = os.waitstatus_to_exitcode(wstatus)
    return code - 128 if 128 < code < 128 + signal.NSIG else wstatus
