"""What bodies may hold, and how it comes back."""

import hashlib
import math
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from barchan.trajectory.values import DEPTH_MAX, INLINE_BYTES_MAX, Cut, from_json, to_json


class Point(Struct):
    x: int
    label: bytes


def through_json(value: Any) -> Any:
    return from_json(msgspec.json.decode(msgspec.json.encode(to_json(value))))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"plain", b"plain"),
        (b"\xff\x00", b"\xff\x00"),
        (bytearray(b"ab"), b"ab"),
        ((1, 2), [1, 2]),
        ([True, 1.5, None], [True, 1.5, None]),
        ([1, b"x"], [1, b"x"]),
        ({"$bytes": 1}, {"$bytes": 1}),
        ({"$$x": {"$int": "0x1"}}, {"$$x": {"$int": "0x1"}}),
        (10**30, 10**30),
        ([-(10**30)], [-(10**30)]),
        (Point(1, b"\xfe"), {"x": 1, "label": b"\xfe"}),
        ("a\ud800b", "a\\ud800b"),
        ({"\ud800": 1}, {"\\ud800": 1}),
        (math.inf, None),
        ([], []),
    ],
)
def test_what_comes_back(given: Any, expected: Any) -> None:
    """Values survive the way through JSON; what JSON can't hold comes back in the form the format page names."""
    assert through_json(given) == expected


@pytest.mark.parametrize("text", [False, True])
def test_long_values_keep_both_ends_and_the_digest(text: bool) -> None:
    """Beyond the bound head and tail are kept, half each, with the size and digest of the whole."""
    data = b"".join(b"%07d\n" % line for line in range(INLINE_BYTES_MAX // 8 + 1))
    half = INLINE_BYTES_MAX // 2
    expected = Cut(
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        head=data[:half],
        tail=data[-half:],
        text=text,
    )
    assert through_json(data.decode() if text else data) == expected


@pytest.mark.parametrize("value", [b"x" * INLINE_BYTES_MAX, "x" * INLINE_BYTES_MAX, "é" * (INLINE_BYTES_MAX // 2)])
def test_values_at_the_bound_are_whole(value: Any) -> None:
    """The bound itself still fits."""
    assert through_json(value) == value


def test_a_cut_inside_a_character_is_kept_byte_for_byte() -> None:
    """A long text whose cut falls into a character keeps the bytes, not a replacement."""
    data = ("x" + "é" * INLINE_BYTES_MAX).encode()
    cut = through_json(data.decode())
    assert isinstance(cut, Cut)
    assert (cut.head, cut.tail) == (data[: INLINE_BYTES_MAX // 2], data[-(INLINE_BYTES_MAX // 2) :])


def test_nesting_is_bounded() -> None:
    """However deep a model nests its arguments, the log takes them and says where it stopped."""
    value: Any = "end"
    for _ in range(5000):
        value = [value]
    kept = through_json(value)
    for _ in range(DEPTH_MAX):
        (kept,) = kept
    assert kept == {"$deep": True}


def test_what_is_no_value_is_refused() -> None:
    """An object that has no form in the log is an error that names its type."""
    with pytest.raises(TypeError, match="a object can't be logged"):
        to_json({"a": [object()]})


@pytest.mark.parametrize(
    "written", [{"$bytes": 1}, {"$bytes": {"size": 1, "sha256": ""}}, {"$int": []}, {"$text": {"size": "1"}}]
)
def test_forms_nobody_wrote_are_refused(written: Any) -> None:
    """A special form without its members is an error, never a guess."""
    with pytest.raises((ValueError, msgspec.ValidationError)):
        from_json(written)
