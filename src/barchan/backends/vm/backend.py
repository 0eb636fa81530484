"""Whole machines: a disk of the user's own, a screen, in a QEMU inside a container."""

import asyncio
import errno
import hashlib
import math
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from barchan.backends.base import Capabilities, Host
from barchan.backends.hosted.outer import HostLayer, reach
from barchan.backends.qemu import install
from barchan.backends.qemu.backend import MachineBackend
from barchan.backends.qemu.handle import MachineHandle, greeted
from barchan.backends.qemu.install import Qemu
from barchan.backends.qemu.machine import MEMORY, Machine
from barchan.backends.qemu.shape import GATEWAY, NETWORK, PROCESSES_MAX, Shape, common
from barchan.backends.vm import qga
from barchan.backends.vm.handle import VmHandle
from barchan.backends.vm.probe import requirements
from barchan.backends.vm.seed import FILE, seed_layer
from barchan.errors import BarchanError, ConnectionLost, InvalidSpec, RequirementMissing
from barchan.image import agent
from barchan.image.disks import INITRD, KERNEL
from barchan.image.qcow2 import empty_above
from barchan.image.template import Disk, Layer, Template
from barchan.model.node import Requirement
from barchan.model.sandbox import SandboxSpec
from barchan.wire import guest as wire

BOOT_S = 600.0  # an emulated processor takes 20 to 60 s for a small Linux, on a busy host five times as long
SETTLE_S = 240.0  # which cloud-init may take, on an emulated processor
STORE_S = 120.0  # for its memory and its disk, after the first boot
HELP_AFTER_S = 10.0  # in which a guest may start our agent itself, once its QEMU agent answers
MEMORY_MIB_MIN = 64
SYSTEM_MIB = 192  # of the machine, for its own kernel and services: what programs may take is on top
OVERHEAD_MIB = 256  # what QEMU takes beside its guest's memory: itself, a screen, translated code
SPARE_MIB = 128  # of the outer's disk, beside the guest's
TCG = "tcg,tb-size=64,thread=multi"
QGA_SOCKET = "/dev/shm/qga"
# What udev finds takes drivers, which systemd does not wait for: a screen's resolution comes with one.
SETTLED = "(systemctl is-system-running --wait || sleep 2; udevadm settle --timeout=120) >/dev/null 2>&1"
# Some ask for an address when the system has been up for a while: copies of the machine have it, too.
CONNECTED = """; for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
grep -q '^[^[:space:]]*[[:space:]]00000000' /proc/net/route && break
sleep 2
done"""
PROCESS_ID = "barchan-settle"


class VmBackend(MachineBackend):
    """See `backends.base.Backend`."""

    name = "vm"
    boot_s = BOOT_S
    handle = VmHandle
    capabilities = Capabilities(
        isolation="machine",
        own_kernel=True,
        fork=True,
        memory_snapshot=True,
        shares_memory=True,
        warm=True,
        page_out=True,
        screen=True,
        kinds=frozenset({"disk"}),
        memory_mib_min=MEMORY_MIB_MIN,
        networks=frozenset({"none", "open", "allow"}),
        roots=frozenset({"plain", "capable"}),
        bounds_root=False,
        start_s_max=BOOT_S + SETTLE_S + STORE_S,
    )

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._qemu: Qemu

    def probe(self) -> Sequence[Requirement]:
        return requirements(self.host.state_dir)

    async def start(self) -> None:
        await super().start()
        qemu = await asyncio.to_thread(install.find, self.host.state_dir)
        if qemu is None:
            raise RequirementMissing("machines need QEMU (try: sudo barchan tools install qemu)")
        self._qemu = qemu
        self.run_by = {"QEMU": qemu.version}

    async def shape(self, spec: SandboxSpec, template: Template, image: Sequence[Layer] | None = None) -> Shape:
        below = template.disk
        if below is None:
            raise InvalidSpec(
                f"image {template.name!r} is the root of a file system, and a machine needs a disk that it can boot "
                "from (try: barchan image disk debian, or another backend)",
                template=template.name,
            )
        own = below.above(spec.disk_mib)
        disk = f"/{Disk.file_at(own.depth)}"
        fresh = await asyncio.to_thread(self._fresh_disk, below, own)
        seed = await asyncio.to_thread(seed_layer, self.host.state_dir / self.name, below.user_data or "")
        vcpus, memory_mib = max(1, math.ceil(spec.cpus)), spec.memory_mib + SYSTEM_MIB
        hardware = (
            *common(install.EMULATOR, install.FIRMWARE, TCG, vcpus, memory_mib),
            *("-M", f"q35,memory-backend={MEMORY},vmport=off,suppress-vmdesc=on", "-cpu", "max"),
            *("-blockdev", f"driver=file,filename={disk},node-name=file,locking=off,discard=unmap,cache.no-flush=on"),
            *("-blockdev", "driver=qcow2,file=file,node-name=disk,discard=unmap"),
            *("-device", "virtio-blk-pci,drive=disk,serial=disk,discard=on,werror=report,rerror=report,bootindex=1"),
            *("-blockdev", f"driver=file,filename=/{FILE},node-name=seed,locking=off,read-only=on"),
            *("-device", "virtio-blk-pci,drive=seed,serial=seed"),
            *("-device", "virtio-serial-pci", "-device", f"virtserialport,chardev=guest,name={agent.PORT}"),
            *("-chardev", f"socket,id=qga,path={QGA_SOCKET},server=on,wait=off"),
            *("-device", f"virtserialport,chardev=qga,name={qga.PORT}"),
            *("-device", "virtio-rng-pci", "-device", "VGA", "-device", "qemu-xhci", "-device", "usb-tablet"),
            *(() if spec.network == "none" else _NETWORK),
        )
        equal = [word for word in hardware if disk not in word]
        return Shape(
            layers=(seed, HostLayer(f"qemu-{self._qemu.version}", self._qemu.root)),
            hardware=hardware,
            boot=_boot(below),
            boot_layers=(fresh,),
            memory_mib=memory_mib,
            disk=disk,
            stores_disk=True,
            image=template.layers if image is None else tuple(image),
            engine={
                **self.run_by,
                "hardware": hashlib.sha256("\0".join(equal).encode()).hexdigest()[:16],
                "acceleration": TCG.partition(",")[0],
            },
            outer=self._outer(spec, own),
            below=template,
        )

    def _fresh_disk(self, below: Disk, own: Disk) -> HostLayer:
        """The layer with a disk in which nothing is written; it is the same for all of one template's size."""
        name = f"disk-{below.format if not below.depth else 'qcow2'}-{own.size_bytes}-{own.depth}"
        layer = self.links.layer(name)
        if layer.path.exists():
            return layer
        layer.path.parent.mkdir(parents=True, exist_ok=True)
        lower = Disk.file_at(below.depth).rpartition("/")[2]
        content = empty_above(lower, "qcow2" if below.depth else below.format, own.size_bytes)
        with tempfile.TemporaryDirectory(dir=self.host.state_dir / self.name) as made:
            file = Path(made) / "disk"
            file.write_bytes(content)
            return self.links.make(name, {f"/{Disk.file_at(own.depth)}": file})

    @staticmethod
    def _outer(spec: SandboxSpec, own: Disk) -> SandboxSpec:
        return replace(
            spec,
            memory_mib=spec.memory_mib + SYSTEM_MIB + OVERHEAD_MIB,
            pids_max=PROCESSES_MAX,
            disk_mib=(own.size_bytes >> 20) + SPARE_MIB,
            root="plain",
            env={},
            setup=None,
        )

    async def first(self, machine: Machine, secret: bytes) -> socket.socket:
        """A guest starts our agent by itself, or by the seed, or is helped to it by QEMU's own guest agent."""
        helping = asyncio.ensure_future(help_to_agent(machine, self.boot_s))
        try:
            return await greeted(machine, secret, self.boot_s)
        except BarchanError as error:
            why = helping.result() if helping.done() else "QEMU's guest agent has not answered in time"
            raise ConnectionLost(f"{error}; {why}") from error
        finally:
            helping.cancel()
            await asyncio.wait({helping})

    async def settle(self, handle: MachineHandle) -> None:
        """See `MachineBackend.settle`; with the limits, where the agent has groups that hold programs to them."""
        await super().settle(handle)
        memory_bytes, pids = handle.spec.memory_mib << 20, handle.spec.pids_max
        try:
            await handle.guest.request(lambda tag: wire.configure(tag, memory_bytes=memory_bytes, pids=pids))
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise

    async def booted(self, handle: MachineHandle) -> None:
        """Its own services are up, or it has had its time."""
        flags = wire.StartFlag.FOLLOW
        script = SETTLED if handle.spec.network == "none" else SETTLED + CONNECTED
        start = wire.Start(process_id=PROCESS_ID, argv=("/bin/sh", "-c", script), user="", flags=flags)
        process = await handle.guest.start(start, None)
        await asyncio.wait({process.ended}, timeout=SETTLE_S)
        await self.settle(handle)  # again: its services, cloud-init above all, may have given it another name meanwhile
        await handle.sync()


async def help_to_agent(machine: Machine, patience_s: float) -> str:
    """Have QEMU's guest agent start ours; what it came to, for whoever waits for ours in vain."""
    try:
        line = await qga.GuestAgent.open(reach(machine.outer, QGA_SOCKET))
        try:
            await line.greet(patience_s)
            await asyncio.sleep(HELP_AFTER_S)
            await line.start_agent(await asyncio.to_thread(agent.PROGRAM.read_bytes))
        finally:
            line.close()
    except (BarchanError, OSError) as error:
        return f"QEMU's guest agent did not start ours: {error}"
    return "QEMU's guest agent was told to start ours"


_NETWORK = (
    *("-netdev", f"user,id=net,ipv6=off,net={NETWORK},host={GATEWAY}"),
    *("-device", "virtio-net-pci,netdev=net,romfile="),
)


def _boot(disk: Disk) -> tuple[str, ...]:
    if disk.boot == "bios":
        return ()
    folder = f"/{Disk.FOLDER}"
    return ("-kernel", f"{folder}/{KERNEL}", "-initrd", f"{folder}/{INITRD}", "-append", disk.append)
