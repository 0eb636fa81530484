"""A guest tries to make namespaces, to mount, to load code into the kernel, and to reach calls it has no use for."""

import ctypes
import fcntl
import mmap
import os
import platform
import socket
import termios

from tests.security.guest import kit

NAMESPACES = {
    "user": kit.CLONE_NEWUSER,
    "mount": kit.CLONE_NEWUSER | kit.CLONE_NEWNS,
    "net": kit.CLONE_NEWUSER | kit.CLONE_NEWNET,
    "pid": kit.CLONE_NEWUSER | kit.CLONE_NEWPID,
    "ipc": kit.CLONE_NEWUSER | kit.CLONE_NEWIPC,
    "uts": kit.CLONE_NEWUSER | kit.CLONE_NEWUTS,
    "cgroup": kit.CLONE_NEWUSER | kit.CLONE_NEWCGROUP,
    "time": kit.CLONE_NEWUSER | kit.CLONE_NEWTIME,
}
AF_PACKET, AF_NETLINK, AF_ALG, AF_VSOCK, AF_XDP, AF_KEY, AF_RDS = 17, 16, 38, 40, 44, 15, 21
# Probed with arguments that can do nothing: any answer but EPERM and ENOSYS comes from behind the filter.
PROBES: dict[str, tuple[kit.Argument, ...]] = {
    "acct": (1,),
    "bpf": (0, None, 0),
    "fanotify_init": (0xFFFFFFFF, 0),
    "io_uring_setup": (0, None),
    "keyctl": (0, -3, 0),
    "migrate_pages": (0, 1, None, None),
    "modify_ldt": (0, None, 0),
    "move_pages": (0, 0, None, None, None, 0),
    "perf_event_open": (None, 0, -1, -1, 0),
    "statmount": (None, None, 0, 0xFFFFFFFF),
    "syslog": (10,),
    "userfaultfd": (1,),
}


def unshare(flags: int) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        kit.call("unshare", flags)
        return f"unshare({flags:#x})"

    return attempt


def clone(flags: int) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        pid = kit.call("clone", flags | 17, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        return f"clone({flags:#x})"

    return attempt


def clone3() -> kit.Evidence:
    arguments = (ctypes.c_uint64 * 11)(kit.CLONE_NEWUSER, 0, 0, 0, 17)
    pid = kit.call("clone3", bytes(arguments), ctypes.sizeof(arguments))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "clone3"


def mount() -> kit.Evidence:
    kit.enter_user_namespace()
    kit.call("mount", b"none", b"/tmp", b"tmpfs", 0, None)
    return "a tmpfs on /tmp"


def new_mount_api() -> kit.Evidence:
    kit.enter_user_namespace()
    fd = kit.call("fsopen", b"tmpfs", 0)
    kit.call("fsconfig", fd, 6, None, None, 0)
    kit.call("fsmount", fd, 0, 0)
    return "fsopen, fsconfig, fsmount"


def clone_tree() -> kit.Evidence:
    kit.enter_user_namespace()
    kit.call("open_tree", -100, b"/", 0x8001)
    return "open_tree of /"


def remount_writable() -> kit.Evidence:
    kit.call("mount", None, b"/dev", None, 0x20 | 0x1000, None)
    return "/dev is a writable bind mount"


def unmount(path: str) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        kit.call("umount2", path.encode(), 2)
        return f"{path} is gone"

    return attempt


def set_mount_attributes() -> kit.Evidence:
    kit.call("mount_setattr", -100, b"/proc/sys", 0, bytes(8) + (1).to_bytes(8, "little") + bytes(16), 32)
    return "/proc/sys is writable"


def pivot_root() -> kit.Evidence:
    kit.enter_user_namespace()
    kit.call("mount", b"none", b"/tmp", b"tmpfs", 0, None)
    os.chdir("/tmp")
    kit.call("pivot_root", b".", b".")
    return "another root"


def load_module() -> kit.Evidence:
    try:
        kit.call("init_module", None, 0, b"")
    except OSError as error:
        return None if error.errno in (1, 38) else f"errno {error.errno}"
    return "a module was loaded"


def program_in_kernel() -> kit.Evidence:
    """A socket filter of two instructions: r0 = 0; exit."""
    code = ctypes.create_string_buffer(b"\xb7\x00\x00\x00\x00\x00\x00\x00\x95\x00\x00\x00\x00\x00\x00\x00")
    licence = ctypes.create_string_buffer(b"GPL")
    attributes = b"".join(
        value.to_bytes(size, "little")
        for value, size in ((1, 4), (2, 4), (ctypes.addressof(code), 8), (ctypes.addressof(licence), 8), (0, 104))
    )
    kit.call("bpf", 5, attributes, len(attributes))
    return "a BPF program was loaded"


def keyring() -> kit.Evidence:
    return f"key {kit.call('add_key', b'user', b'barchan-test', b'secret', 6, -2)}"


def ring() -> kit.Evidence:
    return f"descriptor {kit.call('io_uring_setup', 1, bytes(120))}"


def file_by_handle() -> kit.Evidence:
    """Inode 2 of the root file system: what a container was once left by."""
    handle = (8).to_bytes(4, "little") + (1).to_bytes(4, "little") + (2).to_bytes(8, "little")
    try:
        kit.call("open_by_handle_at", os.open("/", os.O_RDONLY), handle, 0)
    except OSError as error:
        return None if error.errno in (1, 38) else f"errno {error.errno}"
    return "opened by handle"


def reach(name: str) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        try:
            return f"returned {kit.call(name, *PROBES[name])}"
        except OSError as error:
            return None if error.errno in (1, 38) else f"errno {error.errno}"

    return attempt


def address_space() -> kit.Evidence:
    """READ_IMPLIES_EXEC with ADDR_COMPAT_LAYOUT."""
    kit.call("personality", 0x0400000 | 0x0200000)
    return "personality"


def sockets(family: int, kind: int, protocol: int) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        socket.socket(family, kind, protocol)
        return f"a socket of family {family}"

    return attempt


def type_for_another() -> kit.Evidence:
    """TIOCSTI puts a character into a terminal's input, for whoever reads it next."""
    keyboard, terminal = os.openpty()
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    fcntl.ioctl(terminal, termios.TIOCSTI, b"x")
    return f"typed on {os.ttyname(terminal)} ({keyboard})"


def machine_code(code: bytes) -> int:
    """Run code that leaves its result in the first register."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    function = ctypes.CFUNCTYPE(ctypes.c_int64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    return int(function())


def other_architecture() -> kit.Evidence:
    """push rbx; mov eax, 20 (getpid of i386); int 0x80; pop rbx; ret."""
    if platform.machine() != "x86_64":
        return None
    result = machine_code(b"\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3")
    return f"i386 getpid is {result}" if result == os.getpid() else None


def x32() -> kit.Evidence:
    """An x32 getpid: the number goes past a filter that only looks for equal ones."""
    if platform.machine() != "x86_64":
        return None
    try:
        return f"x32 getpid is {kit.raw(0x40000000 | 39)}"
    except OSError as error:
        return f"the kernel answered with errno {error.errno}"  # it has no x32, but the call came through


ATTEMPTS: dict[str, kit.Attempt] = {
    **{f"unshare {name}": unshare(flags) for name, flags in NAMESPACES.items()},
    **{f"clone {name}": clone(flags) for name, flags in NAMESPACES.items() if name != "time"},
    "clone3": clone3,
    "mount": mount,
    "fsopen": new_mount_api,
    "open_tree": clone_tree,
    "remount": remount_writable,
    "umount /proc/sys": unmount("/proc/sys"),
    "umount /dev/.barchan": unmount("/dev/.barchan"),
    "mount_setattr": set_mount_attributes,
    "pivot_root": pivot_root,
    "module": load_module,
    "bpf program": program_in_kernel,
    "add_key": keyring,
    "io_uring": ring,
    "open_by_handle_at": file_by_handle,
    **{f"reach {name}": reach(name) for name in PROBES},
    "personality": address_space,
    "AF_PACKET": sockets(AF_PACKET, socket.SOCK_RAW, 0),
    "AF_NETLINK audit": sockets(AF_NETLINK, socket.SOCK_RAW, 9),
    "AF_NETLINK netfilter": sockets(AF_NETLINK, socket.SOCK_RAW, 12),
    "AF_NETLINK uevent": sockets(AF_NETLINK, socket.SOCK_RAW, 15),
    "AF_ALG": sockets(AF_ALG, socket.SOCK_SEQPACKET, 0),
    "AF_VSOCK": sockets(AF_VSOCK, socket.SOCK_STREAM, 0),
    "AF_KEY": sockets(AF_KEY, socket.SOCK_RAW, 2),
    "TIOCSTI": type_for_another,
    "int 0x80": other_architecture,
    "x32": x32,
}

if __name__ == "__main__":
    kit.run(ATTEMPTS)
