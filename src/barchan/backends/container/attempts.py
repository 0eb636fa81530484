"""Try in forked children what the container backend will ask of the kernel; print as JSON: name -> "" or what failed.

Run as a program of its own (standard library only), because a thread of a big process can't fork safely, and because
everything tried here changes the process that tries it.
"""

import base64
import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

ATTEMPT_S = 10
CLONE_NEWTIME, CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x80, 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
NAMESPACES = {
    "mnt": CLONE_NEWNS,
    "pid": CLONE_NEWPID,
    "net": CLONE_NEWNET,
    "ipc": CLONE_NEWIPC,
    "uts": CLONE_NEWUTS,
    "cgroup": CLONE_NEWCGROUP,
    "time": CLONE_NEWTIME,
}
MS_RDONLY, MS_REC, MS_PRIVATE = 0x1, 0x4000, 0x40000
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
SYS_OPEN_TREE, SYS_MOUNT_SETATTR = 428, 442  # the same on every architecture
OPEN_TREE_CLONE, MOUNT_ATTR_IDMAP = 0x1, 0x100000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
SECCOMP_RET_ALLOW = 0x7FFF0000
LOOP_CTL_GET_FREE = 0x4C82
IDS, FIRST_ID = 65536, 200_000
OPEN_FILES = 8192  # a sandbox takes a handful in the node and in the supervisor

# A file system of one compressible file, `probe`: mkfs.erofs -T946684800 -U 0... -x-1 -zlz4hc of 1024 times "barchan ".
EROFS_CONTENT = b"barchan " * 1024
EROFS_IMAGE = (
    b"c-rmRJqp4w6u|M9DB|GY5i(S|NM{EZ@d93<716~HdV+caFX1^ni#iI9&hb%VMJS@1;Qt4Yyo8tJ4cQ_B;9s3jx8v|Izce)ONF+9_7vtsN"
    b"QDeV2&uDo6d3{skI<nFabMIewN7ZPnyr+2_@>p+7l4O&wvsvBwEsgzFyK>L|Oij<yHICN+0000000000fZwvq(tNr|SFT-tq`f1PvhWVYu{l%"
)

libc = ctypes.CDLL(None, use_errno=True)


class Place(NamedTuple):
    """What attempts may use: an empty directory to mount on, and a file with the EROFS image."""

    directory: str
    image: str


Attempt = Callable[[Place], None]


def check(returned: int, what: str) -> int:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return returned


def unshare(flags: int) -> None:
    check(libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    done = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    check(done, f"mount {kind}")


def map_self() -> None:
    """Be root of a new user namespace that maps this user alone."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"0 {uid} 1")
    write("/proc/self/gid_map", f"0 {gid} 1")


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def private_mounts(place: Place) -> None:
    """Leave the host's mounts alone from here on, with an empty file system on `place.directory`."""
    unshare(CLONE_NEWNS)
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("none", place.directory, "tmpfs")


def shifted_namespace() -> tuple[int, int]:
    """A user namespace with a range of ids, as a sandbox gets one: (its descriptor, the child that holds it)."""
    ready, made = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            unshare(CLONE_NEWUSER)
            os.write(made[1], b"x")
            os.read(ready[0], 1)
            code = 0
        finally:
            os._exit(code)
    os.close(made[1])
    if os.read(made[0], 1) != b"x":
        os.waitpid(child, 0)
        raise OSError(errno.EPERM, "unshare(CLONE_NEWUSER) is refused")
    try:
        write(f"/proc/{child}/uid_map", f"0 {FIRST_ID} {IDS}")
        write(f"/proc/{child}/gid_map", f"0 {FIRST_ID} {IDS}")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC), child
    except OSError:
        end(child)
        raise


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def try_user_namespace(_: Place) -> None:
    map_self()


def try_id_range(_: Place) -> None:
    end(shifted_namespace()[1])


def try_namespace(flag: int, _: Place) -> None:
    unshare(CLONE_NEWUSER | flag)


def try_host_mounts(place: Place) -> None:
    private_mounts(place)


def try_overlay(place: Place) -> None:
    """As a sandbox does it: in a user namespace."""
    map_self()
    private_mounts(place)
    lower, upper, work, merged = (f"{place.directory}/{name}" for name in ("lower", "upper", "work", "merged"))
    for path in (lower, upper, work, merged):
        os.mkdir(path)
    mount("overlay", merged, "overlay", data=f"lowerdir={lower},upperdir={upper},workdir={work},userxattr")


def mount_erofs(place: Place) -> str:
    private_mounts(place)
    target = f"{place.directory}/layer"
    os.mkdir(target)
    mount(place.image, target, "erofs", MS_RDONLY)
    return target


def try_erofs(place: Place) -> None:
    with open(f"{mount_erofs(place)}/probe", "rb") as file:
        if file.read() != EROFS_CONTENT:
            raise OSError(errno.EIO, "a compressed file reads back wrong")


def try_idmapped_mount(place: Place) -> None:
    """Of a layer, where the kernel mounts those; else of the directory the image lies in."""
    try:
        directory = mount_erofs(place)
    except OSError:
        directory = os.path.dirname(place.image)
    namespace, holder = shifted_namespace()
    try:
        tree = check(libc.syscall(SYS_OPEN_TREE, AT_FDCWD, directory.encode(), OPEN_TREE_CLONE), "open_tree")
        attributes = struct.pack("=QQQQ", MOUNT_ATTR_IDMAP, 0, 0, namespace)
        done = libc.syscall(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, ctypes.c_size_t(len(attributes)))
        check(done, "mount_setattr(MOUNT_ATTR_IDMAP)")
    finally:
        end(holder)


def try_btrfs(place: Place) -> None:
    """ENODEV alone says that the kernel has none; with a source that is no disk, anything else comes later."""
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    try:
        mount("/dev/null", place.directory, "btrfs", MS_RDONLY)
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise


def try_loop(_: Place) -> None:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(control, LOOP_CTL_GET_FREE)


def try_seccomp(_: Place) -> None:
    """Install a filter that allows everything."""
    allow = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, SECCOMP_RET_ALLOW))  # BPF_RET | BPF_K
    program = struct.pack("@HP", 1, ctypes.addressof(allow))
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program), "prctl(PR_SET_SECCOMP)")


def try_pidfd(_: Place) -> None:
    os.close(os.pidfd_open(os.getpid()))


def try_unix_sockets(_: Place) -> None:
    """Packets, credentials and descriptors, as supervisor and node exchange them."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(one, [b"x"], [0])
    if len(socket.recv_fds(other, 1, 1)[1]) != 1:
        raise OSError(errno.EIO, "descriptors do not arrive")
    pid = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    if pid != os.getpid():
        raise OSError(errno.EIO, "SO_PEERCRED names another process")


def try_open_files(_: Place) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))


ATTEMPTS: dict[str, Attempt] = {
    "user": try_user_namespace,
    "ids": try_id_range,
    **{name: partial(try_namespace, flag) for name, flag in NAMESPACES.items()},
    "host_mounts": try_host_mounts,
    "overlay": try_overlay,
    "erofs": try_erofs,
    "idmap": try_idmapped_mount,
    "btrfs": try_btrfs,
    "loop": try_loop,
    "seccomp": try_seccomp,
    "pidfd": try_pidfd,
    "unix_sockets": try_unix_sockets,
    "open_files": try_open_files,
}


def attempt(action: Attempt, place: Place) -> str:
    """What went wrong in a child that tries `action`, "" if nothing did."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(ATTEMPT_S)
        try:
            action(place)
        except BaseException as error:  # the parent is told, whatever it was
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            os.write(writer, (reason or repr(error)).encode()[:500])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode("utf-8", "replace")
    _, wstatus = os.waitpid(child, 0)
    if os.WIFSIGNALED(wstatus):
        return f"the attempt was ended by signal {os.WTERMSIG(wstatus)}"
    return message


def main() -> None:
    # Not in /tmp: that is often a tmpfs, on which no kernel mounts EROFS files.
    parent = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="barchan-probe-", dir=parent) as directory:
        place = Place(f"{directory}/mnt", f"{directory}/layer.erofs")
        os.mkdir(place.directory)
        with open(place.image, "wb") as file:
            file.write(zlib.decompress(base64.b85decode(EROFS_IMAGE)))
        json.dump({name: attempt(action, place) for name, action in ATTEMPTS.items()}, sys.stdout)


if __name__ == "__main__":
    main()
