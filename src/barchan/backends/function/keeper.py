"""What keeps the calls of one sandbox; read as text behind `interpreter.py`, in whose namespace it runs.

Two kinds of process, both on the image's own Python. The keeper is a fork of a zygote that has moved into the sandbox
and has every right there. It has one fork of itself ready, the call, which has a place of its own, has given up all
rights, and waits for what it is to run. When that has ended, the keeper ends whatever it has left, says how it went,
and forks the next. It never reads what calls are given or give: what it knows, every later call could find in its own
memory. docs/formats/calls-protocol.md has the messages.
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
import types
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from barchan.backends.container.interpreter import (
        LINE_FD,
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
        give_up_rights,
        libc,
        open_streams,
        prctl,
        refuse,
    )

PR_SET_CHILD_SUBREAPER = 36
NEW_MOUNTS, NEW_IPC, NEW_NETWORK = 0x00020000, 0x08000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
KEPT_FLAGS = ((2, 2), (4, 4), (8, 8), (1024, 1024), (4096, 1 << 21))  # of statvfs and of mount, by pairs
MOUNT, UNSHARE, PIDFD_OPEN = {"x86_64": 165, "aarch64": 40}, {"x86_64": 272, "aarch64": 97}, 434
FILES_MAX = 65536  # in what a call may write
SCRATCH = "/tmp"
ALSO_SCRATCH = ("/var/tmp", "/dev/shm")
FDS_END = 32  # the keeper has closed all others
CALL_FD = 3
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
PIPE_BYTES = 64 << 10
VALUE_BYTES_MAX = 16 << 20
DEPTH_MAX = 64
PROGRAM, BY_SOURCE, BY_NAME, PICKLED = range(4)
GIVE_PICKLED = 1
HEAD = struct.Struct("<BBd")
SIZE = struct.Struct("<I")
ENDED = struct.Struct("<4siqqq")


# --- the keeper ------------------------------------------------------------------------------------------------------


def keep_calls(line: int, asked: dict[str, str], identity: Identity) -> None:
    """See above. Does not return."""
    room = f"size={asked['room_mib']}m,nr_inodes={FILES_MAX},mode=1777,uid={identity[0]},gid={identity[1]}"
    os.setsid()
    os.umask(0o022)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.dup2(line, LINE_FD, inheritable=False)
    close_others({LINE_FD})
    checked(prctl(PR_SET_CHILD_SUBREAPER, 1), "subreaper")
    make_read_only()
    quiet = loopback_traffic()
    os.write(LINE_FD, b"ready")
    gc.collect()
    gc.freeze()
    while True:
        pid = os.fork()
        if pid == 0:
            be_call(identity, room)
        ended = until_gone(pid)
        try:
            os.write(LINE_FD, ended)
        except OSError:  # the node has gone
            os._exit(0)
        if loopback_traffic() != quiet:  # what it leaves, such as ports in use for a while, the next one is not to see
            renew_network()


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
        # All there is in this pid namespace, but for its init and this process: nothing is forked in between.
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            _, _, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return ENDED.pack(b"done", status, user_us, system_us, resident_kib)
        user_us, system_us = user_us + int(usage.ru_utime * 1e6), system_us + int(usage.ru_stime * 1e6)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    checked(result, f"mount {target}")


def make_read_only() -> None:
    """The sandbox's own files, for this process and all that it forks: in a mount namespace of its own."""
    checked(libc.unshare(NEW_MOUNTS), "unshare mnt")
    mount("none", "/", "", RECURSIVE | PRIVATE)
    found = os.statvfs("/").f_flag
    kept = sum(flag for given, flag in KEPT_FLAGS if found & given)
    mount("none", "/", "", REMOUNT | BIND | READ_ONLY | kept)


def loopback_traffic() -> bytes:
    """How much has passed the loopback of this network namespace."""
    with open("/proc/self/net/dev", "rb") as file:
        return next((line for line in file if line.lstrip().startswith(b"lo:")), b"")


def renew_network() -> None:
    checked(libc.unshare(NEW_NETWORK), "unshare net")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack("16xH14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, asked))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


# --- a call: its place -----------------------------------------------------------------------------------------------


def be_call(identity: Identity, room: str) -> None:
    """In a fork of the keeper. Does not return."""
    try:
        prepare_call(identity, room)
    except BaseException as error:  # whatever it is, the node is told, and nothing goes on
        refuse(LINE_FD, error)
        os._exit(1)
    code = 126
    try:
        code = run_call()
    except BaseException as error:
        os.write(2, f"barchan: the call can't be run: {error!r}\n".encode("utf-8", "replace"))
    os._exit(code)


def prepare_call(identity: Identity, room: str) -> None:
    """Namespaces, files and streams of its own, and no rights; then the node is given its ends of the streams."""
    os.setsid()
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the keeper is the last to be killed for the memory of calls
    checked(libc.unshare(NEW_MOUNTS | NEW_IPC), "unshare")
    mount("tmpfs", SCRATCH, "tmpfs", NO_SUID | NO_DEV, room)
    for path in ALSO_SCRATCH:
        if os.path.isdir(path) and not os.path.islink(path):
            mount(SCRATCH, path, "", BIND)
    given, own = socket.socketpair()
    out, own_out = os.pipe()
    err, own_err = os.pipe()
    pidfd = checked(libc.syscall(PIDFD_OPEN, os.getpid(), 0), "pidfd_open")
    fds = array.array("i", [given.fileno(), out, err, pidfd])
    with socket.socket(fileno=os.dup(LINE_FD)) as line:
        os.dup2(own_out, 1)
        os.dup2(own_err, 2)
        os.dup2(own.fileno(), CALL_FD, inheritable=False)
        give_up_rights(identity, refuse_making_places)
        os.chdir(SCRATCH)
        os.environ["HOME"] = SCRATCH
        open_streams()
        draw_anew()
        line.sendmsg([b"spare"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    for sock in (given, own):
        sock.detach()
    os.closerange(CALL_FD + 1, FDS_END)


def refuse_making_places() -> None:
    """The calls that the keeper and its forks may make and other programs of a sandbox may not."""
    machine = os.uname().machine
    statements = (
        struct.pack("<HBBI", 0x20, 0, 0, 0),  # the number of the call
        struct.pack("<HBBI", 0x15, 4, 0, SETNS[machine]),
        struct.pack("<HBBI", 0x15, 3, 0, MOUNT[machine]),
        struct.pack("<HBBI", 0x15, 0, 3, UNSHARE[machine]),
        struct.pack("<HBBI", 0x20, 0, 0, 16),  # its first argument
        struct.pack("<HBBI", 0x45, 0, 1, NEW_MOUNTS | NEW_IPC | NEW_NETWORK),
        struct.pack("<HBBI", 0x06, 0, 0, 0x00050000 | errno.EPERM),
        struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000),
    )
    code = ctypes.create_string_buffer(b"".join(statements))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(statements), ctypes.addressof(code)))
    checked(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program)), "seccomp")


# --- a call: what it runs --------------------------------------------------------------------------------------------


def receive_all(sock: socket.socket) -> memoryview:
    """What the node sends once: a size, and so many bytes. Nothing: it wants no call of this process."""
    data = bytearray()
    size = SIZE.size
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 1 << 20) if data else 1 << 16)
        if not piece:
            os._exit(0)
        data += piece
        if len(data) >= SIZE.size:
            size = SIZE.size + SIZE.unpack_from(data)[0]
    return memoryview(data)[SIZE.size :]


def run_call() -> int:
    with socket.socket(fileno=CALL_FD) as sock:
        request = receive_all(sock)
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
        return carry_out(lambda: give_value(sock, flags, found_function(kind, code, name, arguments)))


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


def give_value(sock: socket.socket, flags: int, work: Callable[[], object]) -> None:
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
                sock.sendall(bytes(put(bytearray(b"e"), told, DEPTH_MAX)))
        raise
    sock.sendall(data)


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
