"""The two halves of a memory snapshot with CRIU: a sandbox that is dumped, and one that is restored from the images.

Both do with Python what a supervisor and a node would do, on hosts with cgroup version 1 controllers.
"""

import contextlib
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import criu_kernel as kernel
from criu_links import INIT_DIR, Guest, Supervisor

from barchan.wire import guest

SANDBOX, HOSTNAME = "dumped", "trial"
INIT_UID, UIDS = 65535, 65536
OWN_MOUNTS = ("/", "/dev/pts", "/dev/shm", INIT_DIR)  # what CRIU makes itself, like /proc and the binds of it
NAMESPACES = {"net": kernel.CLONE_NEWNET, "uts": kernel.CLONE_NEWUTS, "time": kernel.CLONE_NEWTIME}
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
SPOOLED = 300_000  # bytes: more than the init keeps in memory
# Prints the value of each line, an expression. Its state: counter, thread, socket pair, unlinked file, semaphore.
PROGRAM = """
import ctypes, os, queue, socket, sys, tempfile, threading, time
libc, counter = ctypes.CDLL(None, use_errno=True), 0
client, peer = socket.socketpair()
todo, unlinked = queue.Queue(), tempfile.TemporaryFile(dir="/dev/shm")
unlinked.write(b"unlinked")
semaphore = libc.semget(0, 1, 0o1600)
libc.semctl(semaphore, 0, 16, 7)
def echo():
    while True:
        peer.sendall(todo.get())
threading.Thread(target=echo, daemon=True).start()
def connected():
    todo.put(b"through")
    return client.recv(7)
def read_semaphore():
    return libc.semctl(semaphore, 0, 12)
def denied():
    return libc.unshare(0x10000000), ctypes.get_errno()
def read_unlinked():
    unlinked.seek(0)
    return unlinked.read()
for line in sys.stdin:
    counter += 1
    print(repr(eval(line)), flush=True)
"""


class Mount:
    """A line of mountinfo."""

    def __init__(self, line: str) -> None:
        left, right = line.split(" - ")
        fields = left.split()
        self.root, self.point, self.kind = fields[3], fields[4], right.split()[0]

    @property
    def is_external(self) -> bool:
        """Whether CRIU must be handed this mount: it can't make device nodes, or see what lies outside the sandbox."""
        return self.point not in OWN_MOUNTS and self.kind != "proc"


class Dumped:
    """The sandbox that is dumped, and what must be known of it for a restore."""

    def __init__(self, supervisor: Supervisor, layer: Path) -> None:
        supervisor.request("layer", digest="base", type="dir" if layer.is_dir() else "erofs", path=str(layer))
        message, fds = supervisor.request(
            "create", id=SANDBOX, layers="base", upper_bytes=1 << 28, memory_bytes=1 << 29, pids=256, cpu_us=0,
            shm_bytes=1 << 24, hostname=HOSTNAME, network="none",
        )  # fmt: skip
        os.close(fds[1])
        self.pid, self.uid_base = message.number("pid"), message.number("uid_base")
        self.link = Guest(socket.socket(fileno=fds[0]))
        self.link.wait(guest.HELLO_TAG)

    def start_programs(self) -> None:
        pty, stdin, none = guest.StartFlag.PTY, guest.StartFlag.STDIN, guest.StartFlag(0)
        link = self.link
        self.shell = link.start("shell", ["/bin/bash", "--norc", "-i"], pty | stdin)
        self.python = link.start("python", ["/usr/bin/python3", "-c", PROGRAM], stdin)
        # A script travels by descriptor 3, a memory file.
        self.bulk = link.start(
            "bulk", ["/bin/bash", "/dev/fd/3"], none, script=b"printf %%%ds x; sleep 1000\n" % SPOOLED
        )
        self.shell_in = link.stdin(
            self.shell.handle, 0, "value=41; echo kept > /tmp/file; sleep 900 & echo go$((1+1))\n"
        )
        link.expect(self.shell.handle, "go2")
        self.python_in = link.stdin(self.python.handle, 0, "time.monotonic()\n")
        self.monotonic_s = float(link.expect(self.python.handle, "\n"))
        link.expect(self.bulk.handle, "x")
        self.listed = guest.decode_list(link.request(lambda tag: guest.list_from(0, tag)))

    def look(self) -> None:
        """What can be seen only while it lives: mounts, places in cgroups, the init's files in hidden mounts."""
        lines = Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()
        self.mounts = [mount for mount in map(Mount, lines) if mount.is_external]
        self.devices = {mount.point: os.lstat(f"/proc/{self.pid}/root{mount.point}").st_dev for mount in self.mounts}
        known = {int(line.split()[0]) for line in lines}
        self.outside = {}
        for path in (Path(f"/proc/{self.pid}/exe"), *Path(f"/proc/{self.pid}/fd").iterdir()):
            if os.readlink(path).startswith("/"):
                fd = os.open(path, os.O_PATH)
                info = Path(f"/proc/self/fdinfo/{fd}").read_text()
                mount_id = int(next(line for line in info.splitlines() if line.startswith("mnt_id")).split()[1])
                if mount_id not in known:
                    self.outside[f"file[{mount_id:x}:{path.stat().st_ino:x}]"] = os.open(path, os.O_RDONLY)
                os.close(fd)
        self.places = {}
        for pid in processes_of(self.pid):
            unified = Path(f"/proc/{pid}/cgroup").read_text().split("0::")[1].split()[0]
            self.places[pid_inside(pid)] = unified.partition(f"/{SANDBOX}")[2].strip("/")

    def pause(self, group: Path) -> None:
        """Freeze it, as a node does with a sandbox that waits."""
        self.group = group
        (group / "cgroup.freeze").write_text("1")
        while "frozen 1" not in (group / "cgroup.events").read_text():
            time.sleep(0.001)

    def detach(self) -> bool:
        """Ask the init to let go of us; whether it closed the connection."""
        self.link.request(lambda tag: guest.frame(guest.Request.DETACH, tag))
        closed = self.link.sock.recv(1) == b""
        self.link.sock.close()
        return closed

    def dump(self, command: list[str], images: Path) -> float:
        """Dump and end it; milliseconds."""
        images.mkdir()
        held = {name: os.open(f"/proc/{self.pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES}
        resources = [f"mnt[{mount.point}]:{mount.point}" for mount in self.mounts] + list(self.outside)
        self.stopped_ns = [time.clock_gettime_ns(clock) for clock in (time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME)]

        def enter() -> None:
            # CRIU takes these for its own and leaves them alone: they belong to the host's user namespace.
            for name, fd in held.items():
                kernel.setns(fd, NAMESPACES[name])
            private_mounts()

        words = ["--tree", str(self.pid), "--freeze-cgroup", str(self.group), "--network-lock", "skip"]
        externals = [word for resource in resources for word in ("--external", resource)]
        elapsed_ms = run_criu([*command, "dump", *words, *externals], images, enter)
        for fd in held.values():
            os.close(fd)
        return elapsed_ms


class Restored:
    """One restore: its writable layer, cgroups and namespaces are made here as a supervisor would."""

    def __init__(
        self, dumped: Dumped, supervisor: Supervisor, name: str, uid_base: int, cleanup: contextlib.ExitStack
    ) -> None:
        self.dumped, self.supervisor, self.name, self.uid_base, self.cleanup = (
            dumped,
            supervisor,
            name,
            uid_base,
            cleanup,
        )
        self.userns = kernel.user_namespace(uid_base, UIDS)

    def make_cgroups(self) -> None:
        base = f"barchan/{self.supervisor.name}"
        self.inits = [CGROUPS / name / base / "init" for name in CONTROLLERS]
        self.leaves = [CGROUPS / name / base / self.name for name in CONTROLLERS]
        self.unified = CGROUPS / "unified" / base / self.name
        guests = sorted({"guest", *filter(None, self.dumped.places.values())})
        owner = self.uid_base + INIT_UID
        for path in [*self.leaves, self.unified, *(self.unified / place for place in guests)]:
            path.mkdir()
            if path not in self.leaves:
                os.chown(path / "cgroup.procs", owner, owner)
                os.chown(path, owner, owner)

    def make_mounts(self, layer: Path, program: Path) -> None:
        """The layer, the writable layer as it was at the dump, a fresh spool, and a mount for each external one."""
        pool = os.open(self.supervisor.pool(), os.O_RDONLY)
        uppers, source = (
            os.open("upper", os.O_RDONLY, dir_fd=pool),
            os.open(f"upper/{SANDBOX}", os.O_RDONLY, dir_fd=pool),
        )
        kernel.snapshot_subvolume(source, uppers, self.name)
        self.cleanup.callback(kernel.delete_subvolume, uppers, self.name)
        os.mkdir(f"upper/{self.name}/work", 0o700, dir_fd=pool)
        os.mkdir(f"spool/{self.name}", 0o700, dir_fd=pool)
        os.chown(f"spool/{self.name}", self.uid_base + INIT_UID, self.uid_base + INIT_UID, dir_fd=pool)
        self.lower, self.upper = kernel.clone_mount(-100, str(layer)), kernel.clone_mount(pool, f"upper/{self.name}")
        for fd in (self.lower, self.upper):
            kernel.idmap_mount(fd, self.userns)
        self.make_spool(kernel.clone_mount(pool, f"spool/{self.name}"), program)
        self.parts = {}
        for mount in self.dumped.mounts:
            if mount.kind == "sysfs":
                self.parts[mount.point] = kernel.clone_mount(-100, f"/sys{mount.root}")
            else:
                fd = os.open(self.supervisor.mount_of(self.dumped.devices[mount.point]), os.O_RDONLY)
                self.parts[mount.point] = kernel.clone_mount(fd, mount.root.lstrip("/"))
                os.close(fd)

    def make_spool(self, mount_fd: int, program: Path) -> None:
        """The init's directory for output, and copies of the unlinked files that it had there."""
        spool = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount_fd)
        os.close(mount_fd)
        self.outside = {}
        for resource, source in self.dumped.outside.items():
            size = os.fstat(source).st_size
            if os.path.isdir(f"/proc/self/fd/{source}"):
                self.outside[resource] = spool
                continue
            if os.fstat(source).st_nlink > 0:
                self.outside[resource] = os.open(program, os.O_RDONLY)
                continue
            copy = self.outside[resource] = os.open(".", os.O_RDWR | os.O_TMPFILE, 0o600, dir_fd=spool)
            os.fchown(copy, self.uid_base + INIT_UID, self.uid_base + INIT_UID)
            while size > 0:
                size -= os.copy_file_range(source, copy, size, os.fstat(source).st_size - size)

    def enter(self, clock: int) -> None:
        """In the process that becomes CRIU: everything the sandbox shall have that CRIU does not make."""
        for group in (*self.inits, self.unified):
            (group / "cgroup.procs").write_text("0")
        kernel.unshare(kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP)
        kernel.setns(clock, kernel.CLONE_NEWTIME)
        socket.sethostname(HOSTNAME)
        kernel.raise_loopback()
        private_mounts()
        for name in ("lower", "upper", "root"):
            os.mkdir(f"/run/{name}")
        kernel.attach_mount(self.lower, "/run/lower")
        kernel.attach_mount(self.upper, "/run/upper")
        places = "lowerdir=/run/lower,upperdir=/run/upper/u,workdir=/run/upper/work"
        options = f"{places},volatile,uuid=off,xino=auto,redirect_dir=on"
        kernel.mount_as(self.uid_base, "overlay", "/run/root", "overlay", kernel.MS_NODEV | kernel.MS_NOSUID, options)
        for index, fd in enumerate(self.parts.values()):
            path = Path(f"/run/part{index}")
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                path.mkdir()
            else:
                path.touch()
            kernel.attach_mount(fd, str(path))

    def restore(self, command: list[str], images: Path, work: Path) -> None:
        start = time.monotonic()
        now_ns = [time.clock_gettime_ns(clock) for clock in (time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME)]
        clock = kernel.time_namespace(*(then - now for then, now in zip(self.dumped.stopped_ns, now_ns, strict=True)))
        externals = [w for i, point in enumerate(self.parts) for w in ("--external", f"mnt[{point}]:/run/part{i}")]
        externals += [w for resource, fd in self.outside.items() for w in ("--inherit-fd", f"fd[{fd}]:{resource}")]
        pid_file = work / f"{self.name}.pid"
        words = [
            "--root",
            "/run/root",
            "--restore-detached",
            "--restore-sibling",
            "--pidfile",
            str(pid_file),
            "--skip-file-rwx-check",
            *externals,
        ]
        self.criu_ms = run_criu(
            [*command, "restore", *words], images, lambda: self.enter(clock), tuple(self.outside.values())
        )
        self.pid = int(pid_file.read_text())
        self.cleanup.callback(end_process, self.pid)
        self.place_programs()
        fds = [os.open(leaf / "cgroup.procs", os.O_WRONLY) for leaf in self.leaves]
        fds.append(os.open(self.unified / "guest", os.O_RDONLY | os.O_DIRECTORY))
        self.link = Guest.connect(self.pid, fds)
        self.link.request(guest.ping)
        self.first_ping_ms = (time.monotonic() - start) * 1e3
        for fd in (*fds, clock, self.lower, self.upper, *self.parts.values(), *self.outside.values()):
            os.close(fd)

    def place_programs(self) -> None:
        """Put what CRIU restored into the init's groups back into the guest's leaf and its child groups."""
        for pid in processes_of(self.pid):
            place = self.dumped.places[pid_inside(pid)]
            if place:
                for group in (*self.leaves, self.unified / place):
                    (group / "cgroup.procs").write_text(str(pid))


def private_mounts() -> None:
    """A mount namespace of CRIU's own, with a tmpfs on /run: there it keeps what it found out about the kernel."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/run", "tmpfs")


def run_criu(command: list[str], images: Path, enter: Callable[[], None], fds: tuple[int, ...] = ()) -> float:
    """Run CRIU where `enter` leads; milliseconds. Ends the trial with CRIU's own words when it fails."""
    log = images / "criu.log"
    start = time.monotonic()
    words = ["--images-dir", str(images), "--log-file", log.name, "-v2", "--manage-cgroups=ignore", "--file-locks"]
    words += ["--ghost-limit", "64M"]  # of an unlinked file that a program has open
    done = subprocess.run(
        [*command, *words], preexec_fn=enter, pass_fds=fds, timeout=60, stdin=subprocess.DEVNULL, check=False
    )
    elapsed_ms = (time.monotonic() - start) * 1e3
    if done.returncode != 0:
        raise SystemExit(f"CRIU failed:\n{log.read_text()}")
    return elapsed_ms


def shift_user_namespace(images: Path, uid_base: int) -> None:
    """Write the one image that holds ids of the host: both maps, one extent each, `0 uid_base 65536`."""

    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)

    extent = b"\x08\x00\x10" + varint(uid_base) + b"\x18" + varint(UIDS)
    body = b"".join(bytes([field]) + varint(len(extent)) + extent for field in (0x0A, 0x12))
    (path,) = images.glob("userns-*.img")
    magics = path.read_bytes()[:8]
    path.write_bytes(magics + struct.pack("<I", len(body)) + body)


def processes_of(init_pid: int) -> list[int]:
    """The processes of a pid namespace, by the pids of ours."""
    namespace = os.readlink(f"/proc/{init_pid}/ns/pid")
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            if os.readlink(path / "ns/pid") == namespace:
                found.append(int(path.name))
    return sorted(found)


def pid_inside(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid")).split()[-1])


def end_process(pid: int) -> None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
