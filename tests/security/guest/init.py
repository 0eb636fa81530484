"""A guest tries to signal, trace, starve, read or impersonate process 1, and to reach its socket or descriptors."""

import ctypes
import os
import resource
import signal
import socket
import stat

from tests.security.guest import kit

SOCKET = "/dev/.barchan/init.sock"
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
KCMP_FILE = 0
libc = ctypes.CDLL(None, use_errno=True)


def tell(path: str, flags: int = os.O_RDONLY) -> kit.Attempt:
    """Open, and read if that is what it was opened for."""

    def attempt() -> kit.Evidence:
        fd = os.open(path, flags | os.O_NONBLOCK)
        return f"{path}: {os.read(fd, 64)!r}" if flags == os.O_RDONLY else f"{path} is open for writing"

    return attempt


def links(path: str) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        return f"{path}: {os.readlink(path)}"

    return attempt


def through_root() -> kit.Evidence:
    return f"{os.listdir('/proc/1/root')}"


def descriptors() -> kit.Evidence:
    """Reading a link or opening it, whatever the number."""
    for fd in range(64):
        try:
            return f"{fd}: {os.readlink(f'/proc/1/fd/{fd}')}"
        except FileNotFoundError:
            continue
    return None


def open_descriptors() -> kit.Evidence:
    for fd in range(64):
        try:
            return f"{fd}: open as {os.open(f'/proc/1/fd/{fd}', os.O_RDONLY | os.O_NONBLOCK)}"
        except FileNotFoundError:
            continue
    return None


def writes(name: str, data: bytes) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        kit.write(f"/proc/1/{name}", data)
        return f"{data!r} was written to /proc/1/{name}"

    return attempt


def maps() -> kit.Evidence:
    return kit.read("/proc/1/maps")[:80].decode() or None


def code() -> kit.Evidence:
    return kit.read("/proc/1/auxv")[:8].hex()


def trace(request: int) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        kit.call("ptrace", request, 1, 0, 0)
        return "traced"

    return attempt


def trace_applet() -> kit.Evidence:
    """File operations run as forks of the init: they must be as closed as it is. One that waits is made by the test."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and entry != "1" and int(entry) != os.getpid():
            name = kit.read(f"/proc/{entry}/comm")
            if name.startswith(b"barchan-init"):
                return f"{entry}: {kit.read(f'/proc/{entry}/environ', 16)!r} {os.listdir(f'/proc/{entry}/fd')}"
    return None


def read_memory() -> kit.Evidence:
    buffer = ctypes.create_string_buffer(8)
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 8)
    remote = (ctypes.c_uint64 * 2)(0x400000, 8)
    try:
        kit.call("process_vm_readv", 1, bytes(local), 1, bytes(remote), 1, 0)
    except OSError as error:
        return None if error.errno in (1, 3) else f"errno {error.errno}"
    return "memory was read"


def take_descriptor() -> kit.Evidence:
    pidfd = kit.call("pidfd_open", 1, 0)
    for fd in range(64):
        try:
            return f"descriptor {kit.call('pidfd_getfd', pidfd, fd, 0)}"
        except OSError as error:
            if error.errno != 9:
                raise
    return None


def compare() -> kit.Evidence:
    return f"kcmp says {kit.call('kcmp', 1, os.getpid(), KCMP_FILE, 0, 0)}"


def kill(signo: int) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        os.kill(1, signo)
        return f"signal {signo} was sent"

    return attempt


def queue_signal() -> kit.Evidence:
    signal.pidfd_send_signal(os.pidfd_open(1), signal.SIGCHLD)
    return "SIGCHLD through a pidfd"


def raise_io_signal() -> kit.Evidence:
    """F_SETOWN with F_SETSIG sends a signal of one's choice as the kernel."""
    import fcntl

    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, 1)
    fcntl.fcntl(reader, 10, signal.SIGKILL)
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writer, b"x")
    return None  # what counts is that the init lives, which the test asks it


def limit(kind: int) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        resource.prlimit(1, kind, (4000, 4000))
        return "prlimit of process 1"

    return attempt


def read_limits() -> kit.Evidence:
    return f"{resource.prlimit(1, resource.RLIMIT_NOFILE)}"


def nice() -> kit.Evidence:
    os.setpriority(os.PRIO_PROCESS, 1, 19)
    return "nice 19"


def nice_user() -> kit.Evidence:
    os.setpriority(os.PRIO_USER, 65535, 19)
    return "nice 19 for the init's user"


def affinity() -> kit.Evidence:
    os.sched_setaffinity(1, {0})
    return "bound to processor 0"


def idle_class() -> kit.Evidence:
    os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))
    return "SCHED_IDLE"


def io_class() -> kit.Evidence:
    kit.call("ioprio_set", 1, 1, 3 << 13)
    return "idle I/O class"


def page_out() -> kit.Evidence:
    pidfd = kit.call("pidfd_open", 1, 0)
    vector = (ctypes.c_uint64 * 2)(0x400000, 4096)
    kit.call("process_madvise", pidfd, bytes(vector), 1, 21, 0)
    return "process_madvise"


def enter_namespace() -> kit.Evidence:
    kit.call("setns", kit.call("pidfd_open", 1, 0), kit.CLONE_NEWNS)
    return "setns to process 1"


def connect(path: str) -> kit.Attempt:
    """What counts is an answer: a guest that gets this far is closed without a word."""

    def attempt() -> kit.Evidence:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(3)
        peer.connect(path)
        peer.sendall(b"\x00\x00\x00\x00\x02\x00\x00\x00\x07\x00\x00\x00")  # PING
        answer = peer.recv(64)
        return f"the init answered {answer!r}" if answer else None

    return attempt


def abstract_names() -> kit.Evidence:
    names = [line.split()[-1] for line in kit.lines("/proc/net/unix") if " @" in line]
    return f"{names}" if names else None


def list_socket_dir() -> kit.Evidence:
    return f"{os.listdir('/dev/.barchan')}"


def replace_socket_dir() -> kit.Evidence:
    os.rename("/dev/.barchan", "/dev/moved")
    return "renamed"


def remove_socket() -> kit.Evidence:
    os.unlink(SOCKET)
    return "unlinked"


def inherited_descriptors() -> kit.Evidence:
    """Anything beyond the three that is not this program's own pipe."""
    kinds = []
    for fd in os.listdir("/proc/self/fd"):
        target = os.readlink(f"/proc/self/fd/{fd}") if os.path.lexists(f"/proc/self/fd/{fd}") else ""
        if int(fd) > 2 and target and not target.startswith(("pipe:", "/proc/", "anon_inode:[pidfd]")):
            kinds.append(f"{fd}: {target}")
    return f"{kinds}" if kinds else None


def leave_through_dotdot() -> kit.Evidence:
    for path in ("/..", "/proc/self/root/..", "/proc/self/cwd/../../../.."):
        if os.stat(path).st_ino != os.stat("/").st_ino:
            return f"{path} is not the root"
    return None


def spool_by_mount() -> kit.Evidence:
    """No mount of the init's is in the table, and no directory of the pool can be reached."""
    lines = [line for line in kit.lines("/proc/self/mountinfo") if "btrfs" in line or "/spool" in line]
    return f"{lines}" if lines else None


def write_control_group() -> kit.Evidence:
    """A cgroup file system would let the guest leave its limits."""
    for line in kit.lines("/proc/self/mountinfo"):
        if " - cgroup" in line:
            return f"mounted: {line}"
    for root in ("/sys/fs/cgroup", "/sys/fs"):
        if os.path.exists(root):
            return f"{root} exists"
    return None


def init_owned_files() -> kit.Evidence:
    """Set-id bits of the init's group would make guests members of it."""
    os.chown("/tmp", -1, 65535)
    return f"group of /tmp is the init's, mode {stat.S_IMODE(os.stat('/tmp').st_mode):o}"


ATTEMPTS: dict[str, kit.Attempt] = {
    **{f"read {name}": tell(f"/proc/1/{name}") for name in ("mem", "environ", "syscall", "stack", "pagemap", "io")},
    "write mem": tell("/proc/1/mem", os.O_RDWR),
    **{
        f"write {name}": writes(name, data)
        for name, data in {
            "clear_refs": b"1",
            "coredump_filter": b"ff",
            "oom_score_adj": b"1000",
            "task/1/oom_score_adj": b"1000",
            "oom_adj": b"15",
            "autogroup": b"19",
            "sched": b"0",
            "timerslack_ns": b"4000000000",
            "comm": b"x",
        }.items()
    },
    "maps": maps,
    "auxv": code,
    **{f"link {name}": links(f"/proc/1/{name}") for name in ("root", "cwd", "exe", "ns/mnt", "ns/user")},
    "through root": through_root,
    "descriptors": descriptors,
    "open descriptors": open_descriptors,
    "attach": trace(PTRACE_ATTACH),
    "seize": trace(PTRACE_SEIZE),
    "trace applet": trace_applet,
    "process_vm_readv": read_memory,
    "pidfd_getfd": take_descriptor,
    "kcmp": compare,
    **{f"kill {signo}": kill(signo) for signo in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)},
    "pidfd signal": queue_signal,
    "io signal": raise_io_signal,
    "prlimit nofile": limit(resource.RLIMIT_NOFILE),
    "prlimit cpu": limit(resource.RLIMIT_CPU),
    "read limits": read_limits,
    "nice": nice,
    "nice user": nice_user,
    "affinity": affinity,
    "idle class": idle_class,
    "io class": io_class,
    "process_madvise": page_out,
    "setns": enter_namespace,
    "connect": connect(SOCKET),
    "connect through root": connect(f"/proc/1/root{SOCKET}"),
    "abstract names": abstract_names,
    "list socket dir": list_socket_dir,
    "move socket dir": replace_socket_dir,
    "remove socket": remove_socket,
    "inherited descriptors": inherited_descriptors,
    "dot dot": leave_through_dotdot,
    "pool in the mount table": spool_by_mount,
    "control groups": write_control_group,
    "group of the init": init_owned_files,
}

if __name__ == "__main__":
    kit.run(ATTEMPTS)
