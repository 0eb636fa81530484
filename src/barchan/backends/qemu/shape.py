"""What a machine is made of: all that a QEMU is told of it, and by what two machines are equal."""

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from barchan.backends.hosted.outer import HostLayer
from barchan.backends.qemu.machine import GUEST_SOCKET, MEMORY, QMP_SOCKET, RAM_PATH
from barchan.image.template import Layer, Template
from barchan.model.sandbox import SandboxSpec

OVERHEAD_MIB = 128  # what QEMU takes beside its guest's memory: itself, translated code, page tables
PROCESSES_MAX = 160  # QEMU's threads: processors, and up to 64 for its disks
NETWORK, GATEWAY, ADDRESS = "10.0.3.0/24", "10.0.3.2", "10.0.3.15/24"  # not slirp4netns's own 10.0.2.0/24


class Shape(Struct, frozen=True, kw_only=True):
    """One machine.

    Attributes:
        layers: Of its outer, topmost first; without those of its memory.
        hardware: QEMU's arguments that a booted and a restored machine have in common, without its memory.
        boot: Those only for one that boots.
        boot_layers: Of the outer, only for one that boots.
        memory_mib: Of the guest.
        disk: Path in the outer of the disk that it writes to.
        stores_disk: A memory directory has the disk; else it lies in a cut of the outer.
        image: The layers of its template that it sees, topmost first.
        engine: What must be equal where its memory is restored; see `MemoryRecord.engine`.
        outer: The spec of its outer.
        below: A template whose layers the outer has below its own.
    """

    layers: tuple[HostLayer, ...]
    hardware: tuple[str, ...]
    boot: tuple[str, ...]
    boot_layers: tuple[HostLayer, ...]
    memory_mib: int
    disk: str
    stores_disk: bool
    image: tuple[Layer, ...]
    engine: dict[str, str]
    outer: SandboxSpec
    below: Template | None = None

    def booting(self) -> list[str]:
        """The whole command of a machine that boots; its memory is anonymous."""
        memory = f"memory-backend-memfd,id={MEMORY},size={self.memory_mib}M,share=on"
        return [*self.hardware, "-object", memory, *self.boot]

    def restored(self) -> list[str]:
        """Of one that waits for a state. All that come of one memory file share what they have not written to."""
        memory = (
            f"memory-backend-file,id={MEMORY},size={self.memory_mib}M,mem-path={RAM_PATH},share=off,readonly=on,rom=off"
        )
        incoming = ("-incoming", "defer", "-global", "migration.send-configuration=off")
        return [*self.hardware, "-object", memory, *incoming]

    @property
    def key(self) -> str:
        """Equal for machines of which one's memory can go on as another one, before anything was run in it."""
        content = (
            self.hardware,
            self.boot,
            self.boot_layers,
            self.layers,
            self.memory_mib,
            self.below and self.below.digest,
            sorted(self.engine.items()),
        )
        return hashlib.sha256(msgspec.json.encode(str(content))).hexdigest()[:32]


def common(emulator: str, firmware: Sequence[str], accelerator: str, vcpus: int, memory_mib: int) -> list[str]:
    """The beginning of every machine's command: confined, without what nobody asked for, and with our sockets."""
    directories = [word for path in firmware for word in ("-L", path)]
    return [
        *(emulator, *directories, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        *("-accel", accelerator, "-smp", str(vcpus), "-m", f"{memory_mib}M"),
        # A guest that ends stays to be asked why.
        *("-action", "reboot=shutdown,shutdown=pause,panic=pause"),
        *("-chardev", f"socket,id=qmp,path={QMP_SOCKET},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
        *("-chardev", "ringbuf,id=console,size=65536", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=guest,path={GUEST_SOCKET},server=on,wait=off"),
    ]
