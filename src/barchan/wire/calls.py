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
OUTPUT_BYTES_MAX: Final = 16 << 20  # of each stream of a call

VALUE_DEPTH_MAX = 64
VALUE_ITEMS_MAX = 2_000_000
_KEY_COSTS_MAX = 4 << 30  # bytes compared; some 10,000 small tuples in one dict

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


_LENGTH, _INTEGER, _FLOAT = struct.Struct(">I"), struct.Struct(">q"), struct.Struct(">d")
_SAFE_KEYS = frozenset((str, bytes, float, bool, type(None)))  # few of which can have one hash, whoever chose them


class _Value:
    """Reads one value, of the forms of MessagePack that `keeper.py` writes and no others.

    What a hostile call can make of few bytes is bounded: objects, and the time that keys take that have one hash.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0
        self._items = 0
        self._key_costs = 0

    def read(self, depth: int) -> Any:
        data, at = self._data, self.at
        self._items += 1
        if not depth or self._items > VALUE_ITEMS_MAX:
            raise ValueError(f"nested too deep, or more than {VALUE_ITEMS_MAX} items")
        form = data[at]
        self.at = at + 1
        if form == 0xD3:
            self.at = at + 9
            return _INTEGER.unpack_from(data, at + 1)[0]
        if form == 0xDB:
            return self._taken().decode()
        if form == 0xCB:
            self.at = at + 9
            return _FLOAT.unpack_from(data, at + 1)[0]
        if form == 0xDD:
            return [self.read(depth - 1) for _ in range(self._length())]
        if form == 0xDF:
            return {self._text_key(depth - 1): self.read(depth - 1) for _ in range(self._length())}
        if form == 0xC9:
            return self._extension(depth)
        if form == 0xC6:
            return self._taken()
        return {0xC0: None, 0xC2: False, 0xC3: True}[form]

    def _length(self) -> int:
        length: int = _LENGTH.unpack_from(self._data, self.at)[0]
        self.at += _LENGTH.size
        return length

    def _taken(self) -> bytes:
        end = self._length() + self.at
        if end > len(self._data):
            raise ValueError("it ends too early")
        taken, self.at = self._data[self.at : end], end
        return taken

    def _text_key(self, depth: int) -> str:
        key = self.read(depth)
        if type(key) is not str:
            raise TypeError("a key of a map is no text")
        return key

    def _extension(self, depth: int) -> Any:
        size = self._length()
        code, self.at = self._data[self.at], self.at + 1
        end = self.at + size
        if code in (4, 5):
            body, self.at = self._data[self.at : end], end
            if end > len(self._data):
                raise ValueError("it ends too early")
            return complex(*struct.unpack(">dd", body)) if code == 4 else int.from_bytes(body, "little", signed=True)
        items = self._array(depth)
        if self.at != end:
            raise ValueError("an extension that ends elsewhere")
        if code == 1:
            return tuple(items)
        if code in (2, 3):
            self._check_keys(items, size)
            return set(items) if code == 2 else frozenset(items)
        if code == 6:
            self._check_keys(items[::2], size)
            return dict(zip(items[::2], items[1::2], strict=True))
        raise ValueError(f"an unknown extension, {code}")

    def _array(self, depth: int) -> list[Any]:
        if self._data[self.at] != 0xDD:
            raise ValueError("an extension without an array")
        self.at += 1
        return [self.read(depth - 1) for _ in range(self._length())]

    def _check_keys(self, keys: list[Any], size: int) -> None:
        """Numbers beyond 64 bits and tuples can be made to have one hash, and each is then compared with all others."""
        odd = sum(type(key) not in _SAFE_KEYS and not _is_short(key) for key in keys)
        self._key_costs += odd * size
        if self._key_costs > _KEY_COSTS_MAX:
            raise ValueError("too many keys that are no text, bytes or numbers of 64 bits")


def _is_short(key: Any) -> bool:
    return type(key) is int and -(1 << 63) <= key < 1 << 63


def plain_value(data: bytes | memoryview) -> Any:
    """What a call has given as plain data: numbers, text, bytes, and lists, tuples, sets and dicts of these.

    Raises:
        RemoteProtocolError: It is none of that.
    """
    reader = _Value(bytes(data))
    try:
        value = reader.read(VALUE_DEPTH_MAX)
        if reader.at != len(data):
            raise ValueError("there is more behind it")
        return value
    except (ValueError, TypeError, KeyError, IndexError, struct.error) as error:
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
