"""What backends have in common whose guests are machines: booted once for a template, then cloned from its memory."""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from barchan.backends.base import Host
from barchan.backends.container.backend import ContainerHandle
from barchan.backends.container.interpreter_start import memory_mib
from barchan.backends.hosted import serial
from barchan.backends.hosted.backend import HostedBackend
from barchan.backends.hosted.outer import HostLayer
from barchan.backends.qemu.guest import CountingGuest
from barchan.backends.qemu.handle import MachineHandle, greeted, last_words
from barchan.backends.qemu.links import Links
from barchan.backends.qemu.machine import Machine
from barchan.backends.qemu.shape import Shape
from barchan.backends.qemu.slots import Kind, MachineSlots, kind_of
from barchan.backends.qemu.stored import Stored
from barchan.core.finished import finished
from barchan.errors import (
    BarchanError,
    BootFailed,
    CapacityError,
    InitDied,
    NotFound,
    ProtocolError,
    SnapshotCorrupt,
    TransportError,
)
from barchan.image.disk import NO_ROOM
from barchan.image.template import Layer, Template
from barchan.model.sandbox import SandboxSpec
from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.compatible import check_engine
from barchan.snapshot.pager.link import PagerLink
from barchan.wire import guest as wire

First = Callable[[Machine, bytes], Awaitable[socket.socket]]
ENTROPY_BYTES = 64
WAKE_S = 15.0  # for a restored guest's init to answer
WARM_S = 20.0
WARM_ID = "fs:warm"  # not among the programs that a sandbox lists


class Note(Struct, frozen=True, kw_only=True):
    """What a later node must know of a sandbox: the layers of its outer by name and path, and those of its image."""

    layers: tuple[tuple[str, str], ...]
    image: tuple[Layer, ...]


class MachineBackend(HostedBackend):
    """See `backends.base.Backend`. One of its kind adds `shape` and a handle, and may have its own `fresh`, `first` and
    `booted`.

    Attributes:
        boot_s: For which a guest may take to boot.
        handle: The class of its handles.
        run_by: Of `Shape.engine`, what every new machine is run by; empty until it has started.
    """

    boot_s = 60.0
    handle: type[MachineHandle] = MachineHandle

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        folder = host.state_dir / self.name
        self._notes = folder / "live"
        self.links = Links(self.name, folder / "layers")
        self._stored = Stored(folder / "templates", self.links, lambda name: self.outers.drop_layer(name))
        self._kinds: dict[Kind, tuple[SandboxSpec, Shape]] = {}
        self.machine_slots = MachineSlots(self._fill, lambda: memory_mib("MemAvailable"))
        self.slots = self.machine_slots
        self.run_by: dict[str, str] = {}

    async def shape(self, spec: SandboxSpec, template: Template, image: Sequence[Layer] | None = None) -> Shape:
        """The machine that a spec asks for.

        Args:
            image: The layers that it sees, where those are not the template's.

        Raises:
            RequirementMissing: The host or the template lacks something. InvalidSpec: No machine can be like that.
        """
        raise NotImplementedError

    async def given(self, outer: ContainerHandle, shape: Shape) -> None:
        """Give an outer, before its QEMU starts, what no layer can."""

    async def fresh(self, outer: ContainerHandle, shape: Shape) -> None:
        """Put what a booting machine needs into its outer, where no cut has brought it."""

    async def first(self, machine: Machine, secret: bytes) -> socket.socket:
        """The first connection to the init of a guest that boots, within `boot_s`.

        Raises:
            ConnectionLost: It does not come up.
        """
        return await greeted(machine, secret, self.boot_s)

    async def booted(self, handle: MachineHandle) -> None:
        """Wait until a booted guest is worth being stored for others."""

    async def start(self) -> None:
        await asyncio.to_thread(self._notes.mkdir, 0o700, parents=True, exist_ok=True)
        await super().start()
        await self._clean()

    async def tidy(self) -> None:
        """Remove what nobody needs any more of what it has in the state directory. Instead of `start`."""
        if self._notes.is_dir():
            await self.find_outers()
            await self._clean()
            await self.unmount()

    async def _clean(self) -> None:
        """Remove what an earlier node left of sandboxes that are gone. None is made before this returns."""
        alive = set(await self.found())
        for path in await asyncio.to_thread(lambda: list(self._notes.glob("*.json"))):
            if path.stem not in alive:
                path.unlink(missing_ok=True)
        await self._stored.clean(alive)

    # new ones

    async def create(
        self, sandbox_id: str, spec: SandboxSpec, template: Template, *, cut: str | None = None
    ) -> MachineHandle:
        self.capabilities.check(spec)
        self.machine_slots.begin()
        try:
            shape = await self.shape(spec, template)
            with _coming_up(sandbox_id):
                if cut is not None:
                    handle = await self._boot(sandbox_id, spec, shape, cut)
                else:
                    handle = await self._of_template(sandbox_id, spec, shape)
                    kind, kinds = kind_of(spec, template), self.machine_slots.kinds
                    self._kinds = {other: self._kinds[other] for other in kinds} | {kind: (spec, shape)}
                    self.machine_slots.used(kind, sandbox_id)
                try:
                    await handle.go_on_inside()
                except BaseException:
                    await finished(handle.destroy())
                    raise
                return handle
        finally:
            self.machine_slots.end()

    async def _of_template(self, sandbox_id: str, spec: SandboxSpec, shape: Shape) -> MachineHandle:
        """A clone of a machine of its template; the first one boots, and becomes that machine."""
        waiting = await self.machine_slots.claim(sandbox_id)
        if waiting is not None:
            return await self._become(waiting, spec)
        with self._stored.taking(shape.key):
            layer = await self._stored.template(shape.key, shape)
            if layer is None:
                async with self._stored.turn(shape.key):
                    layer = await self._stored.template(shape.key, shape)
                    if layer is None:
                        handle = await self._boot(sandbox_id, spec, shape, None)
                        await self._keep(handle, shape)
                        return handle
            return await self._clone(sandbox_id, spec, shape, layer)

    async def _clone(self, sandbox_id: str, spec: SandboxSpec, shape: Shape, layer: HostLayer) -> MachineHandle:
        machine = await self._prepare(sandbox_id, shape, layer)
        return await self._go(sandbox_id, spec, shape, machine, self._stored.directory(shape.key))

    async def _boot(self, sandbox_id: str, spec: SandboxSpec, shape: Shape, cut: str | None) -> MachineHandle:
        layers = (*(() if cut is not None else shape.boot_layers[:1]), *shape.boot_layers[1:], *shape.layers)
        machine = await self._start(sandbox_id, shape, layers, shape.booting(), cut, is_fresh=cut is None)
        return await self._equip(sandbox_id, spec, shape, machine, self.first)

    async def _keep(self, handle: MachineHandle, shape: Shape) -> None:
        """Store a machine that has booted and run nothing yet, for those that come after it.

        Where that fails, it goes on all the same, and the next one boots, too.
        """
        part = self._stored.part(shape.key)
        try:
            await self.booted(handle)
            await handle.dump_whole(part)
            await finished(asyncio.to_thread(self._stored.keep, part, shape.key))
            await self._stored.shrink()
        except (BarchanError, OSError) as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"the memory of a {self.name} template was not kept", "exception": error}
            )
            if handle.ended.done():
                await finished(handle.destroy())
                raise BootFailed(f"the machine of {handle.sandbox_id} ended when it had booted: {error}") from error
        except BaseException:
            await finished(handle.destroy())
            raise

    # from memory

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
    ) -> MachineHandle:
        self.capabilities.check(spec)
        known = {layer.digest: layer for layer in template.layers}
        if not set(record.layers) <= set(known):
            raise SnapshotCorrupt(f"{sandbox_id} was stored with other layers than its image has")
        shape = await self.shape(spec, template, [known[digest] for digest in record.layers])
        check_engine(record, self.name, shape.engine)
        self.machine_slots.begin()
        try:
            with _coming_up(sandbox_id):
                try:
                    layer = await finished(self._stored.once(sandbox_id, memory, shape))
                    machine = await self._prepare(sandbox_id, shape, layer, None if shape.stores_disk else cut)
                    return await self._go(sandbox_id, spec, shape, machine, memory)
                except BaseException:
                    await finished(self._left(sandbox_id))
                    raise
        finally:
            self.machine_slots.end()

    async def _fill(self, kind: Kind, sandbox_id: str) -> MachineHandle:
        """A clone that has started a program once, so that its QEMU has that part of the guest's kernel translated."""
        spec, shape = self._kinds[kind]
        with self._stored.taking(shape.key):
            layer = await self._stored.template(shape.key, shape)
            if layer is None:
                raise NotFound("its template's memory was removed")
            handle = await self._clone(sandbox_id, spec, shape, layer)
        try:
            await handle.go_on_inside()
            await self.warm_up(handle)
            await handle.freeze()
        except BaseException:
            await finished(handle.destroy())
            raise
        return handle

    async def _become(self, handle: MachineHandle, spec: SandboxSpec) -> MachineHandle:
        """Make a slot a sandbox."""
        handle.spec = spec
        try:
            await handle.wake()
            await self.settle(handle)
        except BaseException:
            await finished(handle.destroy())
            raise
        return handle

    async def warm_up(self, handle: MachineHandle, process_id: str = WARM_ID, script: str = ":") -> None:
        """Run a script in a machine that nobody has yet, and see its end. Without a shell in its image it fails."""
        start = wire.Start(
            process_id=process_id,
            argv=("/bin/sh", "-c", script),
            user="root",
            flags=wire.StartFlag.FOLLOW,
            spool_bytes=65536,
        )
        process = await handle.guest.start(start, None)
        async with asyncio.timeout(WARM_S):
            await asyncio.shield(process.ended)

    async def _prepare(self, sandbox_id: str, shape: Shape, memory: HostLayer, cut: str | None = None) -> Machine:
        """A QEMU that waits for its state."""
        return await self._start(sandbox_id, shape, (memory, *shape.layers), shape.restored(), cut)

    async def _go(
        self, sandbox_id: str, spec: SandboxSpec, shape: Shape, machine: Machine, memory: Path
    ) -> MachineHandle:
        try:
            await machine.load(memory)
        except BaseException:
            await finished(self._abandon(sandbox_id, machine))
            raise
        return await self._equip(sandbox_id, spec, shape, machine, _again)

    # what all have in common

    async def _start(
        self,
        sandbox_id: str,
        shape: Shape,
        layers: Sequence[HostLayer],
        argv: Sequence[str],
        cut: str | None,
        *,
        is_fresh: bool = False,
    ) -> Machine:
        note = Note(layers=tuple((layer.name, str(layer.path)) for layer in layers), image=shape.image)
        await asyncio.to_thread(self._note(sandbox_id).write_bytes, msgspec.json.encode(note))
        try:
            outer = await self.outers.create(sandbox_id, shape.outer, layers, template=shape.below, cut=cut)
            try:
                await self.given(outer, shape)
                if is_fresh:
                    await self.fresh(outer, shape)
                return await Machine.start(outer, argv)
            except BaseException:
                await finished(outer.destroy())
                raise
        except BaseException:
            await finished(self._left(sandbox_id))
            raise

    async def _equip(
        self, sandbox_id: str, spec: SandboxSpec, shape: Shape, machine: Machine, first: First
    ) -> MachineHandle:
        """Greet the init of a machine that runs, make it this sandbox's, and stop its programs until `thaw`."""
        secret = serial.secret(self.host.state_dir, sandbox_id)
        try:
            try:
                guest = await CountingGuest.open(await first(machine, secret))
            except (TransportError, ProtocolError, OSError) as error:
                said = await last_words(machine) or machine.said()
                raise BootFailed(f"the guest of {sandbox_id} does not come up: {error}; {said}") from error
        except BaseException:
            await finished(self._abandon(sandbox_id, machine))
            raise
        handle = self.handle(sandbox_id, machine, guest, spec, shape, secret, self._left)
        try:
            await self.settle(handle)
        except BaseException:
            await finished(handle.destroy())
            raise
        return handle

    async def settle(self, handle: MachineHandle) -> None:
        """Give a guest that nobody has used yet what is its own: entropy, name and time."""
        guest, entropy = handle.guest, secrets.token_bytes(ENTROPY_BYTES)
        await asyncio.gather(
            guest.request(lambda tag: wire.frame(wire.Request.RESEED, tag, wire.blob(entropy))),
            guest.request(lambda tag: wire.configure(tag, hostname=handle.spec.hostname)),
            handle.counting.count(WAKE_S),
        )

    async def adopt(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> MachineHandle:
        note = await asyncio.to_thread(self._read_note, sandbox_id)
        layers = tuple(HostLayer(name, Path(path)) for name, path in note.layers)
        shape = await self.shape(spec, template, note.image)
        with _coming_up(sandbox_id):
            outer = await self.outers.adopt(sandbox_id, shape.outer, layers, template=shape.below)
            closing: list[Callable[[], None]] = [partial(self.outers.let_go, outer)]
            try:
                await outer.thaw(0.0)
                machine = await Machine.find(outer)
                closing.append(machine.close)
                await machine.cont()
                secret = serial.secret(self.host.state_dir, sandbox_id)
                guest = await CountingGuest.open(await greeted(machine, secret, WAKE_S))
                closing.append(guest.close)
                await guest.count(WAKE_S)
            except BaseException:
                for close in reversed(closing):
                    close()
                raise
            return self.handle(sandbox_id, machine, guest, spec, shape, secret, self._left)

    def _note(self, sandbox_id: str) -> Path:
        return self._notes / f"{sandbox_id}.json"

    def _read_note(self, sandbox_id: str) -> Note:
        try:
            return msgspec.json.decode(self._note(sandbox_id).read_bytes(), type=Note)
        except (OSError, msgspec.MsgspecError) as error:
            raise BootFailed(f"what {sandbox_id} was made of is not known any more: {error}") from error

    async def _abandon(self, sandbox_id: str, machine: Machine) -> None:
        """Remove a machine that has no handle."""
        machine.close()
        try:
            await machine.outer.destroy()
        finally:
            await self._left(sandbox_id)

    async def _left(self, sandbox_id: str) -> None:
        """Nothing of a sandbox runs any more: what it had here goes, too."""
        await asyncio.to_thread(self._note(sandbox_id).unlink, missing_ok=True)
        await self._stored.left(sandbox_id)

    async def discard(self, sandbox_id: str) -> None:
        try:
            await super().discard(sandbox_id)
        finally:
            await self._left(sandbox_id)

    async def unmount(self, digests: Iterable[str] | None = None) -> None:
        await self._stored.retry()
        if digests is None:
            await self._stored.drop_unneeded(self._is_needed)

    def _is_needed(self, record: MemoryRecord) -> bool:
        is_run = self.run_by.items() <= record.engine.items()
        return is_run and all(map(self.host.images.has_layer, record.layers))

    async def close(self) -> None:
        await self.machine_slots.close()

    async def shutdown(self) -> None:
        await self.machine_slots.close()


async def _again(machine: Machine, secret: bytes) -> socket.socket:
    return await greeted(machine, secret, WAKE_S)


@contextmanager
def _coming_up(sandbox_id: str) -> Iterator[None]:
    """What a machine fails by that comes up is told as that."""
    try:
        yield
    except (InitDied, TransportError, ProtocolError, OSError) as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise CapacityError(f"the node's disk has no room for {sandbox_id}", retry_after_ms=1000) from error
        raise BootFailed(f"the machine of {sandbox_id} does not come up: {error}") from error
