"""What crosses between the checks and the candidate: plain values, bounded, never objects of the candidate's making."""

import ast
import enum
import itertools
import math
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.rollout.graders import functions
from barchan.rollout.graders.guest.codec import DEPTH_MAX, FRAME_BYTES_MAX, Garbled, decode, encode

pytestmark = pytest.mark.timeout(60)

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
VALUES = st.recursive(
    HASHABLE | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.sets(HASHABLE) | st.dictionaries(HASHABLE, inner),
    max_leaves=20,
)


def exact_types(value: Any) -> Any:
    """A value with the exact type of each of its parts, so that 1, 1.0 and True differ."""
    if isinstance(value, list | tuple):
        return type(value), [exact_types(item) for item in value]
    if isinstance(value, dict):
        return dict, [(exact_types(key), exact_types(item)) for key, item in value.items()]
    return type(value), value


@given(VALUES)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    """Every plain value comes back equal, with the same types at every depth."""
    assert exact_types(decode(encode(value))) == exact_types(value)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_give_a_value_or_are_refused(data: bytes) -> None:
    """No input makes the receiver fail in another way than `Garbled`."""
    try:
        decode(data)
    except Garbled:
        pass


@given(VALUES, st.data())
def test_cut_or_changed_bytes_do_no_other_harm(value: Any, data: st.DataObject) -> None:
    """A frame with one byte changed or its end cut off decodes to plain data or is refused."""
    frame = bytearray(encode(value))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] = data.draw(st.integers(0, 255))
    for candidate in (bytes(frame), bytes(frame[:at])):
        try:
            decode(candidate)
        except Garbled:
            pass


def test_not_a_number_arrives() -> None:
    """NaN has no equal, and travels all the same."""
    assert math.isnan(decode(encode(float("nan"))))


class AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class SlyInt(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class SlyList(list[int]):
    def __eq__(self, other: object) -> bool:
        return True


def test_an_object_that_equals_everything_equals_nothing_there() -> None:
    """A forged `__eq__` stays in the candidate's process: what arrives is a bare object, or the builtin below it."""
    assert type(decode(encode(AlwaysEqual()))) is object
    assert type(decode(encode([SlyInt(7)]))[0]) is int
    assert type(decode(encode(SlyList([1])))) is list
    assert decode(encode(SlyInt(7))) == 7
    assert decode(encode(SlyInt(7))) != 8


class Colour(enum.IntEnum):
    RED = 3


def test_honest_subclasses_arrive_as_what_they_derive_from() -> None:
    """Counters, ordered dicts, named tuples and enums compare in the checks as they would in one process."""
    point = namedtuple("point", "x y")
    values = [Counter("aab"), OrderedDict(a=1), point(1, 2), Colour.RED, bytearray(b"x")]
    assert decode(encode(values)) == [{"a": 2, "b": 1}, {"a": 1}, (1, 2), 3, b"x"]


def test_iterators_arrive_as_iterators() -> None:
    """A generator can be unpacked by a check, and equals no list."""
    arrived = decode(encode(number for number in (1, 2)))
    assert arrived != [1, 2]
    assert list(arrived) == [1, 2]


def test_what_has_no_bound_is_refused_by_the_sender() -> None:
    """Cycles, endless iterators and values beyond the frame's size are refused before they are held."""
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: Any = 0
    for _ in range(DEPTH_MAX + 1):
        deep = [deep]
    for value in (cycle, deep, itertools.count(), "x" * (FRAME_BYTES_MAX + 1), [0] * FRAME_BYTES_MAX):
        with pytest.raises(Garbled):
            encode(value)


def test_depth_is_bounded_for_the_receiver_too() -> None:
    """A forged frame of lists in lists cannot exhaust the receiver's stack."""
    with pytest.raises(Garbled):
        decode(b"l\x01\0\0\0" * 100_000 + b"N")


@pytest.mark.parametrize("name", ["checker", "candidate"])
def test_guest_programs_are_whole_and_in_old_python(name: str) -> None:
    """Each program stands alone (imports nothing of ours) and parses as Python 3.9."""
    tree = ast.parse(functions.program(name), feature_version=(3, 9))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported <= {"errno", "os", "select", "sys", "time"}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"encode", "decode", "main"} <= defined
