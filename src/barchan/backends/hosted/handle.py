"""One sandbox whose guest lives inside a container: what is asked of the guest goes in, the rest is the outer's."""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

from barchan.backends.base import Activity, Ended
from barchan.backends.container.backend import ContainerHandle
from barchan.backends.guest import GuestConnection, GuestProcess, init_died
from barchan.errors import BackendError, BarchanError, InitDied, InvalidSpec
from barchan.model.sandbox import SandboxStats
from barchan.model.snapshot import MemoryRecord
from barchan.wire import guest as wire

RECONNECT_S = 10.0
RECONNECT_POLL_S = 0.02


class HostedHandle:
    """See `backends.base.Handle`. A backend's own adds `connect`, `freeze`, `thaw` and what its guest can do besides.

    Args:
        guest: The connection to the guest's init.
        runner: The program in the outer that is the guest: at its end so is the sandbox.
    """

    def __init__(self, sandbox_id: str, outer: ContainerHandle, guest: GuestConnection, runner: GuestProcess) -> None:
        self.sandbox_id = sandbox_id
        self.outer = outer
        self.guest = guest
        self.runner = runner
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._recovering: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None
        self._empty_since = -1  # the newest main process, when the guest last said that it has none any more
        guest.on_lost = self.recover
        outer.ended.add_done_callback(self._outer_ended)
        runner.ended.add_done_callback(self._runner_ended)

    async def freeze(self) -> None:
        raise NotImplementedError

    async def thaw(self, frozen_s: float) -> None:
        raise NotImplementedError

    async def connect(self) -> socket.socket:
        """A new connection to the guest's init, on which it was greeted.

        Raises:
            ConnectionLost, TimeoutError: It can't be had now.
        """
        raise NotImplementedError

    @property
    def listener(self) -> socket.socket | None:
        """See `Handle.listener`."""
        return self.outer.listener

    @property
    def proxy_host(self) -> str:
        """See `Handle.proxy_host`: the outer's loopback, which the guest shares."""
        return self.outer.proxy_host

    @property
    def netns(self) -> int | None:
        """See `Handle.netns`."""
        return self.outer.netns

    # ends

    def _outer_ended(self, ended: "asyncio.Future[Ended]") -> None:
        if not ended.cancelled():
            self.tell_end(ended.result())

    def _runner_ended(self, ended: "asyncio.Future[wire.Exit]") -> None:
        if not ended.cancelled() and ended.exception() is None:
            self.tell_end(Ended(wstatus=ended.result().wstatus, oom_kills=self.oom_kills()))

    def tell_end(self, end: Ended) -> None:
        """The guest is gone without having been asked to."""
        if not self.ended.done():
            self.ended.set_result(end)
            self.guest.guest_gone(self._died(end))

    def _died(self, end: Ended) -> InitDied:
        """What whoever waits for the guest is told, with the cause that whoever comes later is told."""
        if end.wstatus == 0 and end.why:
            error = InitDied(f"the guest of {self.sandbox_id} has ended: {end.words}", wstatus=0)
        else:
            error = init_died(self.sandbox_id, end.wstatus)
        error.details["cause"] = f"init_died: {end.words}"
        return error

    def recover(self) -> None:
        """The connection went, though perhaps the guest did not."""
        if self._recovering is None or self._recovering.done():
            self._recovering = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        until = asyncio.get_running_loop().time() + RECONNECT_S
        while not self.ended.done():
            try:
                return await self.guest.reconnect(await self.connect())
            except (BarchanError, OSError, TimeoutError) as error:
                if asyncio.get_running_loop().time() > until:
                    why = f"its init can't be reached any more: {error}"
                    return self.tell_end(Ended(wstatus=0, oom_kills=self.oom_kills(), why=why))
            await asyncio.sleep(RECONNECT_POLL_S)

    async def destroy(self) -> None:
        """See `Handle.destroy`."""
        self.guest.close()
        for task in (self._recovering, self._counting):
            if task is not None:
                task.cancel()
        await self.outer.destroy()

    # rest

    async def _release(self, frozen_s: float) -> None:
        """Let the init's timers go on with what was left of them."""
        await self.guest.request(lambda tag: wire.thaw(tag, int(frozen_s * 1e9)))

    async def page_out(self) -> int:
        """See `Handle.page_out`."""
        return await self.outer.page_out()

    def activity(self) -> Activity:
        """See `Handle.activity`. What a guest's programs wait for can't be seen from outside it, nor whether there are
        any: one that its shell has left behind is known to the guest alone, which is asked for the next time. Until it
        has said that there are none, and from the next start on, there are some.
        """
        has_programs = bool(self.guest.running) or self._empty_since != self._newest
        if has_programs and not self.guest.running and (self._counting is None or self._counting.done()):
            self._counting = asyncio.get_running_loop().create_task(self._count())
        return Activity(has_programs=has_programs, waits_for_client=False, cpu_s=self.stats().cpu_s)

    @property
    def _newest(self) -> int:
        return next(reversed(self.guest.processes), 0)

    async def _count(self) -> None:
        newest = self._newest
        with suppress(BarchanError, OSError):  # one that can't tell now is asked again
            counted = wire.decode_counters((await self.guest.request(wire.counters)).body)
            if not counted.pids:
                self._empty_since = newest

    # files and memory

    async def pack(self, target: Path) -> None:
        """See `Handle.pack`."""
        await self.outer.pack(target)

    async def pack_cut(self, name: str, target: Path) -> None:
        """See `Handle.pack_cut`."""
        await self.outer.pack_cut(name, target)

    async def cut(self, name: str, copies: int = 0) -> None:
        """See `Handle.cut`."""
        await self.outer.cut(name, copies)

    async def dump(self, target: Path, *, keep: bool, cut: str | None = None) -> MemoryRecord:
        """See `Handle.dump`. One whose backend declares no memory snapshots is never asked."""
        raise BackendError(f"the memory of {self.sandbox_id} can't be stored by its backend")

    async def warm(self) -> str:
        """See `Handle.warm`."""
        raise InvalidSpec(f"{self.sandbox_id} has no warm interpreter")

    async def platform_leaf(self) -> None:
        """See `Handle.platform_leaf`. Its init has one from the start."""

    # facts

    async def end_if_starved(self, within_s: float) -> bool:
        """See `Handle.end_if_starved`."""
        return await self.outer.end_if_starved(within_s)

    def oom_kills(self) -> int:
        """See `Handle.oom_kills`: of what runs the guest."""
        with suppress(FileNotFoundError):  # it has ended, and its group went with it
            return self.outer.oom_kills()
        return 0

    def host_kills(self) -> int:
        """See `Handle.host_kills`."""
        return self.outer.host_kills()

    def stats(self) -> SandboxStats:
        """See `Handle.stats`: of what runs the guest."""
        return self.outer.stats()
