"""What a zygote's Python runs; read as text by `interpreter_start.py` and never imported by a node.

It runs on the image's own Python, 3.8 or newer with ctypes, and on nothing else. docs/formats/zygote-protocol.md has
the messages. Three kinds of process: the zygote, which has imported what was asked; one server per sandbox, forked from
it, that has moved into the sandbox and given up every right; one fork of the server per program. A text that follows
this one may add other kinds of server (`SERVERS`).
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from contextlib import suppress

ZYGOTE_SOCKET = b"\0barchan-zygote"
FDS_MAX = 16
TEXT_MAX = 4096
USERS_MAX = 1000  # remembered
EXIT_CANNOT = 126
LINE_FD = 3
# In the order in which the descriptors come: user, pid, net, uts, cgroup, time, ipc, mnt.
NAMESPACES = (0x10000000, 0x20000000, 0x40000000, 0x04000000, 0x02000000, 0x00000080, 0x08000000, 0x00020000)
IDS = 1 << 16
RESERVED_IDS = (65533, 65535)  # the platform's own in every sandbox
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_SECUREBITS = 4, 22, 23, 24, 28
SECCOMP_MODE_FILTER = 2
SECURE_BITS = 0xEF  # no user and no file gives a capability, locked; as every program of a sandbox has it
CAPABILITY_VERSION_3 = 0x20080522
SETNS = {"x86_64": 308, "aarch64": 268}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Identity = tuple[int, int, list[int]]  # user, group, further groups

# What a fork becomes in its sandbox, by the name that it is asked for by. It still has every right there.
SERVERS: dict[str, Callable[[int, dict[str, str], Identity], None]] = {}

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, *values: int) -> int:
    padded = (*values, 0, 0, 0, 0)[:4]
    return int(libc.prctl(option, *(ctypes.c_ulong(value) for value in padded)))


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One message and the descriptors with it, which close on exec."""
    space = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(TEXT_MAX, space)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, list(fds)


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def close_others(keep: set[int]) -> None:
    """Close every descriptor from 3 on but these."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in keep:
            with suppress(OSError):  # the one that listed them
                os.close(fd)


# --- the zygote ------------------------------------------------------------------------------------------------------


def find_user(user: str) -> Identity:
    """Ids and groups of `NAME`, `UID` or either with `:GROUP`, as the image's files have them."""
    import grp
    import pwd

    name, _, group = user.partition(":")
    try:
        entry = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
        uid, gid, login = entry.pw_uid, entry.pw_gid, entry.pw_name
    except KeyError:
        if not name.isdigit():
            raise
        uid, gid, login = int(name), int(name), ""
    groups = os.getgrouplist(login, gid) if login else [gid]
    if group:
        gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
        groups = []
    if uid in RESERVED_IDS or {gid, *groups} & set(RESERVED_IDS):
        raise PermissionError("the user is reserved for the platform")
    if max(uid, gid, *groups) >= IDS:
        raise PermissionError(f"the user has an id above {IDS - 1}, which no sandbox has")
    return uid, gid, groups


def refuse_setns() -> None:
    """The one call that this process may make and other programs of the sandbox may not."""
    statements = (
        struct.pack("<HBBI", 0x20, 0, 0, 0),  # the number of the call
        struct.pack("<HBBI", 0x15, 0, 1, SETNS[os.uname().machine]),
        struct.pack("<HBBI", 0x06, 0, 0, 0x00050001),  # EPERM
        struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000),
    )
    code = ctypes.create_string_buffer(b"".join(statements))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(statements), ctypes.addressof(code)))
    checked(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program)), "seccomp")


def limit_rights() -> None:
    """From here on no user, no file and no program gives a capability to this process or its children."""
    checked(prctl(PR_SET_SECUREBITS, SECURE_BITS), "securebits")
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if prctl(PR_CAPBSET_READ, capability) >= 0:
        raise PermissionError("the bounding set stays")


def give_up_rights(identity: Identity) -> None:
    """Become the guest's user, with what every program of the sandbox has: no capability, now or later."""
    uid, gid, groups = identity
    limit_rights()
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    # Programs are of its user, and may not take what it has all the same, such as its line to the node.
    checked(prctl(PR_SET_DUMPABLE, 0), "dumpable")
    header = ctypes.create_string_buffer(struct.pack("<Ii", CAPABILITY_VERSION_3, 0))
    checked(libc.capset(header, ctypes.create_string_buffer(bytes(24))), "capset")
    refuse_setns()


def enter(identity: Identity, asked: dict[str, str], fds: list[int]) -> None:
    """In a fork of the zygote: move into the sandbox and go on there as a child of its init. Does not return."""
    line, namespaces, groups = fds[0], fds[1 : 1 + len(NAMESPACES)], fds[1 + len(NAMESPACES) :]
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in groups:
            os.write(fd, b"0")
        for index, kind in enumerate(NAMESPACES[:-1]):
            checked(libc.setns(namespaces[index], kind), f"setns {kind:#x}")
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            os._exit(0)
        if os.fork():
            os._exit(0)
        # The last one: from here on the files are the guest's, and nothing is opened before the rights are gone.
        checked(libc.setns(namespaces[-1], NAMESPACES[-1]), "setns mnt")
        SERVERS[asked["server"]](line, asked, identity)
    except BaseException as error:  # whatever it is, the node is told, and nothing goes on
        refuse(line, error)
        os._exit(1)


def refuse(line: int, error: BaseException) -> None:
    with suppress(OSError):  # the node has gone
        os.write(line, f"error {error!r}".encode("utf-8", "replace")[:TEXT_MAX])


def shared_areas() -> list[str]:
    """Memory that a fork would write to for all others, now or once it has changed the protection: address and name."""
    found, area = [], ""
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if not words[0].endswith(":"):
                area = " ".join([words[0], *words[5:]])
            elif words[0] == "VmFlags:" and "sh" in words:
                found.append(area)
    return found


def import_all(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)
    tasks = len(os.listdir("/proc/self/task"))
    if tasks > 1:
        raise RuntimeError(
            f"the imports have left {tasks - 1} threads running, which no fork would have "
            "(try: without the one that starts them)"
        )
    shared = shared_areas()
    if shared:
        raise RuntimeError(
            f"the imports have left writable memory that is mapped shared ({', '.join(shared[:4])}), through which "
            "sandboxes would reach each other (try: without the one that maps it)"
        )


def zygote() -> None:
    """Import, say so on what was stdout, and fork into sandboxes until killed."""
    status = os.dup(1)
    os.dup2(2, 1)
    try:
        import_all(json.loads(sys.argv[1]))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(ZYGOTE_SOCKET)
        listener.listen(128)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        os.write(status, f"error {type(error).__name__}: {error}\n".encode("utf-8", "replace")[:TEXT_MAX])
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    gc.freeze()  # what is there stays: a collection in a fork would write to all of its pages
    os.write(status, b"ready\n")
    users: dict[str, Identity] = {}
    while True:
        connection, _ = listener.accept()
        text, fds = receive(connection)
        connection.close()
        if len(fds) > len(NAMESPACES):
            fork_into(json.loads(text), fds, users)
        close_all(fds)


def fork_into(asked: dict[str, str], fds: list[int], users: dict[str, Identity]) -> None:
    """One fork for one sandbox; `users` are those that were looked up before."""
    user = asked["user"]
    try:
        if len(users) == USERS_MAX:
            users.clear()
        identity = users[user] = users.get(user) or find_user(user)
        if os.fork() == 0:
            enter(identity, asked, fds)
    except (KeyError, OSError) as error:
        refuse(fds[0], error)


# --- the server in a sandbox -----------------------------------------------------------------------------------------


class Server:
    """Forks for each program that a process of the same user asks for; ends when the node has gone and all are done."""

    def __init__(self, line: int, name: str) -> None:
        os.setsid()
        os.umask(0o022)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.dup2(line, LINE_FD, inheritable=False)
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(b"\0" + name.encode())
        self._listener.listen(128)
        self._wake, wake_end = os.pipe()
        os.set_blocking(wake_end, False)
        close_others({LINE_FD, self._listener.fileno(), self._wake, wake_end})
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._waiting: dict[int, socket.socket] = {}  # connections that have asked nothing yet
        self._running: dict[int, socket.socket] = {}  # by the program's pid

    def serve(self) -> None:
        """Does not return."""
        os.write(LINE_FD, b"ready")
        while self._listener is not None or self._running:
            self._round()
        os._exit(0)

    def _round(self) -> None:
        poll = select.poll()
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
            poll.register(LINE_FD, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        for connection in (*self._waiting.values(), *self._running.values()):
            poll.register(connection, select.POLLIN)
        for fd, _ in poll.poll():
            if fd == self._wake:
                os.read(fd, 4096)
            elif fd == LINE_FD:
                self._node_gone()
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept()
            elif fd in self._waiting:
                self._start(self._waiting.pop(fd))
        self._pass_signals()
        self._reap()

    def _node_gone(self) -> None:
        """The node that knows this server's name has; the next one gets a new server."""
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        for connection in self._waiting.values():
            connection.close()
        self._waiting.clear()

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid == os.getuid():
            self._waiting[connection.fileno()] = connection
        else:
            connection.close()

    def _start(self, connection: socket.socket) -> None:
        try:
            text, fds = receive(connection)
        except OSError:
            text, fds = b"", []
        if text != b"run" or len(fds) < 5:
            close_all(fds)
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            run(fds)
        close_all(fds)
        self._running[pid] = connection

    def _pass_signals(self) -> None:
        """What the processes that stand for the programs were sent; a program whose one is gone is killed."""
        for pid, connection in list(self._running.items()):
            try:
                text = connection.recv(32, socket.MSG_DONTWAIT)
                number = int(text.split()[1]) if text else int(signal.SIGKILL)
            except BlockingIOError:
                continue
            except (OSError, ValueError, IndexError):
                number = int(signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(pid, number)
            if number == signal.SIGKILL:
                self._running[pid].close()
                del self._running[pid]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            connection = self._running.pop(pid, None)
            if connection is None:
                continue
            killed = os.WIFSIGNALED(status)
            said = f"signal {os.WTERMSIG(status)}" if killed else f"exit {os.WEXITSTATUS(status)}"
            with suppress(OSError):  # whoever asked is gone
                connection.send(said.encode())
            connection.close()


def serve_programs(line: int, asked: dict[str, str], identity: Identity) -> None:
    give_up_rights(identity)
    Server(line, asked["name"]).serve()


SERVERS["programs"] = serve_programs

# --- a program -------------------------------------------------------------------------------------------------------


def read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


def open_streams() -> None:
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding, errors)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding, errors)
    error_file = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(error_file, encoding, "backslashreplace", line_buffering=True)
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))


def draw_anew() -> None:
    """Generators that were there before the fork; `random` sees to itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def run(fds: list[int]) -> None:
    """In a fork of the server: become the program. Does not return."""
    code = EXIT_CANNOT
    try:
        source, request = prepare(fds)
        code = execute(source, request)
    except BaseException as error:
        os.write(2, f"barchan: cannot run in the warm interpreter: {error}\n".encode("utf-8", "replace"))
    os._exit(code)


def join(fd: int) -> None:
    """The process that stands for this one puts it into the program's cgroup."""
    with socket.socket(fileno=fd) as place:
        place.send(b"join")
        if place.recv(TEXT_MAX) != b"go":
            raise PermissionError("it may not join the program's cgroup")


def prepare(fds: list[int]) -> tuple[bytes, list[str]]:
    """Take the place that was made for the program; its source and arguments."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in fds[5:]:
        join(fd)
    os.setsid()
    for fd, given in enumerate(fds[:3]):
        os.dup2(given, fd)
    source, request = read_all(fds[3]), read_all(fds[4]).split(b"\0")
    close_others(set())
    # Its files in /proc are its own user's, as those of a program that was executed.
    checked(prctl(PR_SET_DUMPABLE, 1), "dumpable")
    words = [os.fsdecode(word) for word in request[:-1]]
    cwd, count = words[0], int(words[1])
    os.environ.clear()
    for word in words[2 + count :]:
        name, _, value = word.partition("=")
        os.environ[name] = value
    os.chdir(cwd)
    open_streams()
    draw_anew()
    return source, words[2 : 2 + count]


def execute(source: bytes, arguments: list[str]) -> int:
    """Run it as `python -c` does; its exit code."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["-c", *arguments]
    return carry_out(lambda: exec(compile(source, "<string>", "exec"), main.__dict__))


def carry_out(work: Callable[[], object]) -> int:
    """The last thing that a process does: the exit code of a program that is this."""
    code = 0
    try:
        work()
    except SystemExit as error:
        code = exit_code(error)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_globals is globals():  # of ours, not of the program's
            trace = trace.tb_next
        shown = error.with_traceback(trace)
        sys.excepthook(type(shown), shown, shown.__traceback__)
        code = 1
    # What the interpreter does at its end, but for taking the heap apart, which would copy all of it.
    getattr(threading, "_shutdown", int)()
    getattr(atexit, "_run_exitfuncs", int)()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = code or 120
    return code


def exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 255
    sys.stderr.write(f"{error.code}\n")
    return 1
