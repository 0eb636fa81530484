"""Runs the real `barchan-init` as process 1 of a pid namespace of its own, and speaks its protocol, strictly decoded.

The init gets what the supervisor gives it: a listening socket as descriptor 3, a spool directory as 4, a user id of its own
and a few ambient capabilities. The file system is the machine's, with private /proc and, if asked, private account files.
"""

import array
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
INIT = Path(os.environ.get("BARCHAN_INIT", ROOT / "guest" / "build" / "barchan-init"))
INIT_UID = 65535
TIMEOUT_S = 20.0

HELLO, PING, START, FOLLOW, ACK, STDIN, SIGNAL, RESIZE, LOOKUP, LIST, RESEED, SETCLOCK, THAW, DETACH = range(1, 15)
OUTPUT, EXIT, END, ERROR = 0xA0, 0xA1, 0xA2, 0xFF
PTY, STDIN_OPEN, BLOCK, PLATFORM, FOLLOWED, MERGE = 1, 2, 4, 8, 16, 32
GROUP, MAIN, ALL, OTHERS = range(4)

TO_INIT_MAX, TO_HOST_MAX = 2 << 20, 272 << 10
NOBODY = "65534:65534"

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 38, 47, 2
_CAPS = (0, 5, 6, 7, 8)  # CHOWN KILL SETGID SETUID SETPCAP
_libc = ctypes.CDLL(None, use_errno=True)


class GuestReplyError(Exception):
    """The init answered ERROR."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(f"{errno} {message}")
        self.errno = errno


class Closed(Exception):
    """The init closed the connection."""


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mount(source: str, target: str, fstype: str | None, flags: int, data: str | None = None) -> None:
    _check(
        _libc.mount(
            source.encode(), target.encode(), fstype.encode() if fstype else None, flags, data.encode() if data else None
        )
    )


def _become_init_user() -> None:
    os.setgroups([])
    os.setresgid(INIT_UID, INIT_UID, INIT_UID)
    _check(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setresuid(INIT_UID, INIT_UID, INIT_UID)
    mask = sum(1 << cap for cap in _CAPS)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    _check(_libc.capset(header, data))
    for cap in _CAPS:
        _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, cap, 0, 0))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _exec_init(listen_fd: int, spool_fd: int, spool_max: int, binds: Mapping[str, Path]) -> None:
    """In the namespaces' first process."""
    _mount("proc", "/proc", "proc", 0)
    for target, source in binds.items():
        _mount(str(source), target, None, _MS_BIND)
    high_listen, high_spool = os.dup(listen_fd), os.dup(spool_fd)
    os.dup2(high_listen, 3)
    os.dup2(high_spool, 4)
    os.chdir("/")
    _become_init_user()
    env = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}
    args = ["barchan-init", "--listen-fd", "3", "--spool-fd", "4", "--spool-max-bytes", str(spool_max)]
    os.execve(INIT, args, env)


def _string(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(raw)) + raw


def _strings(values: Sequence[str | bytes]) -> bytes:
    return struct.pack("<I", len(values)) + b"".join(map(_string, values))


def start_body(
    process_id: str,
    argv: Sequence[str | bytes],
    *,
    kind: int = 0,
    flags: int = FOLLOWED,
    spool_bytes: int = 1 << 20,
    backstop_ms: int = 0,
    size: tuple[int, int] = (24, 80),
    user: str = NOBODY,
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    limits: Sequence[tuple[int, int, int]] = (),
    script: bytes = b"",
    stdin: bytes = b"",
) -> bytes:
    variables = {"PATH": "/usr/bin:/bin"} if env is None else env
    fixed = struct.pack("<BHIIHH", kind, flags, spool_bytes, backstop_ms, *size)
    limit_bytes = b"".join(struct.pack("<IQQ", *limit) for limit in limits)
    return b"".join(
        (
            _string(process_id) + fixed + _string(user) + _string(cwd) + _strings(argv),
            _strings([f"{k}={v}" for k, v in variables.items()]),
            struct.pack("<I", len(limits)) + limit_bytes + _string(script) + _string(stdin),
        )
    )


@dataclass
class Output:
    """What was pushed of one process."""

    data: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))
    position: list[int] = field(default_factory=lambda: [0, 0])
    gaps: list[tuple[int, int, int]] = field(default_factory=list)  # stream, from, to
    end: dict[int, int] = field(default_factory=dict)
    exit: dict[str, int] | None = None

    @property
    def out(self) -> bytes:
        return bytes(self.data[0])

    @property
    def err(self) -> bytes:
        return bytes(self.data[1])

    def is_part_of(self, stdout: bytes) -> bool:
        """Whether stdout is `stdout` without the bytes of the gaps."""
        kept, at = b"", 0
        for _, start, end in self.gaps:
            kept += stdout[at:start]
            at = end
        return self.out == kept + stdout[at:]

    @property
    def code(self) -> int:
        assert self.exit is not None
        return os.waitstatus_to_exitcode(self.exit["wstatus"])


_EXIT_FIELDS = ("wstatus", "utime_us", "stime_us", "maxrss_kib", "started_ns", "ended_ns", "stdout_end", "stderr_end")


class Connection:
    """One connection to an init; pushed frames are gathered per handle."""

    def __init__(self, path: str, *, ack: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)  # without a time-out: a full backlog is waited for
        self.ack = ack
        self.tag = 0
        self.outputs: dict[int, Output] = {}
        self.replies: dict[int, tuple[int, bytes]] = {}
        self.frames = 0
        self._buffer = bytearray()

    def close(self) -> None:
        self.socket.close()

    def send(self, kind: int, body: bytes = b"", fds: Sequence[int] = ()) -> int:
        self.tag += 1
        frame = struct.pack("<IBBHI", len(body), kind, 0, 0, self.tag) + body
        try:
            if fds:
                sent = self.socket.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
                frame = frame[sent:]
            self.socket.sendall(frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error
        return self.tag

    def pump(self, timeout_s: float = TIMEOUT_S) -> None:
        """Receive some bytes and take every complete frame in them."""
        self.socket.settimeout(timeout_s)
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionResetError as error:
            raise Closed from error
        if not data:
            raise Closed
        self._buffer += data
        while len(self._buffer) >= 12:
            length, kind, zero_a, zero_b, tag = struct.unpack_from("<IBBHI", self._buffer)
            assert length <= TO_HOST_MAX and zero_a == zero_b == 0
            if len(self._buffer) < 12 + length:
                return
            body = bytes(self._buffer[12 : 12 + length])
            del self._buffer[: 12 + length]
            self._take(kind, tag, body)

    def _take(self, kind: int, tag: int, body: bytes) -> None:
        self.frames += 1
        if kind not in (OUTPUT, EXIT, END):
            assert tag not in self.replies
            self.replies[tag] = (kind, body)
            return
        assert tag == 0
        (handle,) = struct.unpack_from("<I", body)
        output = self.outputs.setdefault(handle, Output())
        if kind == EXIT:
            output.exit = dict(zip(_EXIT_FIELDS, struct.unpack("<iQQQQQQQ", body[4:]), strict=True))
        elif kind == END:
            stream, offset = struct.unpack("<BQ", body[4:])
            assert output.position[stream - 1] == offset
            output.end[stream] = offset
        else:
            self._take_output(handle, output, body)

    def _take_output(self, handle: int, output: Output, body: bytes) -> None:
        stream, offset, length = struct.unpack_from("<BQI", body, 4)
        data = body[17:]
        index = stream - 1
        assert len(data) == length and offset >= output.position[index]
        assert data or offset > output.position[index]  # an empty one only tells of a loss
        if offset > output.position[index]:
            output.gaps.append((stream, output.position[index], offset))
        output.data[index].extend(data)
        output.position[index] = offset + length
        if self.ack:
            self.send_ack(handle, stream, offset + length)

    def wait_reply(self, tag: int) -> tuple[int, bytes]:
        deadline = time.monotonic() + TIMEOUT_S
        while tag not in self.replies:
            assert time.monotonic() < deadline, "no reply"
            self.pump()
        kind, body = self.replies.pop(tag)
        if kind == ERROR:
            errno, length = struct.unpack_from("<iI", body)
            assert len(body) == 8 + length
            raise GuestReplyError(errno, body[8:].decode())
        return kind, body

    def request(self, kind: int, body: bytes = b"", fds: Sequence[int] = ()) -> bytes:
        got, reply = self.wait_reply(self.send(kind, body, fds))
        assert got == kind | 0x80
        return reply

    def hello(self, leaves: Sequence[tuple[int, Sequence[int], int | None]] = (), version: int = 1) -> tuple[int, int]:
        body = struct.pack("<IB", version, len(leaves))
        fds: list[int] = []
        for leaf, procs, directory in leaves:
            body += struct.pack("<BBB", leaf, len(procs), directory is not None)
            fds += [*procs, *([] if directory is None else [directory])]
        got, _, total = struct.unpack("<IQI", self.request(HELLO, body, fds))
        return got, total

    def ping(self) -> dict[str, int]:
        names = ("monotonic_ns", "running", "total", "spool_bytes", "orphans_reaped")
        return dict(zip(names, struct.unpack("<QIIQI", self.request(PING)), strict=True))

    def start(self, process_id: str, argv: Sequence[str | bytes], **options: object) -> tuple[int, int, bool]:
        body = start_body(process_id, argv, **options)  # type: ignore[arg-type]
        handle, pid, existing = struct.unpack("<IiB", self.request(START, body))
        return handle, pid, bool(existing)

    def lookup(self, process_id: str) -> tuple[int, int, bool]:
        handle, pid, existing = struct.unpack("<IiB", self.request(LOOKUP, _string(process_id)))
        return handle, pid, bool(existing)

    def follow(self, handle: int, stdout: int = 0, stderr: int = 0) -> dict[str, int]:
        output = self.outputs.setdefault(handle, Output())
        output.position[:] = [stdout, stderr]
        names = ("stdout_tail", "stdout_head", "stderr_tail", "stderr_head", "exited")
        reply = self.request(FOLLOW, struct.pack("<IQQ", handle, stdout, stderr))
        return dict(zip(names, struct.unpack("<QQQQB", reply), strict=True))

    def signal(self, handle: int, signo: int, scope: int) -> int:
        (count,) = struct.unpack("<I", self.request(SIGNAL, struct.pack("<IIB", handle, signo, scope)))
        return int(count)

    def send_ack(self, handle: int, stream: int, offset: int) -> int:
        return self.send(ACK, struct.pack("<IBQ", handle, stream, offset))

    def send_stdin(self, handle: int, offset: int, data: bytes, eof: bool = False) -> int:
        return self.send(STDIN, struct.pack("<IQBI", handle, offset, eof, len(data)) + data)

    def stdin(self, handle: int, offset: int, data: bytes, eof: bool = False) -> int:
        (after,) = struct.unpack("<Q", self.wait_reply(self.send_stdin(handle, offset, data, eof))[1])
        return int(after)

    def wait_exit(self, handle: int, timeout_s: float = TIMEOUT_S) -> Output:
        """Until EXIT and every byte that it counts have come."""
        output = self.outputs.setdefault(handle, Output())
        deadline = time.monotonic() + timeout_s
        while (
            output.exit is None
            or output.position[0] < output.exit["stdout_end"]
            or output.position[1] < output.exit["stderr_end"]
        ):
            assert time.monotonic() < deadline, f"no exit: {output}"
            self.pump(timeout_s)
        return output

    def wait_until(self, handle: int, text: bytes) -> Output:
        output = self.outputs.setdefault(handle, Output())
        deadline = time.monotonic() + TIMEOUT_S
        while text not in output.data[0]:
            assert time.monotonic() < deadline, f"{text!r} not in {output.out[-500:]!r}"
            self.pump()
        return output

    def run(self, argv: Sequence[str | bytes], process_id: str | None = None, **options: object) -> Output:
        handle, _, _ = self.start(process_id or f"run-{self.tag}-{time.monotonic_ns()}", argv, **options)
        return self.wait_exit(handle)

    def sh(self, script: str, **options: object) -> Output:
        return self.run(["sh", "-c", script], **options)

    def applet(self, *argv: str | bytes, **options: object) -> Output:
        return self.run(argv, kind=1, **options)


class Guest:
    """A running init. `pid` is its number outside."""

    def __init__(
        self,
        *,
        spool_max: int = 64 << 20,
        binds: Mapping[str, Path] | None = None,
        cgroup: Path | None = None,
        spool_disk_bytes: int | None = None,
        first_uid: int | None = None,
        nofile: int | None = None,
    ) -> None:
        """`first_uid`: run in a user namespace whose ids start there."""
        self.directory = Path(tempfile.mkdtemp(prefix="barchan-init-"))
        self.directory.chmod(0o755)
        self.work = self.directory / "work"  # where guest programs may write
        self.work.mkdir()
        self.work.chmod(0o777)
        private = self.directory / "private"
        private.mkdir(mode=0o700)
        self.spool = private / "spool"
        self.spool.mkdir()
        self.first_uid, self.nofile = first_uid, nofile
        os.chown(self.spool, INIT_UID + (first_uid or 0), INIT_UID + (first_uid or 0))
        self.path = str(private / "socket")
        self.log = private / "log"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        listener.listen(16)
        self.connections: list[Connection] = []
        self.closed = False
        read_end, write_end = os.pipe()
        self.watcher = os.fork()
        if self.watcher == 0:
            self._watch(listener.fileno(), spool_max, binds or {}, cgroup, spool_disk_bytes, write_end)
        os.close(write_end)
        listener.close()
        self.pid = int(os.read(read_end, 32) or b"0")
        os.close(read_end)
        assert self.pid > 0, self.log.read_text()

    def _watch(
        self,
        listen_fd: int,
        spool_max: int,
        binds: Mapping[str, Path],
        cgroup: Path | None,
        disk: int | None,
        tell: int,
    ) -> None:
        """The init's parent: enters the namespaces, forks it, ends with it."""
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT, 0o666)
            os.dup2(log, 2)
            spool_fd = os.open(self.spool, os.O_RDONLY | os.O_DIRECTORY)
            if cgroup is not None:
                (cgroup / "cgroup.procs").write_text("0")
            self._unshare()
            _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
            if disk is not None:
                _mount("tmpfs", str(self.spool), "tmpfs", 0, f"size={disk},mode=777")
                spool_fd = os.open(self.spool, os.O_RDONLY | os.O_DIRECTORY)
            if self.nofile is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (self.nofile, self.nofile))
            pid = os.fork()
            if pid == 0:
                try:
                    _exec_init(listen_fd, spool_fd, spool_max, binds)
                except BaseException as error:
                    os.write(2, repr(error).encode())
                os._exit(3)
            os.write(tell, str(pid).encode())
            os.close(tell)
            _, status = os.waitpid(pid, 0)
            os._exit(0 if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else 1)
        except BaseException as error:
            os.write(2, repr(error).encode())
        os._exit(4)

    def _unshare(self) -> None:
        """A child that stays outside writes the id maps, when there are any."""
        if self.first_uid is None:
            _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID))
            return
        parent, (go_read, go_write) = os.getpid(), os.pipe()
        mapper = os.fork()
        if mapper == 0:
            os.read(go_read, 1)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{parent}/{name}").write_text(f"0 {self.first_uid} {INIT_UID + 1}")
            os._exit(0)
        _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID))
        os.write(go_write, b"x")
        os.waitpid(mapper, 0)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)

    def connect(self, *, ack: bool = True) -> Connection:
        connection = Connection(self.path, ack=ack)
        self.connections.append(connection)
        return connection

    def processes(self) -> list[int]:
        """What lives in the guest, beside the init: processes outside see it by their numbers here."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/pid") == namespace and int(name) != self.pid:
                    found.append(int(name))
        return found

    def descriptors(self) -> list[str]:
        """What the init holds open, by number."""
        return [os.readlink(f"/proc/{self.pid}/fd/{fd}") for fd in sorted(map(int, os.listdir(f"/proc/{self.pid}/fd")))]

    def expect_killed(self) -> None:
        """The watcher was killed by the test itself."""
        _, status = os.waitpid(self.watcher, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        self._clean_up()

    def close(self) -> None:
        """Kill the init; that it was still alive and complained of nothing is part of every test."""
        if self.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.watcher, 0)
        log = self.log.read_text(errors="replace")
        self._clean_up()
        assert status == 0, f"the init ended by itself: {status} {log}"
        assert log == "", log

    def _clean_up(self) -> None:
        self.closed = True
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.directory)


ENTRY = struct.Struct("<BIIIQq")


@dataclass(frozen=True)
class Entry:
    """One directory entry of `stat` and `list`."""

    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    name: str
    target: str


def entries(data: bytes) -> list[Entry]:
    found = []
    while data:
        kind, *numbers = ENTRY.unpack_from(data)
        data = data[ENTRY.size :]
        texts = []
        for _ in range(2):
            (length,) = struct.unpack_from("<I", data)
            texts.append(data[4 : 4 + length].decode())
            assert len(data) >= 4 + length
            data = data[4 + length :]
        found.append(Entry(chr(kind), *numbers, *texts))
    return found


def changes(data: bytes) -> list[tuple[str, str]]:
    """Whole change records of `watch`; an unfinished last one is left out."""
    found = []
    while len(data) >= 5:
        kind, length = struct.unpack_from("<BI", data)
        if len(data) < 5 + length:
            break
        found.append((chr(kind), data[5 : 5 + length].decode()))
        data = data[5 + length :]
    return found


def failure(output: Output) -> int:
    """The errno that a failed operation names."""
    assert output.code == 1, (output.code, output.err)
    return int(output.err.split(b" ", 1)[0])


CGROUPS = Path("/sys/fs/cgroup")
V1 = ("memory", "pids", "cpu")


@dataclass
class Leaf:
    """A guest leaf in the v2 hierarchy and in three of version 1, owned by the init's user as the supervisor does it."""

    name: str

    @property
    def base(self) -> Path:
        return CGROUPS / "unified" / self.name

    @property
    def guest(self) -> Path:
        return self.base / "guest"

    def v1(self, controller: str) -> Path:
        return CGROUPS / controller / self.name

    def create(self) -> None:
        self.guest.mkdir(parents=True)
        for path in (self.base / "cgroup.procs", self.guest, self.guest / "cgroup.procs"):
            os.chown(path, INIT_UID, INIT_UID)
        for controller in V1:
            self.v1(controller).mkdir()

    @contextlib.contextmanager
    def descriptors(self) -> Iterator[tuple[list[int], int]]:
        procs = [os.open(self.v1(controller) / "cgroup.procs", os.O_WRONLY) for controller in V1]
        directory = os.open(self.guest, os.O_RDONLY | os.O_DIRECTORY)
        yield procs, directory
        for fd in (*procs, directory):
            os.close(fd)

    def remove(self) -> None:
        """Everything in it has ended; the kernel may need a moment to notice."""
        paths = [*self.guest.glob("*/"), self.guest, self.base, *map(self.v1, V1)]
        for path in paths:
            for _ in range(200):
                try:
                    path.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)
            else:
                raise AssertionError(f"{path} is still populated")
