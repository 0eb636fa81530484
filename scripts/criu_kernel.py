"""The few kernel calls that Python has no name for: namespaces, detached mounts, btrfs snapshots. Linux, any 64-bit."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

CLONE_NEWTIME = 0x80
CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000
MOUNT_ATTR_IDMAP = 0x100000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_OPEN_TREE_CLONE, _AT_EMPTY_PATH, _MOVE_FROM_EMPTY_PATH = 1, 0x1000, 4
_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP = 28, 4
_BTRFS_SNAP_CREATE, _BTRFS_SNAP_DESTROY = 0x50009401, 0x5000940F

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def _syscall(number: int, *arguments: int | bytes) -> int:
    return int(
        _libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    )


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    _check(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> None:
    _check(
        _libc.mount(source.encode(), target.encode(), kind and kind.encode(), flags, data.encode()), f"mount {target}"
    )


def clone_mount(dir_fd: int, path: str) -> int:
    """A detached copy of the mount at `path` (without what is mounted below it)."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (0 if path else _AT_EMPTY_PATH)
    return _check(_syscall(_OPEN_TREE, dir_fd, path.encode(), flags), f"open_tree {path}")


def attach_mount(mount_fd: int, path: str) -> None:
    _check(_syscall(_MOVE_MOUNT, mount_fd, b"", -100, path.encode(), _MOVE_FROM_EMPTY_PATH), f"move_mount {path}")


def idmap_mount(mount_fd: int, userns_fd: int) -> None:
    attributes = struct.pack("=QQQQ", MOUNT_ATTR_IDMAP, 0, 0, userns_fd)
    _check(_syscall(_MOUNT_SETATTR, mount_fd, b"", _AT_EMPTY_PATH, attributes, len(attributes)), "idmap")


def mount_as(uid: int, source: str, target: str, kind: str, flags: int, data: str) -> None:
    """Mount with the file system identity of `uid`, all capabilities kept: an overlay writes as whoever mounted it."""
    _check(_libc.prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, 0, 0, 0), "securebits")
    _libc.setfsuid(uid)
    _libc.setfsgid(uid)
    try:
        mount(source, target, kind, flags, data)
    finally:
        _libc.setfsuid(0)
        _libc.setfsgid(0)
        _check(_libc.prctl(_PR_SET_SECUREBITS, 0, 0, 0, 0), "securebits")


def _made_by_child(make: Callable[[], None], name: str, finish: Callable[[int], None] = lambda pid: None) -> int:
    """A descriptor of the namespace `name` of a child that calls `make`; `finish` gets its pid while it waits."""
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            make()
            os.write(ready_write, b"r")
            os.close(done_write)
            os.read(done_read, 1)
        finally:
            os._exit(0)
    os.close(ready_write)
    try:
        if os.read(ready_read, 1) != b"r":
            raise OSError(f"a namespace could not be made: {name}")
        finish(child)
        return os.open(f"/proc/{child}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (ready_read, done_read, done_write):
            os.close(fd)
        os.waitpid(child, 0)


def time_namespace(monotonic_ns: int, boottime_ns: int) -> int:
    """A new time namespace whose clocks differ from ours by these offsets."""

    def make() -> None:
        unshare(CLONE_NEWTIME)
        offsets = (("monotonic", monotonic_ns), ("boottime", boottime_ns))
        lines = [f"{name} {value // 1_000_000_000} {value % 1_000_000_000}\n" for name, value in offsets]
        Path("/proc/self/timens_offsets").write_text("".join(lines))

    return _made_by_child(make, "time_for_children")


def user_namespace(id_base: int, count: int) -> int:
    """A new user namespace that maps 0.. to `id_base`.., users and groups."""

    def write_maps(pid: int) -> None:
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(f"0 {id_base} {count}")

    return _made_by_child(lambda: unshare(CLONE_NEWUSER), "user", write_maps)


def raise_loopback() -> None:
    """Bring `lo` up in the current network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH22x", b"lo", 0x41))


def snapshot_subvolume(source_fd: int, parent_fd: int, name: str) -> None:
    fcntl.ioctl(parent_fd, _BTRFS_SNAP_CREATE, bytearray(struct.pack("q4088s", source_fd, name.encode())))


def delete_subvolume(parent_fd: int, name: str) -> None:
    fcntl.ioctl(parent_fd, _BTRFS_SNAP_DESTROY, bytearray(struct.pack("q4088s", 0, name.encode())))
