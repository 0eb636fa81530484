"""Stopping a container's programs, letting them go on, and giving their memory away meanwhile."""

import asyncio
import os
import time
from contextlib import suppress

from msgspec.structs import replace

from barchan.backends.base import Activity
from barchan.backends.container.activity import activity, pids
from barchan.backends.container.cgroup import FREEZE_POLL_S, FREEZE_S, ROOT, Counters, is_frozen, stop, thaw
from barchan.backends.container.pageout import page_out
from barchan.backends.guest import GuestConnection
from barchan.core.finished import finished
from barchan.errors import CapacityError, ConnectionLost
from barchan.model.sandbox import SandboxSpec
from barchan.wire import guest as wire

RECONNECT_S = 10.0
BEGIN_POLL_S = 0.002


class Resting:
    """The part of a container's handle that `node.tiers` moves between tiers."""

    guest: GuestConnection
    pid: int
    spec: SandboxSpec
    _counters: Counters
    _cutting: asyncio.Lock

    @property
    def counters(self) -> Counters:
        """Where the kernel counts for it."""
        return self._counters

    def host_kills(self) -> int:
        """See `Handle.host_kills`."""
        return self._counters.host_kills()

    async def freeze(self) -> None:
        """See `Handle.freeze`. The init's own timers stand still first, the guest next."""
        async with self._cutting:
            await self.guest.request(wire.hold)
            group = self._counters.guest
            deadline = time.monotonic() + FREEZE_S
            try:
                await _stopped(group, deadline)
                # A start that is no program yet holds what the init has, its connection too.
                while self.spec.zygote is None and is_beginning(self.pid, group) and time.monotonic() < deadline:
                    thaw(group)
                    await asyncio.sleep(BEGIN_POLL_S)
                    await _stopped(group, deadline)
                self.guest.at_work.clear()
            except BaseException:
                thaw(group)
                await finished(self._release(0.0))
                raise

    async def thaw(self, frozen_s: float) -> None:
        """See `Handle.thaw`. The init may be waiting for a stopped child: its answer comes after that goes on."""
        async with self._cutting:
            released = asyncio.ensure_future(self._release(frozen_s))
            await asyncio.sleep(0)  # it is sent
            thaw(self._counters.guest)
            self.guest.at_work.set()
            await finished(released)

    async def _release(self, frozen_s: float) -> None:
        """Let the init's timers go on; if the connection goes at that moment, say it on the next one."""
        until = time.monotonic() + RECONNECT_S
        while True:
            try:
                await self.guest.request(lambda tag: wire.thaw(tag, int(frozen_s * 1e9)))
                return
            except ConnectionLost:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.02)

    async def page_out(self) -> int:
        """See `Handle.page_out`."""
        counters = self._counters
        return await finished(
            asyncio.to_thread(page_out, counters.guest, counters.memory, has_reclaim=counters.memory == counters.guest)
        )

    def activity(self) -> Activity:
        """See `Handle.activity`."""
        counters, is_closed = self._counters, self.spec.network == "none"
        before_s = counters.cpu_s()
        seen = activity(counters.guest, counters.pids(), before_s, is_closed=is_closed)
        if seen.waits_for_events and counters.cpu_s() != before_s:  # one may have woken another behind the look's back
            return replace(seen, waits_for_client=False, waits_for_events=False)
        return seen


async def _stopped(group: str, deadline: float) -> None:
    stop(group)
    while not is_frozen(group):
        if time.monotonic() > deadline:
            raise CapacityError("the sandbox's programs don't stop: they wait for a disk", retry_after_ms=1000)
        await asyncio.sleep(FREEZE_POLL_S)


def is_beginning(init: int, group: str) -> bool:
    """Whether the init has forked for a start what is not its program yet: a copy of it, with its descriptors."""
    program = os.stat(f"/proc/{init}/exe")
    for pid in pids(os.path.dirname(group)):
        with suppress(FileNotFoundError, ProcessLookupError):
            if pid != init and os.path.samestat(os.stat(f"/proc/{pid}/exe"), program) and _has_groups(pid):
                return True
    return False


def _has_groups(pid: int) -> bool:
    """A file operation, which is a copy of the init, too, has let go of these."""
    return any(os.readlink(f"/proc/{pid}/fd/{name}").startswith(ROOT) for name in os.listdir(f"/proc/{pid}/fd"))
