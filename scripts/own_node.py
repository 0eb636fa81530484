"""A node of a script's own, with a copy of the machine's images, and what the kernel tells of its processes."""

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from barchan.sdk.endpoint import default_state_dir

CGROUPS = Path("/sys/fs/cgroup")
MACHINE = Path("/proc")
END_S_MAX = 900.0  # some thousand sandboxes may have to come back from swap to end
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class OwnNode:
    """A running node. Its supervisor starts with its first sandbox."""

    def __init__(self, state_dir: Path, options: Sequence[str]) -> None:
        stat = state_dir.stat()
        self.state_dir = state_dir
        self.options = options
        self.process = self._start()
        self.cgroup = f"n{stat.st_ino:x}-{stat.st_dev:x}"  # as the container backend names it
        self._supervisor = 0

    def _start(self) -> "subprocess.Popen[bytes]":
        ready, ready_end = os.pipe()
        # It dies with this process, even if that is killed; the supervisor then cleans up after its grace.
        guard = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "barchan.node"]
        words = ["--state-dir", str(self.state_dir), "--idle-exit-s", "0", "--ready-fd", str(ready_end), *self.options]
        with open(self.state_dir / "node.log", "ab") as log:
            process = subprocess.Popen(
                [*guard, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(ready_end,)
            )
        os.close(ready_end)
        with open(ready, "rb") as pipe:
            said = pipe.readline()
        if said != b"ready\n":
            process.kill()
            process.wait()
            sys.exit(f"the node did not start: {said!r}\n{(self.state_dir / 'node.log').read_text()[-4000:]}")
        return process

    def kill(self) -> None:
        """End the node as a crash would; its sandboxes and their supervisor live on."""
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        """After `kill`: the next node of the same state directory."""
        self.process = self._start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def supervisor_pid(self) -> int:
        """The supervisor's pid, looked for once; 0: there is none yet."""
        if not self._supervisor:
            self._supervisor = next((pid for pid, argv in processes() if self.cgroup in argv), 0)
        return self._supervisor

    def cgroup_dirs(self) -> list[Path]:
        """This node's group in each hierarchy that has one."""
        return [path for root in (CGROUPS, *CGROUPS.iterdir()) if (path := root / "barchan" / self.cgroup).is_dir()]

    def shut_down(self) -> None:
        """End every sandbox, the node and its supervisor."""
        connection = http.client.HTTPConnection("localhost", timeout=END_S_MAX)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(END_S_MAX)
        with contextlib.closing(connection):
            connection.sock.connect(os.fspath(self.state_dir / "node.sock"))
            connection.request("POST", "/v1/node/shutdown")
            connection.getresponse().read()
        self.process.wait(END_S_MAX)


@contextlib.contextmanager
def own_node(images: Path | None = None, *options: str) -> Iterator[OwnNode]:
    """A node in a fresh state directory, which goes with it at the end.

    Args:
        images: The store to copy; the machine's if not given.
        options: More words for the node's command line.
    """
    images = images or default_state_dir() / "images"
    if not images.is_dir():
        sys.exit(f"no images in {images} (try: sudo barchan image build debian)")
    with TemporaryDirectory(prefix="barchan-own-", dir="/var/tmp") as name:
        state_dir = Path(name)
        shutil.copytree(images, state_dir / "images", symlinks=True, ignore=_unfinished)
        node = OwnNode(state_dir, options)
        try:
            yield node
        finally:
            if node.process.poll() is None:
                node.shut_down()


def _unfinished(folder: str, names: Sequence[str]) -> set[str]:
    """What somebody is building in an image store right now."""
    return {"tmp"} & set(names) if Path(folder).name == "images" else set()


def drop_page_cache() -> None:
    """Of the whole machine, after everything written is on disk."""
    subprocess.run(["sync"], check=True)
    (MACHINE / "sys/vm/drop_caches").write_text("3")


def cgroup_count(node: OwnNode) -> int:
    """Directories of all hierarchies at and below the node's own groups."""
    return sum(1 for root in node.cgroup_dirs() for _ in os.walk(root))


def pool_bytes(node: OwnNode) -> int:
    """What the writable layers of the node's sandboxes take, as the pool's file system counts it."""
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        if backing.read_text().startswith(f"{node.state_dir}/"):
            (device,) = Path("/sys/fs/btrfs").glob(f"*/devices/{backing.parts[3]}")
            counts = (device.parents[1] / "allocation").glob("*/bytes_used")
            return sum(int(count.read_text()) for count in counts)
    return 0


def processes() -> Iterator[tuple[int, list[str]]]:
    """Every process of the host with its arguments; one that ends meanwhile is left out."""
    for entry in MACHINE.iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
            except (FileNotFoundError, ProcessLookupError):
                continue


def status_of(pid: int, field: str) -> int:
    """A number of /proc/PID/status: VmRSS in KiB, Threads."""
    lines = (MACHINE / str(pid) / "status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def descriptors_of(pid: int) -> int:
    return len(os.listdir(MACHINE / str(pid) / "fd"))


def mounts_of(pid: int) -> int:
    """Mounts in the mount namespace of a process."""
    return (MACHINE / str(pid) / "mountinfo").read_bytes().count(b"\n")


def cpu_s_of(pid: int) -> float:
    """User and system time of a process, without its children's; 0 when it is gone."""
    try:
        fields = (MACHINE / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def machine_cpu_s() -> dict[str, float]:
    """The processors' time since boot, all together: `busy`, `idle` and what the hypervisor took (`steal`)."""
    words = (MACHINE / "stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, idle, wait, irq, soft, steal = (int(word) / TICKS_PER_S for word in words[:8])
    return {"busy": user + nice + system + irq + soft, "idle": idle + wait, "steal": steal}
