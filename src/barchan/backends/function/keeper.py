"""What keeps the calls of one sandbox; read as text behind `interpreter.py`, in whose namespace it runs.

Two kinds of process, both on the image's own Python. The keeper is a fork of a zygote that has moved into the sandbox
and has every right there. It has one fork of itself ready, the call, which has given up all rights and waits for what
it is to run. When that has ended, the keeper ends whatever it has left, says how it went, makes the place anew if there
is a trace of it, and forks the next. It never reads what calls are given or give: what it knows, every later call could
find in its own memory. docs/formats/calls-protocol.md has the messages.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import gc
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import types
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from barchan.backends.container.interpreter import (
        CAPABILITY_VERSION_3,
        EXIT_CANNOT,
        LINE_FD,
        PR_SET_DUMPABLE,
        PR_SET_SECCOMP,
        SECCOMP_MODE_FILTER,
        SERVERS,
        SETNS,
        Identity,
        carry_out,
        checked,
        close_others,
        draw_anew,
        execute,
        libc,
        limit_rights,
        open_streams,
        prctl,
    )

PR_SET_CHILD_SUBREAPER = 36
ALL_CHILDREN = 0x40000000  # of wait4: also those that tell of their end by another signal than SIGCHLD, or none
NEW_MOUNTS, NEW_IPC, NEW_NETWORK = 0x00020000, 0x08000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
KEPT_FLAGS = ((2, 2), (4, 4), (8, 8), (1024, 1024), (4096, 1 << 21))  # of statvfs and of mount, by pairs
MOUNT, UNSHARE, PIDFD_OPEN = {"x86_64": 165, "aarch64": 40}, {"x86_64": 272, "aarch64": 97}, 434
NOBODY: Identity = (65534, 65534, [])
FILES_MAX = 65536  # in what a call may write
SCRATCH, QUEUES = "/tmp", "/dev/mqueue"
ALSO_SCRATCH = ("/var/tmp", "/dev/shm")
SHM_INFO, MSG_INFO, SEM_INFO, INFO_BYTES = 14, 12, 19, 256
FDS_END = 32  # the keeper has closed all others
VALUE_FD, REQUEST_FD = 3, 4  # of a call; the latter until it has read what it is to do
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
PIPE_BYTES = 64 << 10
VALUE_BYTES_MAX = 16 << 20
DEPTH_MAX = 64
PROGRAM, BY_SOURCE, BY_NAME, PICKLED = range(4)
GIVE_PICKLED = 1
HEAD = struct.Struct("<BBd")
SIZE = struct.Struct("<I")
ENDED = struct.Struct("<4siqqq")

# Of an interpreter with one thread, in which nothing is locked. `os.fork` would put that right all the same, in every
# module, by writing to a quarter of the pages that a call has; `draw_anew` does what is needed of it.
forks = ctypes.PyDLL(None, use_errno=True)


# --- the keeper ------------------------------------------------------------------------------------------------------


def keep_calls(line: int, asked: dict[str, str], identity: Identity) -> None:
    """See above. Does not return.

    What a call needs is made here, before the fork, wherever it can be: a fork pays for each page that it writes to.
    """
    os.setsid()
    os.umask(0o022)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.dup2(line, LINE_FD, inheritable=False)
    close_others({LINE_FD})
    checked(prctl(PR_SET_CHILD_SUBREAPER, 1), "subreaper")
    place = Place(asked["room_mib"])
    # Which ids a name stands for, the image says: no call runs as root, whatever that is called.
    rights = Rights(identity if identity[0] != 0 else NOBODY)
    os.environ["HOME"] = SCRATCH
    open_streams()
    with socket.socket(fileno=LINE_FD) as to_node:
        to_node.send(b"ready")
        gc.collect()
        gc.freeze()
        while True:
            ended = until_gone(offer_call(to_node, rights))
            try:
                to_node.send(ended)
            except OSError:  # the node has gone
                os._exit(0)
            place.renew_if_used()


def offer_call(to_node: socket.socket, rights: Rights) -> int:
    """Fork the next call, and give the node its ends of the streams; the call's process.

    All are pipes: through a socket, the call could have the node hold, and close, descriptors of the call's making.
    """
    own_request, request = os.pipe()
    value, own_value = os.pipe()
    out, own_out = os.pipe()
    err, own_err = os.pipe()
    pid = checked(forks.fork(), "fork")
    if pid == 0:
        be_call(rights, own_request, own_value, own_out, own_err)
    pidfd = checked(libc.syscall(PIDFD_OPEN, pid, 0), "pidfd_open")
    fds = array.array("i", [request, value, out, err, pidfd])
    with suppress(OSError):  # the node has gone: the call ends, having nothing to read
        to_node.sendmsg([b"spare"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    for fd in (*fds, own_request, own_value, own_out, own_err):
        os.close(fd)
    return pid


def until_gone(pid: int) -> bytes:
    """Wait for the end of a call and of all that it has started, and say how it was."""
    status, user_us, system_us, resident_kib = 0, 0, 0, 0
    while True:
        found, wstatus, usage = os.wait4(-1, 0)
        user_us, system_us = user_us + int(usage.ru_utime * 1e6), system_us + int(usage.ru_stime * 1e6)
        resident_kib = max(resident_kib, usage.ru_maxrss)
        if found == pid:
            status = wstatus
            break
    while True:
        # Whoever is left is a child of this process, or below one. Only then everybody in this pid namespace is killed,
        # for which the kernel looks at each process of the host.
        try:
            found, _, usage = os.wait4(-1, os.WNOHANG | ALL_CHILDREN)
            if not found:
                with suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)  # but its init and this process: nothing is forked in between
                _, _, usage = os.wait4(-1, ALL_CHILDREN)
        except ChildProcessError:
            return ENDED.pack(b"done", status, user_us, system_us, resident_kib)
        user_us, system_us = user_us + int(usage.ru_utime * 1e6), system_us + int(usage.ru_stime * 1e6)


class Place:
    """Where calls run, one after the other: the sandbox's files, read-only; a place for theirs; what else they could
    leave. It is made anew when one has left its trace in there, so that no other call ever sees it.
    """

    def __init__(self, room_mib: str) -> None:
        self._room = f"size={room_mib}m,nr_inodes={FILES_MAX},mode=1777"
        self._scratch = [SCRATCH]
        self._scratch += [path for path in ALSO_SCRATCH if os.path.isdir(path) and not os.path.islink(path)]
        self._has_queues = os.path.isdir(QUEUES)
        checked(libc.unshare(NEW_MOUNTS), "unshare mnt")
        mount("none", "/", "", RECURSIVE | PRIVATE)
        found = os.statvfs("/").f_flag
        mount("none", "/", "", REMOUNT | BIND | READ_ONLY | sum(flag for given, flag in KEPT_FLAGS if found & given))
        self._base = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._quiet = loopback_traffic()
        self._make()

    def _make(self) -> None:
        checked(libc.setns(self._base, NEW_MOUNTS), "setns mnt")
        checked(libc.unshare(NEW_MOUNTS | NEW_IPC), "unshare")
        mount("tmpfs", SCRATCH, "tmpfs", NO_SUID | NO_DEV, self._room)
        for path in self._scratch[1:]:
            mount(SCRATCH, path, "", BIND)
        if self._has_queues:
            mount("mqueue", QUEUES, "mqueue", NO_SUID | NO_DEV | NO_EXEC)
        os.chdir(SCRATCH)
        self._fresh = self._traces()

    def _traces(self) -> tuple[object, ...]:
        """What a file, a message queue, or anything of System V's would change, and be it gone again."""
        kept: list[object] = []
        for path in (SCRATCH, QUEUES)[: 1 + self._has_queues]:
            found = os.stat(path)
            kept += (found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_nlink)
        info = ctypes.create_string_buffer(INFO_BYTES)
        for call, command in ((libc.shmctl, SHM_INFO), (libc.msgctl, MSG_INFO)):
            checked(call(0, command, info), "counting what calls have left")
            kept.append(info.raw)
        checked(libc.semctl(0, 0, SEM_INFO, info), "counting what calls have left")
        return (*kept, info.raw)

    def renew_if_used(self) -> None:
        if self._traces() != self._fresh:
            self._make()
        if loopback_traffic() != self._quiet:  # such as ports that stay in use for a while
            renew_network()


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    checked(result, f"mount {target}")


def loopback_traffic() -> bytes:
    """How much has passed the loopback of this network namespace."""
    fd = os.open("/proc/self/net/dev", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def renew_network() -> None:
    checked(libc.unshare(NEW_NETWORK), "unshare net")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack("16xH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, asked))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


class Rights:
    """What the keeper gives up beforehand for its forks, and each of them in the end: no program has that."""

    def __init__(self, identity: Identity) -> None:
        self._uid, gid, groups = identity
        self._machine = os.uname().machine
        limit_rights()
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        self._header = ctypes.create_string_buffer(struct.pack("<Ii", CAPABILITY_VERSION_3, 0))
        self._none = ctypes.create_string_buffer(bytes(24))
        statements = self._filter()
        self._code = ctypes.create_string_buffer(b"".join(statements))
        program = struct.pack("@HP", len(statements), ctypes.addressof(self._code))
        self._program = ctypes.create_string_buffer(program)
        self._program_at = ctypes.addressof(self._program)

    def _filter(self) -> tuple[bytes, ...]:
        """Refuses the calls that the keeper may make and other programs of a sandbox may not."""
        return (
            struct.pack("<HBBI", 0x20, 0, 0, 0),  # the number of the call
            struct.pack("<HBBI", 0x15, 4, 0, SETNS[self._machine]),
            struct.pack("<HBBI", 0x15, 3, 0, MOUNT[self._machine]),
            struct.pack("<HBBI", 0x15, 0, 3, UNSHARE[self._machine]),
            struct.pack("<HBBI", 0x20, 0, 0, 16),  # its first argument
            struct.pack("<HBBI", 0x45, 0, 1, NEW_MOUNTS | NEW_IPC | NEW_NETWORK),
            struct.pack("<HBBI", 0x06, 0, 0, 0x00050000 | errno.EPERM),
            struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000),
        )

    def give_up(self) -> None:
        os.setresuid(self._uid, self._uid, self._uid)
        checked(libc.capset(self._header, self._none), "capset")
        checked(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, self._program_at), "seccomp")
        # Its files in /proc are its own user's, as those of a program that was executed.
        checked(prctl(PR_SET_DUMPABLE, 1), "dumpable")


# --- a call: its beginning -------------------------------------------------------------------------------------------


def be_call(rights: Rights, request: int, value: int, out: int, err: int) -> None:
    """In a fork of the keeper. Does not return."""
    code = EXIT_CANNOT
    try:
        os.setsid()
        os.dup2(os.open("/dev/null", os.O_RDWR), 0)  # flags, locks and owner of the keeper's own would stay
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.dup2(value, VALUE_FD, inheritable=False)
        os.dup2(request, REQUEST_FD, inheritable=False)
        os.closerange(REQUEST_FD + 1, FDS_END)
        rights.give_up()
        become_other()
        rehearse()
        code = run_call()
    except BaseException as error:
        os.write(2, f"barchan: the call can't be run: {error!r}\n".encode("utf-8", "replace"))
    os._exit(code)


def become_other() -> None:
    """What tells this interpreter from the one that it is a copy of."""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    found = sys.modules.get("random")
    if found is not None:
        found.seed()
    draw_anew()


def rehearse() -> None:
    """Do what most calls do, while there is none to wait for it: what that writes to is this process's own by then."""
    HEAD.unpack_from(HEAD.pack(PROGRAM, 0, 0.0))
    main = types.ModuleType("__main__")
    exec(compile(b"def rehearsed(it):\n    return it\nrehearsed(0)\n", "<string>", "exec"), main.__dict__)
    sys.stdout.write("")
    sys.stdout.flush()
    sys.stderr.flush()


# --- a call: what it runs --------------------------------------------------------------------------------------------


def receive_all() -> memoryview:
    """What the node sends once: a size, and so many bytes. Nothing: it wants no call of this process."""
    data = bytearray()
    size = SIZE.size
    while len(data) < size:
        piece = os.read(REQUEST_FD, min(size - len(data), 1 << 20) if data else 1 << 16)
        if not piece:
            os._exit(0)
        data += piece
        if len(data) >= SIZE.size:
            size = SIZE.size + SIZE.unpack_from(data)[0]
    os.close(REQUEST_FD)
    return memoryview(data)[SIZE.size :]


def run_call() -> int:
    request = receive_all()
    kind, flags, cpu_s = HEAD.unpack_from(request)
    at, parts = HEAD.size, []
    for _ in range(5):
        (size,) = SIZE.unpack_from(request, at)
        parts.append(bytes(request[at + SIZE.size : at + SIZE.size + size]))
        at += SIZE.size + size
    code, name, arguments, stdin, env = parts
    if cpu_s:
        seconds = max(1, int(cpu_s + 0.999))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    give_stdin(stdin)
    if env:
        os.environ.update(json.loads(env))
    if kind == PROGRAM:
        return execute(code, [])
    return carry_out(lambda: give_value(flags, found_function(kind, code, name, arguments)))


def give_stdin(data: bytes) -> None:
    """A pipe, as of a shell, unless it does not fit into one."""
    if not data:
        return
    if len(data) <= PIPE_BYTES:
        fd, end = os.pipe()
        os.write(end, data)
        os.close(end)
    else:
        fd = os.memfd_create("stdin")
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)


def found_function(kind: int, code: bytes, name: bytes, arguments: bytes) -> Callable[[], object]:
    """What there is to do: a function with its arguments."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == PICKLED:
        function, args, kwargs = pickle.loads(code)
        return lambda: function(*args, **kwargs)
    if kind == BY_NAME:
        found: object = importlib.import_module(code.decode())
    else:
        exec(compile(code, "<function>", "exec"), main.__dict__)
        found = main
    for part in name.decode().split("."):
        found = getattr(found, part)
    args, kwargs = pickle.loads(arguments)
    return lambda: found(*args, **kwargs)  # type: ignore[operator]


def give_value(flags: int, work: Callable[[], object]) -> None:
    """Send what it gives: `v` and plain data, or `p` and a pickle; or `e` and what was raised."""
    try:
        value = work()
        if isinstance(value, types.CoroutineType):
            import asyncio  # which most calls do without

            value = asyncio.run(value)
        data = b"p" + pickle.dumps(value) if flags & GIVE_PICKLED else bytes(put(bytearray(b"v"), value, DEPTH_MAX))
        if len(data) > VALUE_BYTES_MAX:
            raise ValueError(f"the value takes {len(data)} bytes, more than {VALUE_BYTES_MAX}")
    except BaseException as error:
        if not isinstance(error, SystemExit):
            told = [type(error).__name__, str(error)[:2000]]
            with suppress(OSError):
                write_value(bytes(put(bytearray(b"e"), told, DEPTH_MAX)))
        raise
    write_value(data)


def write_value(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(VALUE_FD, left) :]


def put(out: bytearray, value: object, depth: int) -> bytearray:
    """Append a value as MessagePack; what that does not know goes as an extension (`wire.calls` has the other side)."""
    if not depth or len(out) > VALUE_BYTES_MAX:
        raise ValueError("the value is nested too deep, or too large")
    if value is None or value is True or value is False:
        out.append({None: 0xC0, False: 0xC2, True: 0xC3}[value])
    elif isinstance(value, int):
        put_int(out, value)
    elif isinstance(value, float):
        out += struct.pack(">Bd", 0xCB, value)
    elif isinstance(value, str):
        raw = str.encode(value, "utf-8", "replace")
        out += struct.pack(">BI", 0xDB, len(raw)) + raw
    elif isinstance(value, (bytes, bytearray)):
        out += struct.pack(">BI", 0xC6, len(value)) + value
    elif isinstance(value, list):
        put_items(out, value, depth)
    elif isinstance(value, dict) and all(type(key) is str for key in value):
        out += struct.pack(">BI", 0xDF, len(value))
        for key, item in value.items():
            put(put(out, key, depth - 1), item, depth - 1)
    else:
        put_extension(out, value, depth)
    return out


def put_int(out: bytearray, value: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        out += struct.pack(">Bq", 0xD3, value)
    else:
        raw = int.to_bytes(value, value.bit_length() // 8 + 1, "little", signed=True)
        out += struct.pack(">BIb", 0xC9, len(raw), 5) + raw


def put_items(out: bytearray, items: list[object] | tuple[object, ...], depth: int) -> bytearray:
    out += struct.pack(">BI", 0xDD, len(items))
    for item in items:
        put(out, item, depth - 1)
    return out


def put_extension(out: bytearray, value: object, depth: int) -> None:
    if isinstance(value, complex):
        number, inner = 4, bytearray(struct.pack(">dd", value.real, value.imag))
    else:
        if isinstance(value, dict):
            number, items = 6, tuple(part for item in value.items() for part in item)
        else:
            kinds = ((1, tuple), (2, set), (3, frozenset))
            number = next((number for number, kind in kinds if isinstance(value, kind)), 0)
            if not number:
                raise TypeError(
                    f"{type(value).__module__}.{type(value).__qualname__} does not travel as plain data: give numbers, "
                    "text, bytes, lists, tuples, sets and dicts (or ask for pickled values, if you trust what you call)"
                )
            items = tuple(value)  # type: ignore[arg-type]
        inner = put_items(bytearray(), items, depth)
    out += struct.pack(">BIb", 0xC9, len(inner), number) + inner


SERVERS["calls"] = keep_calls
