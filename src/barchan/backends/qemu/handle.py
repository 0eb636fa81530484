"""One sandbox whose guest is a machine of its own."""

import asyncio
import os
import platform
import shutil
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from barchan.backends.base import Ended
from barchan.backends.hosted import serial
from barchan.backends.hosted.handle import HostedHandle
from barchan.backends.hosted.outer import reach
from barchan.backends.qemu.guest import CountingGuest
from barchan.backends.qemu.machine import GUEST_SOCKET, Machine
from barchan.backends.qemu.shape import GATEWAY, Shape
from barchan.core.finished import finished
from barchan.errors import (
    BackendError,
    BarchanError,
    CapacityError,
    ConnectionLost,
    InitDied,
    ReadTimeout,
    SandboxLost,
)
from barchan.image.disk import NO_ROOM
from barchan.model.sandbox import SandboxSpec, SandboxStats
from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.memory_file import RECORD
from barchan.snapshot.shelf import FREE_BYTES_MIN
from barchan.wire import guest as wire

GREET_S = 10.0
DETACH_S = 15.0
CONSOLE_CHARS_MAX = 300
GO_ON_S = 45.0  # for which a guest that stands still is asked to go on, before it counts as ended
GO_ON_POLL_S = 0.1


class MachineHandle(HostedHandle):
    """See `backends.base.Handle`.

    A guest that is frozen has its programs stopped by its own kernel, its processors stopped by QEMU, and QEMU by the
    host. One that was just restored runs with the first of these only: its init answers.

    Args:
        secret: With which its init is greeted.
        left: Called when it was destroyed.
    """

    def __init__(
        self,
        sandbox_id: str,
        machine: Machine,
        guest: CountingGuest,
        spec: SandboxSpec,
        shape: Shape,
        secret: bytes,
        left: Callable[[str], Awaitable[None]],
    ) -> None:
        super().__init__(sandbox_id, machine.outer, guest, machine.runner)
        self.machine = machine
        self.spec = spec
        self.shape = shape
        self._secret = secret
        self._left = left
        self._turn = asyncio.Lock()
        self._is_frozen = False
        self._is_let_go = False
        self._dying: asyncio.Task[None] | None = None
        machine.guest_ended.add_done_callback(self._guest_ended)

    async def connect(self) -> socket.socket:
        return await greeted(self.machine, self._secret, GREET_S)

    @property
    def proxy_host(self) -> str:
        """See `Handle.proxy_host`: where its user-mode network shows the outer's loopback."""
        return GATEWAY

    # ends

    def _guest_ended(self, ended: "asyncio.Future[None]") -> None:
        """It ended inside; QEMU still holds what its kernel said last."""
        if not ended.cancelled() and self._dying is None:
            self._dying = asyncio.get_running_loop().create_task(self._tell_why())

    def _runner_ended(self, ended: "asyncio.Future[wire.Exit]") -> None:
        """QEMU itself is gone: that is no doing of a guest that keeps to its own limits."""
        if ended.cancelled() or ended.exception() is not None:
            return
        why = self.machine.why_ended
        if not why and super().oom_kills():
            why = "QEMU reached the memory limit of the container around it"
        self.tell_end(Ended(wstatus=ended.result().wstatus, oom_kills=self.oom_kills(), why=why))

    async def _tell_why(self) -> None:
        console = await last_words(self.machine)
        why = f"{self.machine.why_ended}: {console}" if console else self.machine.why_ended
        self.tell_end(Ended(wstatus=0, oom_kills=self.oom_kills(), why=why))

    def oom_kills(self) -> int:
        """See `Handle.oom_kills`: by the guest's own kernel, under the limit that it holds its programs to."""
        return self.counting.oom_kills

    def stats(self) -> SandboxStats:
        """See `Handle.stats`: what the machine takes of the host, and the guest's own out-of-memory kills."""
        return replace(super().stats(), oom_kills=self.oom_kills())

    @property
    def counting(self) -> CountingGuest:
        """Its connection, whichever handle it was made for."""
        return cast(CountingGuest, self.guest)

    def host_kills(self) -> int:
        """See `Handle.host_kills`. Of what runs the guest, which then is gone as a whole."""
        return 0

    @property
    def is_there(self) -> bool:
        """It has not ended, as far as is known."""
        return self.machine.is_there and not self.ended.done()

    def let_go(self) -> None:
        """Close the connections; it goes on."""
        self._is_let_go = True
        self.guest.close()
        self.machine.close()

    async def destroy(self) -> None:
        self._is_let_go = True
        if self._dying is not None:
            self._dying.cancel()
        self.machine.close()
        try:
            await super().destroy()
        finally:
            await self._left(self.sandbox_id)

    # rest

    async def freeze(self) -> None:
        async with self._turn:
            if self._is_frozen:
                return
            await self._hold()
            try:
                await self.outer.freeze()
            except BaseException:
                await finished(self._go_on())
                raise
            self._is_frozen = True

    async def thaw(self, frozen_s: float) -> None:
        """See `Handle.thaw`. Its own clock stood still with it, so that its timers need no correction."""
        async with self._turn:
            await self.outer.thaw(frozen_s)
            self._is_frozen = False
            await finished(self._go_on())

    async def wake(self) -> None:
        """Let a frozen machine's processors run, but not its programs: its init answers."""
        async with self._turn:
            await self.outer.thaw(0.0)
            self._is_frozen = False
            await self.machine.cont()

    async def _hold(self) -> None:
        """Stop its programs, then its processors."""
        self.guest.at_work.clear()
        try:
            await self.guest.request(wire.hold)
            await self.machine.stop()
        except BaseException:
            await finished(self._go_on())
            raise

    async def _go_on(self) -> None:
        """Let its processors run, set its clock, and let its programs go on."""
        await self._insist(self.machine.cont)
        await self.go_on_inside()

    async def go_on_inside(self) -> None:
        """Set the clock of a guest whose processors run, and let its programs go on.

        Raises:
            InitDied: It can't be made to, and has ended.
        """
        await self._insist(self._tell_to_go_on)
        self.guest.at_work.set()

    async def _tell_to_go_on(self) -> None:
        now = time.time_ns()
        await asyncio.gather(
            self.guest.request(lambda tag: wire.frame(wire.Request.SETCLOCK, tag, struct.pack("<q", now))),
            self.guest.request(lambda tag: wire.thaw(tag, 0)),
        )

    async def _insist(self, step: Callable[[], Awaitable[object]]) -> None:
        """Take a step without which the guest would stand still for ever, while everybody waits for it: again where it
        fails, also over the next connection. A guest that can't be had in time has ended.

        Raises:
            InitDied: It has ended. BarchanError, OSError: It is being destroyed.
        """
        until = asyncio.get_running_loop().time() + GO_ON_S
        while True:
            try:
                await step()
                return
            except (BarchanError, OSError) as error:
                if self._is_let_go:
                    raise
                is_over = self.ended.done() or isinstance(error, SandboxLost)
                if is_over or asyncio.get_running_loop().time() > until:
                    self.tell_end(Ended(wstatus=0, oom_kills=self.oom_kills(), why=f"it does not go on: {error}"))
                    raise InitDied(f"the guest of {self.sandbox_id} does not go on: {error}") from error
            await asyncio.sleep(GO_ON_POLL_S)

    # files and memory

    async def cut(self, name: str, copies: int = 0) -> None:
        """See `Handle.cut`. Of a guest that runs, its files as they are then; of a frozen one, what its disk has."""
        async with self._turn:
            if self._is_frozen:
                await self.outer.cut(name, copies)
                return
            await self.sync()  # most of it while its programs run
            async with self.held():
                await self.sync()
                await self.machine.stop()
                try:
                    await self.outer.cut(name, copies)
                finally:
                    await finished(self._insist(self.machine.cont))

    @asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        """As `held`; one that is frozen is woken for it, without its programs, and frozen again afterwards."""
        if not self._is_frozen:
            async with self.held():
                yield
            return
        try:
            await self._wake_init()
            yield
        finally:
            await finished(self._rest_again())

    async def _wake_init(self) -> None:
        """Let a frozen QEMU answer, and its guest's processors run; the programs stand still."""
        await self.outer.thaw(0.0)
        await self.machine.cont()

    async def _rest_again(self) -> None:
        await self.machine.stop()
        await self.outer.freeze()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Inside, the guest's programs stand still, and its init answers; not for one that is frozen."""
        async with self.guest.starts.none():
            self.guest.at_work.clear()
            try:
                await self.guest.request(wire.hold)
                yield
            finally:
                await finished(self.go_on_inside())

    async def sync(self) -> None:
        """Have the guest write what it holds in memory to its disk.

        Raises:
            BackendError: It can't.
        """
        raise NotImplementedError

    async def dump(self, target: Path, *, keep: bool, cut: str | None = None) -> MemoryRecord:
        if shutil.disk_usage(target.parent).free < self.stats().memory_bytes + FREE_BYTES_MIN:
            raise _no_room(self.sandbox_id)
        if cut is not None:
            await self.cut(cut)
        async with self._turn:
            return await finished(self._dump(target, keep=keep, with_disk=self.shape.stores_disk))

    async def dump_whole(self, target: Path) -> None:
        """As `dump`, with the disk whatever the shape says: what its template's other machines come from."""
        async with self._turn:
            await finished(self._dump(target, keep=True, with_disk=True))

    async def _dump(self, target: Path, *, keep: bool, with_disk: bool) -> MemoryRecord:
        os.mkdir(target, 0o700)
        was_frozen = self._is_frozen
        try:
            try:
                record = await self._store(target, was_frozen=was_frozen, with_disk=with_disk)
            except BaseException:
                await finished(self._as_before(was_frozen=was_frozen))
                raise
            if keep:
                await finished(self._as_before(was_frozen=was_frozen))
            return record
        except BaseException as error:
            await finished(asyncio.to_thread(shutil.rmtree, target, ignore_errors=True))
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise _no_room(self.sandbox_id) from error
            if isinstance(error, OSError):
                raise BackendError(f"the memory of {self.sandbox_id} could not be stored: {error}") from error
            raise

    async def _store(self, target: Path, *, was_frozen: bool, with_disk: bool) -> MemoryRecord:
        """Fill a memory directory. The machine stands still afterwards, and its init has let go of us."""
        if was_frozen:
            await self._wake_init()  # QEMU is to answer; its guest stands still
        else:
            self.guest.at_work.clear()
            await self.guest.request(wire.hold)
        await self._detach()
        await self.machine.stop()
        resident = await self.machine.save(target, self.shape.memory_mib, self.shape.disk if with_disk else None)
        record = self._record(resident)
        await asyncio.to_thread((target / RECORD).write_bytes, msgspec.json.encode(record))
        return record

    async def _as_before(self, *, was_frozen: bool) -> None:
        """After a dump: connected again, and running unless it was frozen. Where that fails, it has ended."""
        self.guest.on_lost = self.recover
        await self._insist(self.machine.cont)
        self.guest.close()  # a line takes one connection at a time
        self.recover()
        if self._recovering is not None:
            await asyncio.wait({self._recovering})
        if was_frozen:
            await self._insist(self.guest.ping)
            await self._rest_again()
        else:
            await self._go_on()

    async def _detach(self) -> None:
        """The init lets go of us: what comes of its memory is greeted with another secret."""
        self.guest.on_lost = None
        try:
            await self.guest.request(lambda tag: wire.frame(wire.Request.DETACH, tag), timeout_s=DETACH_S)
        except ReadTimeout as error:
            raise CapacityError(f"the init of {self.sandbox_id} does not answer now", retry_after_ms=1000) from error
        self.guest.close()

    def _record(self, resident: int) -> MemoryRecord:
        host = platform.uname()
        return MemoryRecord(
            backend=self.spec.backend,
            engine=self.shape.engine,
            kernel=host.release,
            machine=host.machine,
            cpu_features=(),
            hostname=self.spec.hostname,
            network=self.spec.network,
            layers=tuple(layer.digest for layer in self.shape.image),
            processes=self.guest.running,
            resident_bytes=resident,
        )


def _no_room(sandbox_id: str) -> CapacityError:
    return CapacityError(f"the node's disk has no room for the memory of {sandbox_id}", retry_after_ms=1000)


async def greeted(machine: Machine, secret: bytes, within_s: float) -> socket.socket:
    """A connection to the init of a machine's guest, which may still be booting.

    Raises:
        ConnectionLost: It does not answer in time, or has ended.
    """
    sock = reach(machine.outer, GUEST_SOCKET)
    greeting = asyncio.ensure_future(serial.greet(sock, secret, timeout_s=within_s))
    try:
        either: set[asyncio.Future[Any]] = {greeting, machine.guest_ended, machine.runner.ended}
        await asyncio.wait(either, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not greeting.done():
            what = machine.why_ended or (
                "QEMU ended" if machine.runner.ended.done() else f"no answer in {within_s:g} s"
            )
            raise ConnectionLost(f"the guest's init can't be reached: {what}")
        greeting.result()
    except BaseException:
        greeting.cancel()
        try:
            await finished(asyncio.gather(greeting, return_exceptions=True))  # it reads from the socket till then
        finally:
            sock.close()
        raise
    return sock


async def last_words(machine: Machine) -> str:
    """The end of what a guest's kernel has said, hostile text; empty where it can't be had."""
    try:
        return (await machine.console()).strip()[-CONSOLE_CHARS_MAX:]
    except (BarchanError, OSError):
        return ""  # of a QEMU that is going: whatever it was asked for has another reason to tell
