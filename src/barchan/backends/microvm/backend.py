"""MicroVMs: a template's layers as disks, a minimal kernel, our init, in a QEMU inside a container."""

import asyncio
import hashlib
import math
import platform
import re
import secrets
import shutil
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from msgspec.structs import replace

from barchan.backends.base import Capabilities, Host
from barchan.backends.container.backend import ContainerHandle
from barchan.backends.hosted.outer import HostLayer
from barchan.backends.microvm import clock, disks
from barchan.backends.microvm.acceleration import KVM, PROBE_S, Acceleration, choose, key_of, place
from barchan.backends.microvm.boot import Boot, command_line, machine_type
from barchan.backends.microvm.handle import MicrovmHandle
from barchan.backends.microvm.kernel import Kernel
from barchan.backends.microvm.kernel import find as find_kernel
from barchan.backends.microvm.probe import requirements
from barchan.backends.qemu import device, install
from barchan.backends.qemu.backend import MachineBackend
from barchan.backends.qemu.handle import MachineHandle, greeted
from barchan.backends.qemu.install import Qemu
from barchan.backends.qemu.machine import MEMORY
from barchan.backends.qemu.shape import ADDRESS, GATEWAY, NETWORK, OVERHEAD_MIB, PROCESSES_MAX, Shape, common
from barchan.core.finished import finished
from barchan.errors import ConnectionLost, ReadTimeout, RequirementMissing
from barchan.image.template import Layer, Template
from barchan.model.node import Requirement
from barchan.model.sandbox import SandboxSpec
from barchan.wire import guest as wire

KERNEL_MIB = 64  # of a guest's memory, for its kernel and its init: what its programs may take is on top
SPARE_MIB = 64  # of the outer's disk, beside the guest's
SHM_BYTES = 64 << 20
READ_ID = "fs:read"  # not among the programs that a sandbox lists
READ = "! command -v python3 >/dev/null || exec python3 -B -c ''"


class MicrovmBackend(MachineBackend):
    """See `backends.base.Backend`."""

    name = "microvm"
    handle = MicrovmHandle
    capabilities = Capabilities(
        isolation="kernel",
        own_kernel=True,
        fork=True,
        memory_snapshot=True,
        shares_memory=True,
        warm=True,
        page_out=True,
        networks=frozenset({"none", "open", "allow"}),
        roots=frozenset({"plain", "capable"}),
        start_s_max=240.0,
    )

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._qemu: Qemu
        self._kernel: Kernel
        self._acceleration: Acceleration | None = None
        self._choosing = asyncio.Lock()
        self._image_layers: dict[tuple[str, ...], tuple[HostLayer, int]] = {}

    def probe(self) -> Sequence[Requirement]:
        return requirements(self.host.state_dir)

    async def start(self) -> None:
        await super().start()
        qemu = await asyncio.to_thread(install.find, self.host.state_dir)
        if qemu is None:
            raise RequirementMissing("microVMs need QEMU: run `barchan tools install qemu`")
        self._qemu = qemu
        self._kernel = await asyncio.to_thread(find_kernel, self.host.state_dir)
        self.run_by = {"QEMU": qemu.version, "kernel": self._kernel.digest}

    async def shape(self, spec: SandboxSpec, template: Template, image: Sequence[Layer] | None = None) -> Shape:
        layers = tuple(template.layers if image is None else image)
        async with self._choosing:
            if self._acceleration is None:
                key = key_of(self._qemu.version, self._kernel.digest)
                boot = partial(self._try_kvm, spec, layers)
                self._acceleration = await choose(place(self.host.state_dir), key, boot)
        return await self._shape(spec, layers, self._acceleration)

    async def _try_kvm(self, spec: SandboxSpec, layers: tuple[Layer, ...]) -> str:
        """Boot a guest with KVM, which answers in time, or why it did not; nothing of it is left."""
        shape = await self._shape(spec, layers, KVM)
        sandbox_id = f"probe-{secrets.token_hex(6)}"
        machine = await self._start(
            sandbox_id, shape, (*shape.boot_layers, *shape.layers), shape.booting(), None, is_fresh=True
        )
        try:
            (await greeted(machine, secrets.token_bytes(32), PROBE_S)).close()
            return ""
        except (ConnectionLost, ReadTimeout) as error:
            return str(error)
        finally:
            await finished(self._abandon(sandbox_id, machine))

    async def booted(self, handle: MachineHandle) -> None:
        """What programs read of the image first is in the memory that is stored, and so in the host's once for all."""
        try:
            await self.warm_up(handle, READ_ID, READ)
        except TimeoutError:  # it goes on as somebody's, without this
            process = await handle.guest.find(READ_ID)
            await handle.guest.signal(process, signal.SIGKILL, wire.Scope.ALL)
            raise

    async def given(self, outer: ContainerHandle, shape: Shape) -> None:
        if shape.engine["acceleration"] == "kvm":
            await device.give(outer.pid)

    async def _shape(self, spec: SandboxSpec, layers: tuple[Layer, ...], acceleration: Acceleration) -> Shape:
        accelerator, processor = acceleration.arguments
        digests = tuple(layer.digest for layer in layers)
        if digests not in self._image_layers:
            made = await asyncio.to_thread(disks.image_layer, self.links, self.host.images, layers)
            self._image_layers[digests] = made
        disk_layer, count = self._image_layers[digests]
        fresh = await asyncio.to_thread(disks.fresh_disk, self.links, spec.disk_mib)
        kernel = await asyncio.to_thread(self._kernel_layer)
        vcpus = max(1, math.ceil(spec.cpus))
        memory_mib = spec.memory_mib + KERNEL_MIB
        boot = Boot(
            layers=count,
            hostname="sandbox",
            memory_bytes=spec.memory_mib << 20,
            pids=spec.pids_max,
            shm_bytes=min(SHM_BYTES, spec.memory_mib << 19),
            spool_bytes=disks.spool_bytes(spec.disk_mib),
            root_capable=spec.root == "capable",
            net=None if spec.network == "none" else (ADDRESS, GATEWAY),
            tsc_khz=await asyncio.to_thread(clock.tsc_khz) if acceleration.name == "tcg" else 0,
        )
        machine = machine_type(has_acpi=self._kernel.needs_modules)
        hardware = (
            *common(install.EMULATOR, install.FIRMWARE, accelerator, vcpus, memory_mib),
            *("-M", f"{machine},memory-backend={MEMORY},suppress-vmdesc=on", "-cpu", processor),
            *("-device", "virtio-serial-device", "-device", "virtserialport,chardev=guest,name=barchan"),
            *("-device", "virtio-balloon-device,free-page-reporting=on"),
            *_disk("disk", disks.DISK_PATH, is_written=True),
            *(word for index in range(count) for word in _disk(f"layer-{index}", disks.LAYER_PATH.format(index))),
            *(() if spec.network == "none" else _NETWORK),
        )
        return Shape(
            layers=(disk_layer, HostLayer(f"qemu-{self._qemu.version}", self._qemu.root)),
            hardware=hardware,
            boot=("-kernel", "/kernel/vmlinux", "-initrd", "/kernel/initrd", "-append", command_line(boot)),
            boot_layers=(fresh, kernel),
            memory_mib=memory_mib,
            disk=disks.DISK_PATH,
            stores_disk=True,
            image=layers,
            engine={
                **self.run_by,
                "memory": f"{spec.memory_mib} MiB",
                "number of processors": str(vcpus),
                "network": spec.network,
                "hardware": hashlib.sha256("\0".join(hardware).encode()).hexdigest()[:16],
                "acceleration": acceleration.name,
                "processor": await asyncio.to_thread(_processor),
            },
            outer=self._outer(spec, memory_mib),
        )

    def _kernel_layer(self) -> HostLayer:
        files = {"/kernel/vmlinux": self._kernel.vmlinux, "/kernel/initrd": self._kernel.initrd}
        return self.links.make(disks.KERNEL + self._kernel.digest[:32], files)

    @staticmethod
    def _outer(spec: SandboxSpec, memory_mib: int) -> SandboxSpec:
        disk_mib = (disks.disk_bytes(spec.disk_mib) >> 20) + 1
        return replace(
            spec,
            memory_mib=memory_mib + OVERHEAD_MIB,
            pids_max=PROCESSES_MAX,
            disk_mib=disk_mib + SPARE_MIB,
            root="plain",
            env={},
            setup=None,
        )

    async def unmount(self, digests: Iterable[str] | None = None) -> None:
        await super().unmount(digests)
        kernel = self.run_by.get("kernel", "")[:32]
        for name in await asyncio.to_thread(disks.unneeded, self.links, self.host.images, kernel):
            if not await self.outers.drop_layer(self.links.layer(name).name) or self.machine_slots.is_creating:
                continue  # one that is being made may have found it, and have told nobody yet
            self._image_layers.clear()
            with suppress(FileNotFoundError):  # another collection was faster
                gone = self.links.set_aside(name)  # at once: who comes now makes another
                await asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True)


@cache
def _processor() -> str:
    """This host's, as its kernel names it: an emulated one, too, counts time as fast as that."""
    found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _disk(name: str, path: str, *, is_written: bool = False) -> tuple[str, ...]:
    """One disk, which the guest knows by this serial number. Nothing is forced to the host's disk: a sandbox's layer is
    never needed after the host has crashed.
    """
    modes = "discard=unmap,cache.no-flush=on" if is_written else "read-only=on"
    device = f"virtio-blk-device,drive={name},serial={name}" + (",discard=on" if is_written else "")
    return ("-blockdev", f"driver=file,filename={path},node-name={name},locking=off,{modes}", "-device", device)


_NETWORK = (
    *("-netdev", f"user,id=net,ipv6=off,net={NETWORK},host={GATEWAY}"),
    *("-device", "virtio-net-device,netdev=net"),
)
