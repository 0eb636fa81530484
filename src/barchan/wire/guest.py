"""Frames between a node and a guest init: docs/formats/guest-protocol.md, version 1. No I/O."""

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum, IntFlag
from typing import Final

from msgspec import Struct

from barchan.errors import InvalidSpec, RemoteProtocolError

VERSION: Final = 1
TO_INIT_BYTES_MAX: Final = 2 << 20
TO_HOST_BYTES_MAX: Final = 272 << 10
STDIN_BYTES_MAX: Final = 256 << 10
WINDOW_BYTES: Final = 1 << 20  # how far the init pushes beyond the last ACK of a stream
_KIND_PYTHON: Final = 2
_KIND_MACHINE: Final = 3
HELLO_TAG: Final = 0xFFFFFFFF
PROCESSES_MAX: Final = 100_000  # that an init remembers
_NO_HANDLE: Final = 0xFFFFFFFF
LINE_NUMBER_BYTES: Final = 16
_LINE_MAGIC: Final = b"\xff\xff\xff\xff\xfebarchan-ln"
STDOUT: Final = 1
STDERR: Final = 2

_HEADER = struct.Struct("<IBBHI")


class Request(IntEnum):
    HELLO = 0x01
    PING = 0x02
    START = 0x03
    FOLLOW = 0x04
    ACK = 0x05
    STDIN = 0x06
    SIGNAL = 0x07
    RESIZE = 0x08
    LOOKUP = 0x09
    LIST = 0x0A
    RESEED = 0x0B
    SETCLOCK = 0x0C
    THAW = 0x0D
    DETACH = 0x0E
    HOLD = 0x0F
    COUNTERS = 0x10
    CONFIGURE = 0x11


class Pushed(IntEnum):
    OUTPUT = 0xA0
    EXIT = 0xA1
    END = 0xA2


ERROR: Final = 0xFF
_TO_HOST = frozenset({ERROR, *(int(kind) for kind in Pushed), *(int(kind) | 0x80 for kind in Request)})


class StartFlag(IntFlag):
    PTY = 1
    STDIN = 2
    BLOCK = 4
    PLATFORM = 8
    FOLLOW = 16
    MERGE = 32
    RESTRAINED = 64


class Scope(IntEnum):
    GROUP = 0
    PROCESS = 1
    ALL = 2
    CHILDREN = 3


class Frame(Struct, frozen=True):
    """One frame towards the host: `kind` is a reply type, a `Pushed` or ERROR."""

    kind: int
    tag: int
    body: bytes


class FrameReader:
    """Cuts a byte stream into frames. A header that breaks a bound raises before any of its body is kept."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames completed by `data`.

        Raises:
            RemoteProtocolError: The peer broke the protocol; the connection must not be used any more.
        """
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            length, kind, zero1, zero2, tag = _HEADER.unpack_from(buffer, start)
            if length > TO_HOST_BYTES_MAX or zero1 or zero2 or kind not in _TO_HOST:
                raise RemoteProtocolError(f"a guest sent a bad frame header: type {kind:#x}, {length} bytes")
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            frames.append(Frame(kind, tag, bytes(buffer[start + _HEADER.size : end])))
            start = end
        if start:
            del buffer[:start]
        return frames


class Fields:
    """Reads the fields of one body; `end()` insists that all was read."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, layout: struct.Struct) -> tuple[int, ...]:
        try:
            values: tuple[int, ...] = layout.unpack_from(self._body, self._at)
        except struct.error as error:
            raise RemoteProtocolError("a guest sent a frame that is too short") from error
        self._at += layout.size
        return values

    def bytes(self) -> bytes:
        (length,) = self.take(_U32)
        end = self._at + length
        if end > len(self._body):
            raise RemoteProtocolError("a guest sent a frame whose string is too long")
        value = self._body[self._at : end]
        self._at = end
        return value

    def str(self) -> str:
        """Text from a guest; what is not UTF-8 becomes U+FFFD, since not every reader of ours can carry it."""
        return self.bytes().decode("utf-8", "replace")

    @property
    def done(self) -> bool:
        return self._at == len(self._body)

    def end(self) -> None:
        if not self.done:
            raise RemoteProtocolError("a guest sent a frame that is too long")


_U32 = struct.Struct("<I")
_START_REPLY = struct.Struct("<IiB")
_OUTPUT = struct.Struct("<IBQI")
_END = struct.Struct("<IBQ")
_EXIT = struct.Struct("<IiQQQQQQQ")
_FOLLOW_REPLY = struct.Struct("<QQQQB")
_PING_REPLY = struct.Struct("<QIIQI")
_HELLO_REPLY = struct.Struct("<IQI")
_LIST_ITEM = struct.Struct("<iBi")
_ENTRY = struct.Struct("<BIIIQq")
_COUNTERS_REPLY = struct.Struct("<QQQQQ")


class Started(Struct, frozen=True):
    handle: int
    pid: int
    existing: bool


class Output(Struct, frozen=True):
    handle: int
    stream: int
    offset: int
    data: bytes


class End(Struct, frozen=True):
    handle: int
    stream: int
    offset: int


class Exit(Struct, frozen=True):
    """A main process is gone; times in the init's monotonic nanoseconds, CPU in microseconds."""

    handle: int
    wstatus: int
    utime_us: int
    stime_us: int
    maxrss_kib: int
    started_ns: int
    ended_ns: int
    stdout_end: int
    stderr_end: int


class Spool(Struct, frozen=True):
    stdout_tail: int
    stdout_head: int
    stderr_tail: int
    stderr_head: int
    exited: bool


class Pong(Struct, frozen=True):
    monotonic_ns: int
    running: int
    total: int
    spool_bytes: int
    orphans_reaped: int


class Counters(Struct, frozen=True):
    """What a machine's own kernel counts of its guest's programs, all together: a guest's word, as all it says.

    CPU in microseconds; `pids` are processes and threads now.
    """

    oom_kills: int
    memory_bytes: int
    memory_peak_bytes: int
    cpu_us: int
    pids: int


class Listed(Struct, frozen=True):
    handle: int
    process_id: str
    pid: int
    exited: bool
    wstatus: int


class Entry(Struct, frozen=True):
    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    name: str
    target: str


def frame(kind: Request, tag: int, *parts: bytes) -> bytes:
    """Encode one request.

    Raises:
        InvalidSpec: The body would pass the limit; the caller asked for too much in one piece.
    """
    body = b"".join(parts)
    if len(body) > TO_INIT_BYTES_MAX:
        raise InvalidSpec(
            f"a request of {len(body)} bytes is over the limit of {TO_INIT_BYTES_MAX}", size_bytes=len(body)
        )
    return _HEADER.pack(len(body), kind, 0, 0, tag) + body


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogateescape")
    if b"\0" in raw:
        raise InvalidSpec(f"a NUL character can't be passed to a program: {value[:60]!r}")
    return _U32.pack(len(raw)) + raw


def blob(value: bytes) -> bytes:
    return _U32.pack(len(value)) + value


def texts(values: Iterable[str]) -> bytes:
    encoded = [text(value) for value in values]
    return _U32.pack(len(encoded)) + b"".join(encoded)


class Start(Struct, frozen=True, kw_only=True):
    """The body of START. `applet`: argv is a built-in file operation, not a program. `warm`: `script` is source for the
    sandbox's warm interpreter, argv the name of its socket and the program's arguments. `operation`: argv is one on a
    virtual machine, with its init's rights: `layer` writes what the guest has written as an OCI layer, `sync` its disk.
    """

    process_id: str
    argv: Sequence[str]
    applet: bool = False
    warm: bool = False
    operation: bool = False
    flags: StartFlag = StartFlag(0)
    spool_bytes: int = 1 << 20
    backstop_ms: int = 0
    rows: int = 24
    cols: int = 80
    user: str = ""
    cwd: str = "/"
    env: dict[str, str] = {}
    limits: Sequence[tuple[int, int, int]] = ()
    script: bytes = b""
    stdin: bytes = b""

    def encode(self, tag: int) -> bytes:
        kind = _KIND_PYTHON if self.warm else _KIND_MACHINE if self.operation else int(self.applet)
        head = struct.pack("<BHIIHH", kind, self.flags, self.spool_bytes, self.backstop_ms, self.rows, self.cols)
        limits = b"".join(struct.pack("<IQQ", *limit) for limit in self.limits)
        return frame(
            Request.START,
            tag,
            text(self.process_id),
            head,
            text(self.user),
            text(self.cwd),
            texts(self.argv),
            texts(f"{name}={value}" for name, value in self.env.items()),
            _U32.pack(len(self.limits)),
            limits,
            blob(self.script),
            blob(self.stdin),
        )


def follow(tag: int, handle: int, stdout_offset: int, stderr_offset: int) -> bytes:
    return frame(Request.FOLLOW, tag, struct.pack("<IQQ", handle, stdout_offset, stderr_offset))


def ack(handle: int, stream: int, offset: int) -> bytes:
    return frame(Request.ACK, 0, struct.pack("<IBQ", handle, stream, offset))


def stdin(tag: int, handle: int, offset: int, data: bytes, *, eof: bool) -> bytes:
    return frame(Request.STDIN, tag, struct.pack("<IQB", handle, offset, eof), blob(data))


def signal(tag: int, handle: int, signo: int, scope: Scope) -> bytes:
    return frame(Request.SIGNAL, tag, struct.pack("<IIB", handle, signo, scope))


def resize(tag: int, handle: int, rows: int, cols: int) -> bytes:
    return frame(Request.RESIZE, tag, struct.pack("<IHH", handle, rows, cols))


def lookup(tag: int, process_id: str) -> bytes:
    return frame(Request.LOOKUP, tag, text(process_id))


def list_from(first_handle: int, tag: int) -> bytes:
    return frame(Request.LIST, tag, _U32.pack(first_handle))


def ping(tag: int) -> bytes:
    return frame(Request.PING, tag)


def hello() -> bytes:
    """HELLO of a host that gives no leaves."""
    return frame(Request.HELLO, HELLO_TAG, struct.pack("<IB", VERSION, 0))


def counters(tag: int) -> bytes:
    return frame(Request.COUNTERS, tag)


def configure(tag: int, hostname: str = "", memory_bytes: int = 0, pids: int = 0) -> bytes:
    """Give a machine its name and its guest's limits; what is empty or 0 stays as it is."""
    return frame(Request.CONFIGURE, tag, text(hostname), struct.pack("<QQ", memory_bytes, pids))


def line_call(number: bytes) -> bytes:
    """The first word of a greeting over a line."""
    return _LINE_MAGIC + b"C" + number


def line_answer(number: bytes) -> bytes:
    """How the init's answer to a call begins; its own number follows."""
    return _LINE_MAGIC + b"A" + number


def line_confirm(own: bytes, secret: bytes) -> bytes:
    """The last word, behind which frames begin. `own`: the init's number; `secret`: of 32 bytes."""
    return _LINE_MAGIC + b"K" + own + secret


def hold(tag: int) -> bytes:
    return frame(Request.HOLD, tag)


def thaw(tag: int, frozen_ns: int) -> bytes:
    return frame(Request.THAW, tag, struct.pack("<Q", frozen_ns))


def decode_hello(body: bytes) -> int:
    """The init's protocol version."""
    fields = Fields(body)
    version, _, _ = fields.take(_HELLO_REPLY)
    fields.end()
    return version


def decode_counters(body: bytes) -> Counters:
    fields = Fields(body)
    found = Counters(*fields.take(_COUNTERS_REPLY))
    fields.end()
    return found


def decode_started(body: bytes) -> Started:
    fields = Fields(body)
    handle, pid, existing = fields.take(_START_REPLY)
    fields.end()
    return Started(handle, pid, bool(existing))


def decode_spool(body: bytes) -> Spool:
    fields = Fields(body)
    out_tail, out_head, err_tail, err_head, exited = fields.take(_FOLLOW_REPLY)
    fields.end()
    return Spool(out_tail, out_head, err_tail, err_head, bool(exited))


def decode_pong(body: bytes) -> Pong:
    fields = Fields(body)
    pong = Pong(*fields.take(_PING_REPLY))
    fields.end()
    return pong


def decode_number(body: bytes, layout: str) -> int:
    """A body of one number: `<I` SIGNAL's count, `<Q` STDIN's offset."""
    fields = Fields(body)
    (value,) = fields.take(struct.Struct(layout))
    fields.end()
    return value


def decode_list(body: bytes, first: int = 0) -> list[Listed]:
    """One page of those from handle `first` on, which rise."""
    fields = Fields(body)
    (count,) = fields.take(_U32)
    found = []
    for _ in range(count):
        (handle,) = fields.take(_U32)
        if not first <= handle < _NO_HANDLE:
            raise RemoteProtocolError("a guest lists processes that were not asked for")
        first = handle + 1
        process_id = fields.str()
        pid, exited, wstatus = fields.take(_LIST_ITEM)
        found.append(Listed(handle, process_id, pid, bool(exited), wstatus))
    fields.end()
    return found


def decode_pushed(frame_: Frame) -> Output | End | Exit:
    if frame_.kind == Pushed.OUTPUT:
        if len(frame_.body) < _OUTPUT.size:
            raise RemoteProtocolError("a guest sent a frame that is too short")
        handle, stream, offset, length = _OUTPUT.unpack_from(frame_.body)
        data = frame_.body[_OUTPUT.size :]
        if len(data) != length or stream not in (STDOUT, STDERR):
            raise RemoteProtocolError("a guest sent output that does not decode")
        return Output(handle, stream, offset, data)
    fields = Fields(frame_.body)
    if frame_.kind == Pushed.EXIT:
        pushed: End | Exit = Exit(*fields.take(_EXIT))
    else:
        pushed = End(*fields.take(_END))
    fields.end()
    return pushed


def decode_error(body: bytes) -> tuple[int, str]:
    """The errno and message of an ERROR frame."""
    fields = Fields(body)
    (errno,) = fields.take(struct.Struct("<i"))
    message = fields.str()
    fields.end()
    return errno, message


def decode_entries(data: bytes) -> list[Entry]:
    """The entries that the `stat` and `list` applets print."""
    fields = Fields(data)
    entries = []
    while not fields.done:
        kind, mode, uid, gid, size, mtime_ns = fields.take(_ENTRY)
        entries.append(Entry(chr(kind), mode, uid, gid, size, mtime_ns, fields.str(), fields.str()))
    return entries


def decode_changes(data: bytes) -> tuple[list[tuple[str, str]], bytes]:
    """The whole change records in `data` as (kind, path), and the bytes of an unfinished one."""
    changes = []
    at = 0
    while len(data) - at >= 5:
        kind, length = struct.unpack_from("<BI", data, at)
        if length > 1 << 16:
            raise RemoteProtocolError("a guest sent a change record with an absurd path")
        if len(data) - at < 5 + length:
            break
        changes.append((chr(kind), data[at + 5 : at + 5 + length].decode("utf-8", "replace")))
        at += 5 + length
    return changes, data[at:]
