"""A guest's root looks for baits of the host's, and of another sandbox's. Argument: the baits, as JSON.

mark        a word in the arguments of processes, in names of files, abstract sockets and queues, in the kernel's log
pid         of a process of the host's
paths       of the host's files and sockets
port        on which the host listens, at every address it has
addresses   the host's
symbol      of the host's kernel, with its address there
"""

import ctypes
import glob
import json
import os
import socket
import stat
import sys

from tests.security.guest import kit

BAITS = json.loads(sys.argv[1])
MARK = BAITS["mark"]
SKIPPED = ("/proc", "/sys")
CONNECT_S = 2.0
VSOCK_HOST, VSOCK_PORTS = 2, (1, 22, 52, 1024, 5000, 9999)
SYSLOG_READ_ALL = 3
libc = ctypes.CDLL(None, use_errno=True)


def processes() -> kit.Evidence:
    """Whose arguments have the mark; this program's own have it, too."""
    own = {os.getpid(), os.getppid()}
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if pid not in own and MARK.encode() in kit.read(f"/proc/{pid}/cmdline", 65536):
                found.append(pid)
        except OSError:
            continue
    return f"{found}" if found else None


def files() -> kit.Evidence:
    """Whose names have the mark, wherever they lie."""
    for directory, names, entries in os.walk("/"):
        names[:] = [name for name in names if os.path.join(directory, name) not in SKIPPED]
        for name in (*names, *entries):
            if MARK in name:
                return os.path.join(directory, name)
    return None


def opens(path: str) -> kit.Attempt:
    """By its path on the host, also through whatever other processes have as their root and directory."""

    def attempt() -> kit.Evidence:
        for place in ("", *glob.glob("/proc/[0-9]*/root"), *glob.glob("/proc/[0-9]*/cwd")):
            try:
                status = os.stat(place + path)
            except OSError:
                continue
            return f"{place}{path}: {'a socket' if stat.S_ISSOCK(status.st_mode) else kit.read(place + path, 64)!r}"
        return None

    return attempt


def connects(path: str) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(CONNECT_S)
            peer.connect(path)
        return f"{path!r} took the connection"

    return attempt


def port() -> kit.Evidence:
    for address in BAITS["addresses"]:
        with socket.socket(socket.AF_INET) as peer:
            peer.settimeout(CONNECT_S)
            if peer.connect_ex((address, BAITS["port"])) == 0:
                return f"{address}:{BAITS['port']}"
    return None


def vsock() -> kit.Evidence:
    """The host of a machine, where there is such a way at all."""
    for number in VSOCK_PORTS:
        with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as peer:
            peer.settimeout(CONNECT_S)
            if peer.connect_ex((VSOCK_HOST, number)) == 0:
                return f"the host's port {number}"
    return None


def abstract_names() -> kit.Evidence:
    names = [line for line in kit.lines("/proc/net/unix") if MARK in line]
    return f"{names}" if names else None


def _read_log(path: str) -> bytes:
    """What can be had of it without waiting; a device jumps over what was overwritten, and says so by EPIPE."""
    seen = b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        while True:
            try:
                piece = os.read(fd, 8192)
            except BrokenPipeError:
                continue
            if not piece:
                return seen
            seen += piece
    except OSError:
        return seen


def log() -> kit.Evidence:
    """The kernel's, which the host has written the mark into: by file, device and system call."""
    seen = _read_log("/dev/kmsg") + _read_log("/proc/kmsg")
    buffer = ctypes.create_string_buffer(1 << 20)
    length = libc.klogctl(SYSLOG_READ_ALL, buffer, len(buffer))
    seen += buffer.raw[: max(0, length)]
    return "the mark is there" if MARK.encode() in seen else None


def symbols() -> kit.Evidence:
    """An address of the host's kernel, which would help an exploit."""
    name, address = BAITS["symbol"]
    for line in kit.lines("/proc/kallsyms"):
        words = line.split()
        if words[2:3] == [name] and int(words[0], 16) == address:
            return line
    return None


def channel() -> kit.Evidence:
    """The way on which the platform speaks to the init, of a machine: its port."""
    for path in (*glob.glob("/dev/vport*"), *glob.glob("/dev/virtio-ports/*"), *glob.glob("/dev/hvc*")):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        except OSError:
            continue
        return f"{path} is open"
    return None


def streams() -> kit.Evidence:
    """The init's own output, which leads to the host, where a kernel lets others open what a process has."""
    for path in ("/proc/1/fd/1", "/proc/1/fd/2"):
        place = os.readlink(path)
        if place != "/dev/null":
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            return f"{path}, which is {place}, is open"
    return None


def memory() -> kit.Evidence:
    """Of the machine, and its ports."""
    for path in ("/dev/mem", "/dev/kmem", "/dev/port", "/proc/kcore"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        return f"{path}: {os.read(fd, 16)!r}"
    return None


ATTEMPTS: dict[str, kit.Attempt] = {
    "processes": processes,
    "files": files,
    **{f"open {name}": opens(path) for name, path in BAITS["paths"].items()},
    **{f"connect {name}": connects(path) for name, path in BAITS["paths"].items() if path.endswith(".sock")},
    "connect abstract": connects(f"\0{MARK}"),
    "abstract names": abstract_names,
    "port": port,
    "vsock": vsock,
    "kernel log": log,
    "kernel addresses": symbols,
    "init's port": channel,
    "init's streams": streams,
    "init's socket": connects("/dev/.barchan/init.sock"),
    "machine memory": memory,
}

if __name__ == "__main__":
    kit.run(ATTEMPTS)
