"""Frames and plain values of calls."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.backends.container.interpreter_start import program
from barchan.errors import RemoteProtocolError
from barchan.wire import calls as wire
from barchan.wire.calls import FrameReader, Kind

NUMBERS = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
SCALARS = st.none() | NUMBERS | st.text() | st.binary()
KEYS = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner), max_leaves=4)
VALUES = st.recursive(
    SCALARS | st.sets(KEYS) | st.frozensets(KEYS),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner) | st.dictionaries(KEYS, inner)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def encode() -> Any:
    """What a call encodes with: the text that its interpreter is given, without its beginning."""
    names: dict[str, Any] = {"__name__": "guest"}
    exec(compile(program(keeps_calls=True).rpartition(b"zygote()")[0], "<zygote>", "exec"), names)
    put = names["put"]
    return lambda value: bytes(put(bytearray(), value, names["DEPTH_MAX"]))


@given(value=VALUES)
def test_a_plain_value_arrives_as_it_was(encode: Any, value: Any) -> None:
    """Whatever it is made of, and of what types."""
    found = wire.plain_value(encode(value))
    assert repr(found) == repr(value) or found == value
    assert type(found) is type(value)


def test_what_is_no_plain_value_is_refused(encode: Any) -> None:
    """By the sender: other objects, cycles, depth, size."""
    cycle: list[Any] = []
    cycle.append(cycle)
    for wrong, said in ((object(), "does not travel"), (cycle, "too deep"), (print, "does not travel")):
        with pytest.raises((TypeError, ValueError), match=said):
            encode(wrong)
    assert math.isnan(wire.plain_value(encode(math.nan)))
    assert wire.plain_value(encode(type("Text", (str,), {})("a"))) == "a"


@given(data=st.binary(max_size=200))
def test_bytes_of_a_hostile_call_give_a_plain_value_or_an_error(data: bytes) -> None:
    """Nothing else, and no other error."""
    try:
        wire.plain_value(data)
    except RemoteProtocolError:
        pass


def test_deep_bytes_end_in_an_error() -> None:
    """Not in a crash: nesting by lists, and by extensions."""
    inner = b"\xc0"
    for _ in range(3000):
        inner = b"\xc9" + (len(inner) + 1).to_bytes(4, "big") + b"\x01" + b"\x91" + inner
    for deep in (b"\x91" * 100_000 + b"\xc0", inner):
        with pytest.raises(RemoteProtocolError):
            wire.plain_value(deep)


def test_a_value_can_not_take_the_reader_s_time_or_memory(encode: Any) -> None:
    """By keys that have one hash, in sets and in dicts; by more objects than there are bytes for; by other forms."""
    modulus = (1 << 61) - 1  # all its multiples have one hash
    colliding = bytearray(encode(tuple(modulus * (1000 + index) for index in range(30_000))))
    hostile = [b"\xdd" + (3 << 20).to_bytes(4, "big") + b"\xc0" * (3 << 20), b"\xdd\x00\x00\x00\x01\x80"]
    hostile.append(b"\xdf\x00\x00\x00\x01" + encode(1 << 70) + encode(None))
    for code in (2, 3, 6):
        colliding[5] = code
        hostile.append(bytes(colliding))
    for data in hostile:
        with pytest.raises(RemoteProtocolError):
            wire.plain_value(data)


@pytest.mark.parametrize(
    "value",
    [
        set(range(100_000)),
        {str(number).encode() for number in range(100_000)},
        {float(number) for number in range(50_000)},
        {(row, column): row for row in range(90) for column in range(90)},
        {number: {(number, 1): None, (number, 2): 1 << 80} for number in range(5_000)},
    ],
)
def test_large_values_arrive(encode: Any, value: Any) -> None:
    """Sets and dicts of what can't collide by design, and of tuples up to a bound."""
    assert wire.plain_value(encode(value)) == value


@given(sizes=st.lists(st.integers(0, 400), max_size=8), cut=st.integers(1, 97))
def test_frames_are_found_however_they_come(sizes: list[int], cut: int) -> None:
    """In pieces of any size."""
    sent = [(number, bytes([number]) * size) for number, size in enumerate(sizes)]
    stream = b"".join(wire.frame(Kind.CALL, number, body) for number, body in sent)
    reader = FrameReader(1000)
    found = [frame for at in range(0, len(stream), cut) for frame in reader.feed(stream[at : at + cut])]
    assert [(frame.number, bytes(frame.body)) for frame in found] == sent


@pytest.mark.parametrize("header", [(1001, 0, 1), (1, 0, 9), (1, 0, 0)])
def test_a_bad_header_is_refused(header: tuple[int, int, int]) -> None:
    """Before any of the body is there."""
    length, number, kind = header
    with pytest.raises(RemoteProtocolError):
        FrameReader(1000).feed(length.to_bytes(4, "little") + number.to_bytes(4, "little") + bytes([kind]))


def test_a_call_goes_over_whole() -> None:
    """Its bounds, its kind and its work."""
    work = wire.encode_work(
        wire.Work.BY_SOURCE, b"code", name="f", arguments=b"a", stdin=b"i", env={"A": "b"}, cpu_s=1.5
    )
    (frame,) = FrameReader(1000).feed(wire.encode_call(7, 2.5, 100, b"spec", work))
    asked = wire.decode_call(frame.body)
    assert (frame.number, asked.timeout_s, asked.output_bytes_max, asked.spec) == (7, 2.5, 100, b"spec")
    assert bytes(asked.work) == work
    with pytest.raises(RemoteProtocolError):
        wire.decode_call(memoryview(b"short"))
