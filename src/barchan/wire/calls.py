"""Frames between a client and a node on a connection that was taken over for calls: docs/formats/calls-protocol.md."""

import struct
from enum import IntEnum
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from barchan.errors import RemoteProtocolError
from barchan.model.calls import CallResult
from barchan.model.sandbox import Usage

PATH: Final = "/v1/calls/connection"
PROTOCOL: Final = "barchan-calls-1"
REQUEST_BYTES_MAX: Final = 64 << 20
REPLY_BYTES_MAX: Final = 80 << 20
SPEC_BYTES_MAX: Final = 60_000

_HEADER = struct.Struct("<IIB")  # bytes that follow it, the call's number, what it is
_CALL = struct.Struct("<dIH")  # seconds, bytes of output, bytes of the spec
_WORK = struct.Struct("<BBd")
_SIZE = struct.Struct("<I")


class Kind(IntEnum):
    CALL = 1
    CANCEL = 2
    RESULT = 3
    ERROR = 4


class Work(IntEnum):
    """What a call's process is to do; `keeper.py` has the other side."""

    PROGRAM = 0
    BY_SOURCE = 1
    BY_NAME = 2
    PICKLED = 3


GIVE_PICKLED: Final = 1


class Frame(NamedTuple):
    kind: int
    number: int
    body: memoryview


class FrameReader:
    """Cuts a byte stream into frames. A header that breaks a bound raises before any of its body is kept."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> list[Frame]:
        """Return the frames completed by `data`.

        Raises:
            RemoteProtocolError: The peer broke the protocol; the connection must not be used any more.
        """
        if self._buffer:
            self._buffer += data
            data = self._buffer
        frames: list[Frame] = []
        start = 0
        while len(data) - start >= _HEADER.size:
            length, number, kind = _HEADER.unpack_from(data, start)
            if length > self._bytes_max or not Kind.CALL <= kind <= Kind.ERROR:
                raise RemoteProtocolError(f"a bad frame on a connection for calls: kind {kind}, {length} bytes")
            end = start + _HEADER.size + length
            if len(data) < end:
                break
            frames.append(Frame(kind, number, memoryview(bytes(data[start + _HEADER.size : end]))))
            start = end
        if data is not self._buffer:
            self._buffer = bytearray(data[start:])
        elif start:
            del self._buffer[:start]
        return frames


def frame(kind: Kind, number: int, *parts: bytes | memoryview) -> bytes:
    return b"".join((_HEADER.pack(sum(map(len, parts)), number, kind), *parts))


class Asked(NamedTuple):
    """The body of CALL. `work` is for the call's process alone."""

    timeout_s: float
    output_bytes_max: int
    spec: bytes
    work: memoryview


def encode_call(number: int, timeout_s: float, output_bytes_max: int, spec: bytes, work: bytes) -> bytes:
    return frame(Kind.CALL, number, _CALL.pack(timeout_s, output_bytes_max, len(spec)), spec, work)


def decode_call(body: memoryview) -> Asked:
    try:
        timeout_s, output_bytes_max, size = _CALL.unpack_from(body)
    except struct.error as error:
        raise RemoteProtocolError("a call that is too short") from error
    at = _CALL.size + size
    return Asked(timeout_s, output_bytes_max, bytes(body[_CALL.size : at]), body[at:])


def encode_work(
    kind: Work,
    code: bytes,
    *,
    name: str = "",
    arguments: bytes = b"",
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    cpu_s: float = 0.0,
    flags: int = 0,
) -> bytes:
    """What a call's process reads: a size, and what it is to do."""
    given = msgspec.json.encode(env) if env else b""
    pieces = [_WORK.pack(kind, flags, cpu_s)]
    for part in (code, name.encode(), arguments, stdin, given):
        pieces += (_SIZE.pack(len(part)), part)
    body = b"".join(pieces)
    return _SIZE.pack(len(body)) + body


class Reply(Struct, frozen=True, array_like=True):
    """The body of RESULT. `value` is the guest's own word: one letter, and what it gave."""

    exit_code: int
    signal: int | None
    timed_out: bool
    oom_killed: bool
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    stderr_bytes: int
    user_s: float
    system_s: float
    max_rss_kib: int
    wall_s: float
    value: bytes


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Reply)


def encode_reply(number: int, reply: Reply) -> bytes:
    return frame(Kind.RESULT, number, _ENCODER.encode(reply))


def decode_reply(body: memoryview) -> Reply:
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"the node's answer to a call can't be read: {error}") from error


def _extension(code: int, data: memoryview) -> Any:
    if code == 4:
        return complex(*struct.unpack(">dd", data))
    if code == 5:
        return int.from_bytes(data, "little", signed=True)
    items = _VALUES.decode(data)
    if code == 6:
        return dict(zip(items[::2], items[1::2], strict=True))
    return {1: tuple, 2: set, 3: frozenset}[code](items)


_VALUES = msgspec.msgpack.Decoder(Any, ext_hook=_extension)


def plain_value(data: bytes | memoryview) -> Any:
    """What a call has given as plain data: numbers, text, bytes, and lists, tuples, sets and dicts of these.

    Raises:
        RemoteProtocolError: It is none of that.
    """
    try:
        return _VALUES.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, IndexError, struct.error, RecursionError) as error:
        raise RemoteProtocolError(f"a call gave what is no plain data: {error}") from error


def result_of(reply: Reply, *, given: Any, returned: bool, error: tuple[str, str] | None) -> CallResult:
    return CallResult(
        exit_code=reply.exit_code,
        signal=reply.signal,
        timed_out=reply.timed_out,
        oom_killed=reply.oom_killed,
        stdout=reply.stdout,
        stderr=reply.stderr,
        truncated=len(reply.stdout) < reply.stdout_bytes or len(reply.stderr) < reply.stderr_bytes,
        stdout_bytes=reply.stdout_bytes,
        stderr_bytes=reply.stderr_bytes,
        usage=Usage(user_s=reply.user_s, system_s=reply.system_s, max_rss_kib=reply.max_rss_kib, wall_s=reply.wall_s),
        error=error,
        returned=returned,
        given=given,
    )
