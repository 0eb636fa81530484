"""The gVisor backend: each guest in a container of its own, run there by our starter."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from barchan.backends.base import Capabilities, Handle, Host
from barchan.backends.container.backend import ContainerHandle
from barchan.backends.container.room import Room
from barchan.backends.guest import GuestProcess
from barchan.backends.gvisor import control, install, platform, programs
from barchan.backends.gvisor.control import IMAGES, Sentry
from barchan.backends.gvisor.guest import GvisorConnection
from barchan.backends.gvisor.handle import IMAGE, LINE, NAME, SAVE_S, GvisorHandle, connect
from barchan.backends.gvisor.install import Runsc
from barchan.backends.gvisor.parts import own_bytes, set_apart
from barchan.backends.gvisor.slots import GvisorSlots
from barchan.backends.gvisor.spec import STORING_MIB, STORING_MIB_MAX, has_own_network, oci, outer_spec, starter_words
from barchan.backends.gvisor.starter import Starter
from barchan.backends.hosted.backend import HostedBackend
from barchan.backends.hosted.outer import HostLayer
from barchan.backends.hosted.serial import secret
from barchan.errors import (
    BarchanError,
    BootFailed,
    RequirementMissing,
    SnapshotCorrupt,
    SnapshotIncompatible,
)
from barchan.image.template import Template, need_root
from barchan.model.node import Requirement
from barchan.model.sandbox import SandboxSpec
from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.compatible import check_engine, this_host
from barchan.snapshot.pager.link import PagerLink
from barchan.wire import guest as wire

PROCESS_ID = "barchan-gvisor"  # of the starter, in each outer
TRY_S = 20.0


class Up(NamedTuple):
    """An outer in which a guest's kernel is up, and nothing of the guest runs yet. `room`: above the outer's limit."""

    outer: ContainerHandle
    runner: GuestProcess
    said: Starter
    room: Room


class GvisorBackend(HostedBackend):
    """See `HostedBackend`."""

    name = NAME
    capabilities = Capabilities(
        isolation="user_kernel",
        own_kernel=True,
        fork=True,
        memory_snapshot=True,
        shares_memory=True,
        warm=True,
        page_out=True,
        networks=frozenset({"none", "open", "allow"}),
        roots=frozenset({"plain", "capable"}),
        storing_mib=STORING_MIB,
    )

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._slots = GvisorSlots(self._begin)
        self.slots = self._slots
        self._runsc: Runsc
        self._layer: HostLayer
        self._platform: str

    def probe(self) -> Sequence[Requirement]:
        """See `Backend.probe`. Whether a guest really runs is found out by `start`, once per runsc and kernel."""
        found = install.find(self.host.state_dir)
        what = "no runsc" if found is None else f"runsc {found.version}"
        remedy = "" if found else "run `sudo barchan tools install runsc`"
        return [Requirement(name="runsc", ok=found is not None, needed_for=NAME, found=what, remedy=remedy)]

    async def start(self) -> None:
        """See `Backend.start`. Takes a second where no guest was tried before."""
        await super().start()
        found = await asyncio.to_thread(install.find, self.host.state_dir)
        if found is None:
            raise RequirementMissing("runsc is gone (try: sudo barchan tools install runsc)")
        self._runsc = found
        self._layer = await asyncio.to_thread(programs.layer, self.host.state_dir, found)
        self._platform = await platform.choose(self.host.state_dir, self._layer.name, self._try)
        for other in await asyncio.to_thread(programs.others, self.host.state_dir, self._layer):
            if await self.outers.drop_layer(other.name):
                await asyncio.to_thread(shutil.rmtree, other.path, ignore_errors=True)

    async def close(self) -> None:
        """See `Backend.close`."""
        await self._slots.close()

    async def shutdown(self) -> None:
        """See `Backend.shutdown`."""
        await self.close()

    @property
    def _engine(self) -> dict[str, str]:
        return {"runsc": self._runsc.version, "platform": self._platform}

    async def create(self, sandbox_id: str, spec: SandboxSpec, template: Template, *, cut: str | None = None) -> Handle:
        """See `Backend.create`."""
        need_root(template, NAME)
        return await self._slots.create(sandbox_id, spec, template, cut)

    async def _begin(self, sandbox_id: str, spec: SandboxSpec, template: Template, cut: str | None) -> GvisorHandle:
        async with self._up(sandbox_id, spec, template, cut) as up:
            await self._start(spec, up)
            return await self._handle(sandbox_id, spec, template, up)

    async def restore(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        template: Template,
        memory: Path,
        record: MemoryRecord,
        *,
        cut: str | None,
        pager: PagerLink | None = None,
    ) -> Handle:
        """See `Backend.restore`, but that the guest's programs run when this returns: their kernel lets them go on as
        soon as it has them, and its init would not answer if they were stopped again.
        """
        need_root(template, NAME)
        check_engine(record, NAME, self._engine)
        missing = sorted(set(record.cpu_features) - set(this_host("").cpu_features))
        if missing:
            raise SnapshotIncompatible(f"the memory snapshot needs a processor with {', '.join(missing[:8])}")
        images = memory / IMAGE
        if not all((images / name).is_file() for name in (*IMAGES, LINE)):
            raise SnapshotCorrupt(f"{memory} is no memory directory of this release")
        async with self._up(sandbox_id, spec, template, cut) as up:
            with await Sentry.of(up.outer) as sentry:
                await sentry.loopback()
                async with up.room.given():
                    await sentry.load(images, SAVE_S)
            with await Sentry.of(up.outer) as sentry:  # the stored guest's kernel, which knows nothing of the other one
                await sentry.wake()
            return await self._handle(sandbox_id, spec, template, up, (images / LINE).read_bytes())

    async def adopt(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> Handle:
        """See `Backend.adopt`."""
        outer = await self.outers.adopt(sandbox_id, outer_spec(spec), [self._layer], template=template)
        room = _room_of(outer)
        try:
            await room.go_back()  # the node before may have died while it stored this one
            runner, said = await outer.guest.find(PROCESS_ID), Starter()
            if runner.exit is None:
                await runner.add_reader(said)
            await control.go_on(outer)
            return await self._handle(sandbox_id, spec, template, Up(outer, runner, said, room))
        except BaseException:
            room.close()
            self.outers.let_go(outer)
            raise

    async def _try(self, name: str) -> None:
        """Run a guest of nothing by that platform."""
        sandbox_id = f"probe{secrets.token_hex(6)}"
        spec = SandboxSpec(template=NAME, memory_mib=64)
        async with asyncio.timeout(TRY_S), self._up(sandbox_id, spec, None, None, name) as up:
            await self._start(spec, up)
            guest = await self._greeted(sandbox_id, spec, up)
            guest.close()
        await up.outer.destroy()

    async def _start(self, spec: SandboxSpec, up: Up) -> None:
        with await Sentry.of(up.outer) as sentry:
            if has_own_network(spec.network):
                await sentry.loopback()
            await sentry.start()

    @asynccontextmanager
    async def _up(
        self, sandbox_id: str, spec: SandboxSpec, template: Template | None, cut: str | None, platform_name: str = ""
    ) -> AsyncIterator[Up]:
        """Start an outer and what runs a guest in it. If what comes next fails, it is gone again.

        Raises:
            BootFailed: Something did not come up; the message has the last that was said.
        """
        outer = await self.outers.create(sandbox_id, outer_spec(spec), [self._layer], template=template, cut=cut)
        said, room = Starter(), _room_of(outer)
        try:
            start = wire.Start(
                process_id=PROCESS_ID,
                argv=starter_words(spec, platform_name or self._platform),
                flags=wire.StartFlag.FOLLOW,
                script=oci(spec),
            )
            runner = await outer.guest.start(start, said)
            await said.ready()
            await asyncio.to_thread(set_apart, outer)
            yield Up(outer, runner, said, room)
        except BaseException as error:
            room.close()
            await asyncio.shield(outer.destroy())
            if isinstance(error, BootFailed | SnapshotCorrupt | asyncio.CancelledError):
                raise
            if isinstance(error, BarchanError | OSError | TimeoutError):
                raise BootFailed(f"the guest of {sandbox_id} did not start: {error}; {said.words()}") from error
            raise

    async def _greeted(
        self, sandbox_id: str, spec: SandboxSpec, up: Up, stored: bytes | None = None
    ) -> GvisorConnection:
        guest = GvisorConnection(spec.pids_max, up.outer.oom_kills)
        try:
            await guest.reconnect(await connect(up.outer, secret(self.host.state_dir, sandbox_id), stored))
            await guest.request(lambda tag: wire.configure(tag, hostname=spec.hostname, pids=spec.pids_max))
        except BaseException:
            guest.close()
            raise
        return guest

    async def _handle(
        self, sandbox_id: str, spec: SandboxSpec, template: Template, up: Up, stored: bytes | None = None
    ) -> GvisorHandle:
        return GvisorHandle(
            *(sandbox_id, up.outer, await self._greeted(sandbox_id, spec, up, stored), up.runner, up.said),
            room=up.room,
            secret=secret(self.host.state_dir, sandbox_id),
            engine=self._engine,
            spec=spec,
            template=template,
        )


def _room_of(outer: ContainerHandle) -> Room:
    return Room(outer.counters, outer.spec.memory_mib << 20, STORING_MIB_MAX << 20, partial(own_bytes, outer))
