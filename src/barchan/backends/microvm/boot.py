"""What a microVM is told on its kernel's command line: guest/boot reads it."""

from msgspec import Struct

# Panics end the machine, which its owner sees; nothing else is worth the serial line's time. The rest saves what an
# emulated processor spends on finding out about itself. Who attacks this kernel has it alone: mitigations help nobody.
BASE = (
    "console=ttyS0 quiet loglevel=1 panic=-1 reboot=t random.trust_cpu=1 mitigations=off nokaslr "
    "tsc=reliable no_timer_check lpj=1000000 rcupdate.rcu_expedited=1"
)
PORT = "barchan"  # name of the virtio-serial port that the init speaks on
DISK = "disk"  # serial number of the writable disk


def layer_serial(index: int) -> str:
    """Serial number of the disk with a layer; 0 is the topmost."""
    return f"layer-{index}"


class Boot(Struct, frozen=True, kw_only=True):
    """What the boot program makes of a machine.

    Attributes:
        layers: How many, each on a disk of its own.
        memory_bytes, pids: Limits of the guest's programs, all together. The machine needs more for its kernel.
        shm_bytes: Size of /dev/shm.
        spool_bytes: What the init may keep of output; the writable disk has so much reserved.
        net: Address with prefix length and gateway of eth0, as `("10.0.3.15/24", "10.0.3.2")`.
        tsc_khz: Of a machine whose processor is emulated: `clock.tsc_khz()`. 0: it finds out itself.
    """

    layers: int
    hostname: str
    memory_bytes: int
    pids: int
    shm_bytes: int
    spool_bytes: int
    root_capable: bool = False
    net: tuple[str, str] | None = None
    tsc_khz: int = 0


def machine_type(*, has_acpi: bool) -> str:
    """QEMU's `-M`. A distribution's kernel finds devices by ACPI alone, ours by its command line, in less time.

    Where ACPI tells it that a PC's interrupt controller is missing, a kernel leaves that as it finds it: had the timer
    ticked by then, the first interrupt it takes is one that it knows nothing of, and it dies.
    """
    return "microvm,acpi=on,pic=off" if has_acpi else "microvm,acpi=off"


def command_line(boot: Boot) -> str:
    """The kernel's, whole."""
    words = [
        BASE,
        f"barchan.layers={boot.layers}",
        f"barchan.hostname={boot.hostname}",
        f"barchan.memory={boot.memory_bytes}",
        f"barchan.pids={boot.pids}",
        f"barchan.shm={boot.shm_bytes}",
        f"barchan.spool={boot.spool_bytes}",
        f"barchan.root={'capable' if boot.root_capable else 'plain'}",
    ]
    if boot.tsc_khz:
        words.append(f"tsc_early_khz={boot.tsc_khz}")
    if boot.net is not None:
        words.append(f"barchan.net={','.join(boot.net)}")
    return " ".join(words)
