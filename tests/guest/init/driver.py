"""The guest protocol from the host's side, plainly: requests one by one, every frame decoded strictly."""

import array
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 20.0

HELLO, PING, START, FOLLOW, ACK, STDIN, SIGNAL, RESIZE, LOOKUP, LIST, RESEED, SETCLOCK, THAW = range(1, 14)
DETACH, HOLD = 14, 15
OUTPUT, EXIT, END, ERROR = 0xA0, 0xA1, 0xA2, 0xFF
PTY, STDIN_OPEN, BLOCK, PLATFORM, FOLLOWED, MERGE = 1, 2, 4, 8, 16, 32
GROUP, MAIN, ALL, OTHERS = range(4)

TO_INIT_MAX, TO_HOST_MAX = 2 << 20, 272 << 10
NOBODY = "65534:65534"


class GuestReplyError(Exception):
    """The init answered ERROR."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(f"{errno} {message}")
        self.errno = errno


class Closed(Exception):
    """The init closed the connection."""


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
    exit: dict[str, int] = field(default_factory=dict)  # empty while it runs

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
        assert self.exit
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

    def start(self, process_id: str, argv: Sequence[str | bytes], **options: Any) -> tuple[int, int, bool]:
        body = start_body(process_id, argv, **options)
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
            not output.exit
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

    def run(self, argv: Sequence[str | bytes], process_id: str | None = None, **options: Any) -> Output:
        handle, _, _ = self.start(process_id or f"run-{self.tag}-{time.monotonic_ns()}", argv, **options)
        return self.wait_exit(handle)

    def sh(self, script: str, **options: Any) -> Output:
        return self.run(["sh", "-c", script], **options)

    def applet(self, *argv: str | bytes, **options: Any) -> Output:
        return self.run(argv, kind=1, **options)


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
