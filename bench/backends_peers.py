"""What others take for the same: bwrap, crun, runc, podman, plain runsc and a plain QEMU boot.

    python -m bench.backends_peers NAME ROOT SCRATCH COUNT STATE_DIR

measures one of them and prints JSON; `bench.backends` runs it, crun's in a mount namespace without the version 2
cgroup mount that crun refuses to work beside. ROOT is a Debian root directory, in which each runs `true`.
"""

import json
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from barchan.backends.gvisor import install as runsc_install
from barchan.backends.microvm import kernel
from barchan.backends.qemu import install as qemu_install
from barchan.bench.statistics import Percentiles
from barchan.errors import RequirementMissing
from bench.state_common import memory_bytes

PAUSE_S = "300"
SETTLE_S = 1.0
UP = b"bench-is-up"
MEMORY_MIB = 128  # of a virtual machine
# The whole of a guest: it says that it is up, and waits. A kernel runs it as its first program.
GUEST = f"""
#include <fcntl.h>
#include <unistd.h>
int main(void) {{
	int console = open("/dev/console", O_WRONLY);
	(void)!write(console, "{UP.decode()}\\n", {len(UP) + 1});
	for (;;)
		pause();
}}
"""


class Peer(Struct, frozen=True, kw_only=True):
    """What one of them took, in milliseconds, and bytes of an idle one's memory (proportional).

    Attributes:
        run_ms: From nothing to the end of `true` in it; of the virtual machine to its first program.
        why_not: It could not be measured, or not all of it.
    """

    name: str
    run_ms: Percentiles | None = None
    exec_ms: Percentiles | None = None
    idle_bytes: int | None = None
    why_not: str = ""


class Commands(Struct, frozen=True, kw_only=True):
    """How one is asked. An id names what runs."""

    run: Callable[[str, Sequence[str]], list[str]]
    exec: Callable[[str], list[str]] | None = None
    remove: Callable[[str], list[str]] | None = None


def bwrap(root: Path, scratch: Path, state_dir: Path) -> Commands:
    """All namespaces, a read-only root and a tmpfs; no cgroups, no filter."""
    base = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", str(root), "/"]
    base += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    return Commands(run=lambda name, program: [*base, *program])


def oci(runtime: str, options: Sequence[str], root: Path, scratch: Path) -> Commands:
    """A runtime of OCI bundles, with the configuration that `runc spec` would give."""
    base = [runtime, "--root", str(scratch / "containers"), *options]

    def run(name: str, program: Sequence[str]) -> list[str]:
        bundle = scratch / name
        bundle.mkdir()
        subprocess.run([runtime, "spec"], cwd=bundle, check=True, capture_output=True)
        config = json.loads((bundle / "config.json").read_text())
        config["process"] |= {"terminal": False, "args": list(program)}
        config["root"] = {"path": str(root), "readonly": True}
        (bundle / "config.json").write_text(json.dumps(config))
        return [*base, "run", "--bundle", str(bundle), name]

    return Commands(
        run=run,
        exec=lambda name: [*base, "exec", name, "true"],
        remove=lambda name: [*base, "delete", "--force", name],
    )


def crun(root: Path, scratch: Path, state_dir: Path) -> Commands:
    return oci("crun", ["--cgroup-manager=cgroupfs"], root, scratch)


def runc(root: Path, scratch: Path, state_dir: Path) -> Commands:
    return oci("runc", [], root, scratch)


def runsc(root: Path, scratch: Path, state_dir: Path) -> Commands:
    """gVisor by itself, as it is without a container around it."""
    found = runsc_install.find(state_dir)
    if found is None:
        raise RequirementMissing("runsc is not installed (try: barchan tools install runsc)")
    options = ["--network=none", "--ignore-cgroups", "--overlay2=root:memory"]
    return oci(str(found.program), options, root, scratch)


def podman(root: Path, scratch: Path, state_dir: Path) -> Commands:
    """Over runc, for on a host with both cgroup versions it does not work over crun."""
    base = ["podman", "--root", str(scratch / "storage"), "--runroot", str(scratch / "run"), "--storage-driver=vfs"]
    base += ["--runtime=runc", "--cgroup-manager=cgroupfs"]
    # Its own limits are higher than a root without CAP_SYS_RESOURCE may set.
    limits = ["--network=none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]

    def run(name: str, program: Sequence[str]) -> list[str]:
        return [*base, "run", "--rm", "--name", name, *limits, "--rootfs", f"{root}:O", *program]

    return Commands(
        run=run,
        exec=lambda name: [*base, "exec", name, "true"],
        remove=lambda name: [*base, "rm", "--force", "--time", "0", name],
    )


PEERS: dict[str, Callable[[Path, Path, Path], Commands]] = {
    "bwrap": bwrap,
    "crun": crun,
    "runc": runc,
    "podman": podman,
    "runsc": runsc,
}
QEMU = "qemu"
NAMES = (*PEERS, QEMU)


def measure(name: str, root: Path, scratch: Path, count: int, state_dir: Path) -> Peer:
    if name == QEMU:
        return plain_boot(scratch, count, state_dir)
    if name != "runsc" and shutil.which(name) is None:
        return Peer(name=name, why_not="not installed")
    try:
        commands = PEERS[name](root, scratch, state_dir)
        run_ms = [timed_ms(commands.run(f"bench-run-{number}", ["true"])) for number in range(count)]
        with idle(commands, "bench-idle") as pid:
            exec_ms = [timed_ms(commands.exec("bench-idle")) for _ in range(count)] if commands.exec else []
            taken = memory_bytes(tree(pid))["pss"]
    except RequirementMissing as error:
        return Peer(name=name, why_not=str(error))
    except subprocess.CalledProcessError as error:
        said = (error.stderr or b"").decode("utf-8", "replace").strip().splitlines()
        return Peer(name=name, why_not=f"it failed: {said[-1] if said else error.returncode}")
    return Peer(
        name=name,
        run_ms=Percentiles.of(run_ms),
        exec_ms=Percentiles.of(exec_ms) if exec_ms else None,
        idle_bytes=taken,
    )


def timed_ms(command: Sequence[str]) -> float:
    began = time.monotonic()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return (time.monotonic() - began) * 1e3


@contextmanager
def idle(commands: Commands, name: str) -> Iterator[int]:
    """One that does nothing, as long as this lasts; its first process on this host."""
    command = commands.run(name, ["sleep", PAUSE_S])
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(SETTLE_S)
        yield process.pid
    finally:
        if commands.remove is not None:
            subprocess.run(commands.remove(name), check=False, capture_output=True)
        process.send_signal(signal.SIGKILL)
        process.wait()


def tree(pid: int) -> list[int]:
    """A process and all that have come from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found


def plain_boot(scratch: Path, count: int, state_dir: Path) -> Peer:
    """From QEMU's start to the first program of a Linux on its smallest machine, without hardware's help."""
    found = qemu_install.find(state_dir)
    if found is None:
        return Peer(name=QEMU, why_not="not installed (try: barchan tools install qemu)")
    try:
        guest_kernel = kernel.find(scratch / "kernels" if kernel.best(state_dir) is None else state_dir)
    except RequirementMissing as error:
        return Peer(name=QEMU, why_not=str(error))
    command = [
        *qemu_install.command(found.root, qemu_install.EMULATOR),
        *("-L", f"{found.root}/usr/share/qemu"),
        *("-M", "microvm,acpi=off,pic=on,pit=on,rtc=on", "-accel", "tcg", "-cpu", "max", "-m", str(MEMORY_MIB)),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"),
        *("-kernel", str(guest_kernel.vmlinux), "-initrd", str(guest_of(scratch))),
        *("-append", "console=ttyS0 quiet panic=-1 nokaslr mitigations=off no_timer_check tsc=reliable lpj=1000000"),
    ]
    samples, taken = [], 0
    for _ in range(max(1, count // 4)):
        began = time.monotonic()
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as qemu:
            assert qemu.stdout is not None and qemu.stderr is not None
            said = qemu.stdout.readline()
            while said and UP not in said:
                said = qemu.stdout.readline()
            samples.append((time.monotonic() - began) * 1e3)
            taken = memory_bytes([qemu.pid])["pss"]
            qemu.kill()
            if not said:
                return Peer(
                    name=QEMU, why_not=f"it did not boot: {qemu.stderr.read()[-200:].decode('utf-8', 'replace')}"
                )
    return Peer(name=QEMU, run_ms=Percentiles.of(samples), idle_bytes=taken)


def guest_of(scratch: Path) -> Path:
    """An initial file system with one program, as a cpio archive (`newc`)."""
    source, program, archive = scratch / "guest.c", scratch / "guest", scratch / "guest.cpio"
    source.write_text(GUEST)
    subprocess.run(["cc", "-O2", "-static", "-o", program, source], check=True)
    console = stat.S_IFCHR | 0o600
    parts = [
        (b"dev", stat.S_IFDIR | 0o755, b""),
        (b"dev/console", console, b""),
        (b"init", stat.S_IFREG | 0o755, program.read_bytes()),
        (b"TRAILER!!!", 0, b""),
    ]
    with archive.open("wb") as file:
        for number, (name, mode, data) in enumerate(parts):
            device = (5, 1) if mode == console else (0, 0)
            fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
            head = b"070701" + b"".join(b"%08X" % field for field in fields) + name + b"\0"
            file.write(head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4))
    return archive


def main() -> None:
    name, root, scratch, count, state_dir = sys.argv[1:]
    found = measure(name, Path(root), Path(scratch), int(count), Path(state_dir))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
