"""One sandbox in gVisor."""

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, cast

import msgspec

from barchan.backends.base import Ended
from barchan.backends.container.backend import ContainerHandle
from barchan.backends.container.room import Room
from barchan.backends.guest import GuestProcess
from barchan.backends.gvisor import control
from barchan.backends.gvisor.control import Sentry
from barchan.backends.gvisor.guest import GvisorConnection, end_of
from barchan.backends.gvisor.parts import is_stopped
from barchan.backends.gvisor.spec import has_own_network
from barchan.backends.gvisor.starter import Starter
from barchan.backends.hosted.handle import HostedHandle
from barchan.backends.hosted.serial import greet
from barchan.core.finished import finished
from barchan.errors import BackendError, CapacityError, ConnectionLost, InitDied, NotSnapshotable
from barchan.image.disk import NO_ROOM
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec
from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.compatible import this_host
from barchan.snapshot.shelf import FREE_BYTES_MIN
from barchan.wire import guest as wire

NAME: Final = "gvisor"
IMAGE: Final = "image"  # of a memory directory
LINE: Final = "line"  # in there: what opens the stored guest's line once more
RECORD: Final = "record.json"
OUT_OF_MEMORY: Final = "its kernel ran out of memory at the sandbox's limit"  # verdicts know these words
SAVE_S: Final = 300.0
GOFER_ENDED: Final = 70 << 8  # the wait status of the starter then
IMAGES_BYTES_SPARE: Final = (
    64 << 20
)  # what a stored guest may have beside twice its memory, some of which may be swapped


class GvisorHandle(HostedHandle):
    """See `HostedHandle`.

    Args:
        said: What the starter has to say.
        room: What its kernel may take to store its memory.
        secret: By which its init knows the node.
        engine: What must be equal where its memory is restored.
    """

    def __init__(
        self,
        sandbox_id: str,
        outer: ContainerHandle,
        guest: GvisorConnection,
        runner: GuestProcess,
        said: Starter,
        *,
        room: Room,
        secret: bytes,
        engine: dict[str, str],
        spec: SandboxSpec,
        template: Template,
    ) -> None:
        self._said = said
        self._room = room
        super().__init__(sandbox_id, outer, guest, runner)
        self.spec = spec
        self.template = template
        self._secret = secret
        self._engine = engine
        self._turn = asyncio.Lock()
        self._is_frozen = False
        guest.on_stuck = self._stuck

    async def connect(self) -> socket.socket:
        """See `HostedHandle.connect`."""
        return await connect(self.outer, self._secret)

    def tell_end(self, end: Ended) -> None:
        """See `HostedHandle.tell_end`; says so where that was for want of memory."""
        self._tell(end, is_full=bool(end.oom_kills) and self._is_of_memory(end_of(end.wstatus)))

    def _tell(self, end: Ended, *, is_full: bool) -> None:
        why = ": ".join(filter(None, (OUT_OF_MEMORY if is_full else "", end.why, self._said.words())))
        super().tell_end(Ended(wstatus=end_of(end.wstatus), oom_kills=end.oom_kills, why=why))

    def _is_of_memory(self, wstatus: int) -> bool:
        """Whether the guest has brought its end about, by filling its memory.

        Anybody on the host may kill what runs it: of that, the kernel's count of its own kills tells. What gave up by
        itself, or does not answer though nobody has stopped it, was hurt by the kernel's kills since it last was whole.

        Args:
            wstatus: Of what ran the guest; 0: it has not ended, and can't be had.
        """
        killed = self.outer.counters.kills_apart()
        if killed:
            return True
        if killed is not None and wstatus in (signal.SIGKILL, GOFER_ENDED):
            return False
        return self._connection.is_hurt and not (wstatus == 0 and is_stopped(self.outer))

    def _stuck(self) -> None:
        """Its kernel waits for a process that the host's has killed, unless somebody has stopped it."""
        if not is_stopped(self.outer):
            self._tell(Ended(wstatus=0, oom_kills=self.oom_kills(), why="it stands still"), is_full=True)

    @property
    def _connection(self) -> GvisorConnection:
        return cast(GvisorConnection, self.guest)

    async def destroy(self) -> None:
        """See `Handle.destroy`."""
        self._room.close()
        await super().destroy()

    async def freeze(self) -> None:
        """See `Handle.freeze`. The guest's own kernel stops its programs first: so they stay stopped while that kernel
        has to run again, to store them.
        """
        async with self._turn:
            if self._is_frozen:
                return
            try:
                await self.guest.request(wire.hold)
                self.guest.at_work.clear()
                await control.stop(self.outer)
                await self.outer.freeze()
            except BaseException:
                await finished(self._go_on(0.0))
                raise
            self._is_frozen = True

    async def thaw(self, frozen_s: float) -> None:
        """See `Handle.thaw`."""
        async with self._turn:
            await self.outer.thaw(0.0)  # nothing of it has a time limit
            self._is_frozen = False
            await finished(self._go_on(frozen_s))

    async def _go_on(self, frozen_s: float) -> None:
        await control.go_on(self.outer)
        self.guest.at_work.set()
        await self._release(frozen_s)

    async def dump(self, target: Path, *, keep: bool, cut: str | None = None) -> MemoryRecord:
        """See `Handle.dump`. It goes on in any case: where it is not to be kept, it is destroyed next."""
        if not has_own_network(self.spec.network):
            raise NotSnapshotable(
                f"its kernel uses the network of its container, which is {self.spec.network!r}, and can't store that: "
                "create it with network='none'"
            )
        if shutil.disk_usage(target.parent).free < self.stats().memory_bytes + FREE_BYTES_MIN:
            raise self._no_room()
        if cut is not None:
            await self.cut(cut)
        async with self._turn:
            return await finished(self._dump(target))

    def _no_room(self) -> CapacityError:
        return CapacityError(f"the node's disk has no room for the memory of {self.sandbox_id}", retry_after_ms=1000)

    async def _dump(self, target: Path) -> MemoryRecord:
        os.mkdir(target, 0o700)
        try:
            images = target / IMAGE
            images.mkdir()
            processes = self.guest.running
            async with self._room.given(), self._stopped():
                await self._save(images)
            (images / LINE).write_bytes(self._secret)
            record = self._record(processes, sum(path.stat().st_size for path in images.iterdir()))
            (target / RECORD).write_bytes(msgspec.json.encode(record))
            return record
        except BaseException as error:
            await finished(asyncio.to_thread(shutil.rmtree, target, ignore_errors=True))
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise self._no_room() from error
            if isinstance(error, OSError):
                raise BackendError(f"the memory of {self.sandbox_id} could not be stored: {error}") from error
            raise

    @asynccontextmanager
    async def _stopped(self) -> AsyncIterator[None]:
        """Inside, the guest's programs stand still, and what runs them does not."""
        was_frozen = self._is_frozen
        if was_frozen:
            await self.outer.thaw(0.0)
        self.guest.at_work.clear()
        try:
            await control.stop(self.outer)  # harmless if they are
            yield
        finally:
            if was_frozen:
                await self.outer.freeze()
            else:
                await control.go_on(self.outer)
                self.guest.at_work.set()

    async def _save(self, images: Path) -> None:
        try:
            with await Sentry.of(self.outer) as sentry:
                await sentry.save(images, (self.outer.spec.memory_mib << 21) + IMAGES_BYTES_SPARE, SAVE_S)
        except ConnectionLost as error:
            raise InitDied(f"the kernel of {self.sandbox_id} broke while its memory was stored: {error}") from error
        except BackendError as error:
            hint = "it holds a file that was removed, close it first: " if "deleted" in str(error) else ""
            raise NotSnapshotable(f"the memory of {self.sandbox_id} can't be stored: {hint}{error}") from error

    def _record(self, processes: int, resident_bytes: int) -> MemoryRecord:
        host = this_host("")
        return MemoryRecord(
            backend=NAME,
            engine=self._engine,
            kernel=host.kernel,
            machine=host.machine,
            cpu_features=host.cpu_features,
            hostname=self.spec.hostname,
            network=self.spec.network,
            layers=tuple(layer.digest for layer in self.template.layers),
            processes=processes,
            resident_bytes=resident_bytes,
        )


async def connect(outer: ContainerHandle, secret: bytes, stored: bytes | None = None) -> socket.socket:
    """A connection to the guest's init, greeted.

    Args:
        stored: Of a restored guest, the secret that it was stored with: for it, that connection is under way.

    Raises:
        ConnectionLost, ReadTimeout: There is none now.
    """
    sock = await control.guest_line(outer)
    try:
        await greet(sock, secret, opens=stored)
    except BaseException:
        sock.close()
        raise
    return sock
