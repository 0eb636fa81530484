"""Values of entries as JSON and back: bytes, long text and what a policy may send are bounded and kept apart."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

INLINE_BYTES_MAX = 64 << 10
DEPTH_MAX = 32
INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1
_NUMBERS = ({int}, {float}, {int, float})


def are_numbers(values: Sequence[Any]) -> bool:
    """Whether a sequence is nothing but numbers, as token ids and log-probs are: it needs no look at each."""
    return set(map(type, values)) in _NUMBERS


class Cut(Struct, frozen=True, kw_only=True):
    """A value too long to keep whole: its first and last bytes, its size and its digest.

    `text` says whether it was a string; the bytes are then its UTF-8.
    """

    size_bytes: int
    sha256: str
    head: bytes
    tail: bytes
    text: bool


def to_json(value: Any, depth: int = 0, *, is_whole: bool = False) -> Any:
    """A value as it is written: `$bytes` and `$text` for what JSON can't hold or is long, `$int` for huge integers.

    Mapping keys that start with `$` get a second one, so that no policy's arguments pass for ours. What is nested
    deeper than `DEPTH_MAX` is replaced by `{"$deep": true}`.

    Args:
        is_whole: Keep all of long values, not their head and tail.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if INT_MIN <= value <= INT_MAX else {"$int": hex(value)}
    if isinstance(value, str):
        return _text(str.__str__(value), is_whole=is_whole)
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": _blob(bytes(value), is_whole=is_whole)}
    if depth == DEPTH_MAX:
        return {"$deep": True}
    if isinstance(value, Mapping):
        return {_key(str(key)): to_json(item, depth + 1, is_whole=is_whole) for key, item in value.items()}
    if isinstance(value, Struct):
        return {
            _key(key): to_json(item, depth + 1, is_whole=is_whole)
            for key, item in msgspec.structs.asdict(value).items()
        }
    if isinstance(value, list | tuple):
        if are_numbers(value) and min(value) >= INT_MIN and max(value) <= INT_MAX:
            return value  # token ids and log-probs: long, flat, and written as they are
        return [to_json(item, depth + 1, is_whole=is_whole) for item in value]
    raise TypeError(f"a {type(value).__name__} can't be logged")


def from_json(value: Any) -> Any:
    """What `to_json` was given; long values come back as `Cut`, tuples as lists, structs as mappings.

    Raises:
        ValueError, msgspec.ValidationError: `to_json` did not write this.
    """
    if isinstance(value, list):
        return value if are_numbers(value) else [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, item),) = value.items()
        if key == "$int":
            return int(str(item), 16)
        if key in ("$bytes", "$text"):
            return _unblob(msgspec.convert(item, _Blob), text=key == "$text")
    return {key[1:] if key.startswith("$$") else key: from_json(item) for key, item in value.items()}


def _key(key: str) -> str:
    key = _encodable(key)
    return f"${key}" if key.startswith("$") else key


def _encodable(text: str) -> str:
    """Lone surrogates, which a model's JSON can hold and UTF-8 can't, are written out."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def _text(text: str, *, is_whole: bool) -> Any:
    text = _encodable(text)
    if is_whole or len(text) <= INLINE_BYTES_MAX // 4:  # whatever its characters, its UTF-8 fits
        return text
    data = text.encode()
    return text if len(data) <= INLINE_BYTES_MAX else {"$text": _blob(data)}


class _Blob(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Bytes in a line: `data`, or `head` and `tail`; as text where it is UTF-8, so that the log can be searched."""

    size: int
    sha256: str
    data: str | None = None
    data_base64: str | None = None
    head: str | None = None
    head_base64: str | None = None
    tail: str | None = None
    tail_base64: str | None = None


def _blob(data: bytes, *, is_whole: bool = False) -> _Blob:
    parts = {"data": data}
    if not is_whole and len(data) > INLINE_BYTES_MAX:
        half = INLINE_BYTES_MAX // 2
        parts = {"head": data[:half], "tail": data[-half:]}
    return _Blob(
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        **dict(_inline(name, part) for name, part in parts.items()),
    )


def _inline(name: str, data: bytes) -> tuple[str, str]:
    try:
        return name, data.decode()
    except UnicodeDecodeError:
        return f"{name}_base64", base64.b64encode(data).decode()


def _unblob(blob: _Blob, *, text: bool) -> bytes | Cut:
    data = _bytes(blob.data, blob.data_base64)
    if data is not None:
        return data
    head, tail = _bytes(blob.head, blob.head_base64), _bytes(blob.tail, blob.tail_base64)
    if head is None or tail is None:
        raise ValueError("a long value has neither data nor head and tail")
    return Cut(size_bytes=blob.size, sha256=blob.sha256, head=head, tail=tail, text=text)


def _bytes(text: str | None, encoded: str | None) -> bytes | None:
    if text is not None:
        return text.encode()
    return None if encoded is None else base64.b64decode(encoded, validate=True)
