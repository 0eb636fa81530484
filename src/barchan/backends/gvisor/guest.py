"""The connection to an init in gVisor: what that kernel tells otherwise than Linux is put right here."""

import os
import resource
import signal
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from barchan.backends.guest import GuestConnection, GuestProcess, Reader
from barchan.wire import guest as wire

STUB_KILLED: Final = 1 << 8  # the wait status of a program whose process on the host was killed
_KILLED: Final = int(signal.SIGKILL)


class GvisorConnection(GuestConnection):
    """See `GuestConnection`.

    A program whose memory the host's kernel has reclaimed by killing it ends with exit code 1 there; where the kernel's
    count of such kills has risen during its life, the end is SIGKILL, as on Linux. That is the guest's word for its own
    programs: the platform's, whose exit code may be a verdict, keep what they end with. And each user may have so many
    processes, beside the limit for all together, which that kernel counts loosely.

    Args:
        pids_max: Processes and threads of one user.
        oom_kills: The kernel's count.
    """

    def __init__(self, pids_max: int, oom_kills: Callable[[], int]) -> None:
        super().__init__()
        self._pids_max = pids_max
        self._oom_kills = oom_kills
        self._kills_seen = self._kills()
        self._begun: dict[str, int] = {}  # kills, when each program was started that has not ended

    def take(self, frame: wire.Frame) -> None:
        """See `GuestConnection.take`."""
        if frame.kind == wire.Pushed.EXIT and self._was_killed(frame):
            at = 4  # behind the handle
            frame = replace(frame, body=frame.body[:at] + _KILLED.to_bytes(4, "little") + frame.body[at + 4 :])
        super().take(frame)

    def _was_killed(self, frame: wire.Frame) -> bool:
        pushed = wire.decode_pushed(frame)
        process = self.processes.get(pushed.handle)
        before = self._begun.pop(process.process_id, None) if process is not None else None
        if before is None or not isinstance(pushed, wire.Exit) or pushed.wstatus != STUB_KILLED:
            return False
        kills = self._kills()
        if kills <= max(before, self._kills_seen):
            return False
        self._kills_seen = kills
        return True

    def _kills(self) -> int:
        try:
            return self._oom_kills()
        except FileNotFoundError:  # it has ended, and its group went with it
            return 0

    async def start(self, start: wire.Start, reader: Reader | None) -> GuestProcess:
        """See `GuestConnection.start`."""
        most = self._pids_max - 1  # it does not count the first
        if not start.applet and all(limit[0] != resource.RLIMIT_NPROC for limit in start.limits):
            start = replace(start, limits=(*start.limits, (resource.RLIMIT_NPROC, most, most)))
        if start.applet or start.operation or start.flags & wire.StartFlag.PLATFORM:
            return await super().start(start, reader)
        self._begun.setdefault(start.process_id, self._kills())
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
