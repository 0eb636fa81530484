"""What must be known of a container before its memory is stored: mounts, the init's files, places, connections."""

import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from barchan.backends.container.wipe import Area, areas_of
from barchan.errors import BackendError, NotSnapshotable

PROXY_PORT = 3128
# What CRIU makes itself, besides /proc and what is bound from it; everything else is the platform's.
OWN_MOUNTS = frozenset({"/", "/dev/pts", "/dev/shm", "/dev/.barchan"})
_ESTABLISHED = frozenset(range(1, 12)) - {6, 7, 10}  # states of TCP with a peer: not TIME_WAIT, CLOSE, LISTEN
STATUS_BYTES_MAX = 2816  # before the pid: with longer ids, still within STATUS_TEXT_MAX of guest/criu/shim.c
PLACES_BYTES_MAX = (1 << 20) - 1  # RESTORE_TEXT_MAX of guest/criu/restore.h
# A process's directory, what is there of its descriptors and mapped files, and all of its threads but the first: when
# CRIU opens files anew, these are not there yet.
_LATE = re.compile(rb"/proc/(\d+)(/task/(?!\1(/|$))\d+.*|(/task/\1)?(/(fd|fdinfo|map_files)/.+)?)")
_PLACE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


class Inside(Struct, frozen=True):
    """See `MemoryRecord`. `fds`: the init's files, opened for reading. `wiped`: areas for `wipe`, by pid inside."""

    uid_base: int
    mounts: tuple[str, ...]
    files: tuple[str, ...]
    fds: tuple[int, ...]
    places: dict[int, str]
    wiped: dict[int, list[Area]]
    clocks_ns: tuple[int, int]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def look(pid: int, guest: str) -> Inside:
    """Look into a container whose processes, all of them, are stopped. The caller closes what it gets.

    Args:
        pid: Of its init. guest: Its guest's cgroup.
    """
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    files, fds = _init_files(pid, {int(line.split(" ", 1)[0]) for line in lines})
    try:
        mounts = tuple(point for point, kind in map(_mount, lines) if point not in OWN_MOUNTS and kind != "proc")
        places, wiped = _programs(guest)
        uid_base = int(Path(f"/proc/{pid}/uid_map").read_text().split()[1])
        return Inside(uid_base, mounts, files, fds, places, wiped, _clocks(pid))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _mount(line: str) -> tuple[str, str]:
    """Mount point and type of a line of mountinfo."""
    left, _, right = line.partition(" - ")
    return left.split()[4], right.split()[0]


def _init_files(pid: int, known: set[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The init's program, its spool directory and its spool files: what it has open outside the sandbox's mounts."""
    program = f"/proc/{pid}/exe"
    directories: list[str] = []
    spools: list[str] = []
    names: dict[str, str] = {}
    for path in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: int(path.name)):
        if os.readlink(path).startswith("/") and (name := _name(path, known)):
            names[os.fspath(path)] = name
            (directories if os.path.isdir(path) else spools).append(os.fspath(path))
    names[program] = _name(Path(program), known)
    if len(directories) != 1 or not names[program]:
        raise BackendError(f"the init {pid} has no program and one spool directory outside the sandbox")
    ordered = [program, *directories, *spools]
    fds: list[int] = []
    try:
        for path_ in ordered:
            fds.append(os.open(path_, os.O_RDONLY | os.O_CLOEXEC))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return tuple(names[path_] for path_ in ordered), tuple(fds)


def _name(path: Path, known: set[int]) -> str:
    """CRIU's name of an open file, "" if it lies in a mount of the sandbox."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        info = Path(f"/proc/self/fdinfo/{fd}").read_text()
        mount_id = next(int(line.split()[1]) for line in info.splitlines() if line.startswith("mnt_id"))
        return "" if mount_id in known else f"file[{mount_id:x}:{os.stat(fd).st_ino:x}]"
    finally:
        os.close(fd)


def _programs(guest: str) -> tuple[dict[int, str], dict[int, list[Area]]]:
    """For each of the guest's processes the group that it is in, `.` for the guest's own, and its areas to be wiped.

    Raises:
        NotSnapshotable: The platform runs something in the sandbox, or there is what can't be restored.
    """
    platform = Path(guest).with_name("platform")
    if any(_pids(group) for group in (platform, *_groups(platform))):
        raise NotSnapshotable("a command of the platform is running in the sandbox: ask again when it has ended")
    places: dict[int, str] = {}
    wiped: dict[int, list[Area]] = {}
    for group in (Path(guest), *_groups(Path(guest))):
        place = "." if group == Path(guest) else group.name
        for pid in _pids(group):
            _check_opened(pid)
            inside = _pid_inside(Path(f"/proc/{pid}/status").read_bytes())
            places[inside] = place
            if areas := areas_of(Path(f"/proc/{pid}/smaps").read_bytes()):
                wiped[inside] = areas
    if len(places_text(places)) >= PLACES_BYTES_MAX:
        raise NotSnapshotable(f"{len(places)} processes are more than can be restored")
    return places, wiped


def places_text(places: Mapping[int, str]) -> str:
    """As a restore reads them."""
    return "".join(f"{pid} {place}\n" for pid, place in places.items())


def _groups(group: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return [Path(entry.path) for entry in os.scandir(group) if entry.is_dir()]
    return []


def _pids(group: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return (group / "cgroup.procs").read_text().split()
    return []


def _pid_inside(status: bytes) -> int:
    """From a process's status. The name in it is the guest's own: any bytes but the end of a line.

    Raises:
        NotSnapshotable: A restore, which reads no more than its beginning, would not find it.
    """
    at = status.find(b"\nNSpid:")
    if not 0 <= at < STATUS_BYTES_MAX:
        raise NotSnapshotable("a program is in too many groups: at most some 300 can be restored")
    return int(status[at + 1 :].split(b"\n", 1)[0].split()[-1])


def _check_opened(pid: str) -> None:
    """Refuse what CRIU stores without complaint, and then can't restore."""
    paths = [f"/proc/{pid}/cwd", f"/proc/{pid}/root"]
    with suppress(FileNotFoundError):
        paths += [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
    for path in paths:
        with suppress(FileNotFoundError):  # of a process that has ended
            if _LATE.fullmatch(target := os.readlink(os.fsencode(path))):
                raise NotSnapshotable(f"a program has {os.fsdecode(target)} open, or works there: close it first")


def is_place(name: str) -> bool:
    return name == "." or _PLACE.fullmatch(name) is not None


def _clocks(pid: int) -> tuple[int, int]:
    """Monotonic time and time since boot as the container sees them, in ns."""
    offsets = {"monotonic": 0, "boottime": 0}
    with suppress(FileNotFoundError):  # a kernel without time namespaces
        for line in Path(f"/proc/{pid}/timens_offsets").read_text().splitlines():
            name, seconds, nanoseconds = line.split()
            offsets[name] = int(seconds) * 1_000_000_000 + int(nanoseconds)
    return (
        time.clock_gettime_ns(time.CLOCK_MONOTONIC) + offsets["monotonic"],
        time.clock_gettime_ns(time.CLOCK_BOOTTIME) + offsets["boottime"],
    )


def outside_connections(pid: int, network: str) -> list[str]:
    """Peers of the container's TCP connections that leave it: through the proxy, or to another address than its own."""
    found: list[str] = []
    if network == "none":
        return found  # there is nowhere to go; and to read what follows takes the kernel 3 ms
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(FileNotFoundError):  # no IPv6 in this kernel
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                _, local, remote, state, _, _, _, _, _, inode, *_ = line.split()
                if int(state, 16) not in _ESTABLISHED or inode == "0":  # closed, and nobody's any more
                    continue
                if network == "proxy" and PROXY_PORT in (_address(local, family)[1], _address(remote, family)[1]):
                    found.append("the proxy")
                elif not _is_loopback(_address(remote, family)[0]):
                    found.append("{}:{}".format(*_address(remote, family)))
    return sorted(set(found))


def _address(text: str, family: socket.AddressFamily) -> tuple[str, int]:
    """Of the kernel's form: words of the host's byte order in hexadecimal, a colon, the port."""
    address, port = text.split(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"
