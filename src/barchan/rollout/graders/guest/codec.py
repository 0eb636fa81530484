"""Plain values <-> bytes: all that crosses between a grader's checks and the candidate's process.

What arrives is built from exact builtins only: an object of the candidate's own making (with an `__eq__` that is
always true, say) arrives as the builtin it derives from, or as a bare `object()` that equals nothing. Depth and size
are bounded, so cyclic or endless values are refused at the sender, and forged bytes at the receiver.
"""

DEPTH_MAX = 64
FRAME_BYTES_MAX = 2 << 20

_SEQUENCES = ((b"l", list), (b"t", tuple), (b"S", set), (b"Z", frozenset))
_CONSTANTS = {b"N": None, b"T": True, b"F": False}


class Garbled(Exception):
    """A value that does not travel, or bytes that no sender of ours made."""


def encode(value: object) -> bytes:
    """Subclasses travel as their builtin, iterators as what they yield, other objects as their bare existence."""
    out = bytearray()
    _put(out, value, DEPTH_MAX)
    return bytes(out)


def _put(out: bytearray, value: object, depth: int) -> None:
    if depth == 0 or len(out) > FRAME_BYTES_MAX:
        raise Garbled("the value is nested too deep or too large")
    if value is None:
        out += b"N"
    elif isinstance(value, bool):
        out += b"T" if value else b"F"
    elif isinstance(value, int):
        _put_bytes(out, b"i", int.to_bytes(value, value.bit_length() // 8 + 1, "little", signed=True))
    elif isinstance(value, float):
        _put_bytes(out, b"f", float.hex(value).encode())
    elif isinstance(value, complex):
        _put_bytes(out, b"c", f"{value.real.hex()} {value.imag.hex()}".encode())
    elif isinstance(value, str):
        _put_bytes(out, b"s", str.encode(value, "utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray)):
        _put_bytes(out, b"b", bytes(value))
    elif isinstance(value, dict):
        _put_items(out, b"d", (part for item in dict.items(value) for part in item), depth)
    else:
        for tag, kind in _SEQUENCES:
            if isinstance(value, kind):
                return _put_items(out, tag, value, depth)
        if hasattr(type(value), "__iter__"):
            return _put_items(out, b"g", value, depth)
        out += b"o"


def _put_bytes(out: bytearray, tag: bytes, payload: bytes) -> None:
    if len(payload) > FRAME_BYTES_MAX:
        raise Garbled("the value is too large")
    out += tag + len(payload).to_bytes(4, "little") + payload


def _put_items(out: bytearray, tag: bytes, items, depth: int) -> None:  # type: ignore[no-untyped-def]
    out += tag + b"\0\0\0\0"
    at = len(out)
    count = 0
    for item in items:
        _put(out, item, depth - 1)
        count += 1
    out[at - 4 : at] = count.to_bytes(4, "little")


def decode(data: bytes):  # type: ignore[no-untyped-def]
    """The value of `encode`'s bytes; `Garbled` for any others. The items of a dict are its keys and values in turn."""
    try:
        value, end = _take(data, 0, DEPTH_MAX)
    except (ValueError, TypeError, OverflowError) as error:  # bad digits, bad UTF-8, an unhashable key
        raise Garbled(str(error)) from None
    if end != len(data):
        raise Garbled("bytes after the value")
    return value


def _take(data: bytes, at: int, depth: int) -> "tuple[object, int]":
    tag = data[at : at + 1]
    if tag in _CONSTANTS:
        return _CONSTANTS[tag], at + 1
    if tag == b"o":
        return object(), at + 1
    size = int.from_bytes(data[at + 1 : at + 5], "little")
    at += 5
    if depth == 0 or at > len(data):
        raise Garbled("too deep, or cut short")
    if tag in (b"i", b"f", b"c", b"s", b"b"):
        payload = data[at : at + size]
        if len(payload) != size:
            raise Garbled("cut short")
        return _scalar(tag, payload), at + size
    items = []
    for _ in range(size):
        item, at = _take(data, at, depth - 1)
        items.append(item)
    if tag == b"d":
        return dict(zip(items[::2], items[1::2])), at  # noqa: B905 (`strict` is newer than the guest may be)
    if tag == b"g":
        return iter(items), at
    for known, kind in _SEQUENCES:
        if tag == known:
            return kind(items), at
    raise Garbled("unknown tag")


def _scalar(tag: bytes, payload: bytes) -> object:
    if tag == b"i":
        return int.from_bytes(payload, "little", signed=True)
    if tag == b"b":
        return payload
    if tag == b"s":
        return payload.decode("utf-8", "surrogatepass")
    text = payload.decode("ascii")
    if tag == b"f":
        return float.fromhex(text)
    real, imag = text.split(" ")
    return complex(float.fromhex(real), float.fromhex(imag))
