"""CRIU's record of areas: what is watched, and that a damaged one is refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.snapshot.pager.areas import Area, decode_areas

PRIVATE, SHARED, ANONYMOUS, LOCKED = 2, 1, 0x20, 0x2000
VDSO = 1 << 3


def number(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)


def message(*fields: tuple[int, int | bytes]) -> bytes:
    out = b""
    for key, value in fields:
        if isinstance(value, int):
            out += number(key << 3) + number(value)
        else:
            out += number(key << 3 | 2) + number(len(value)) + value
    return out


def record(*areas: tuple[int, int, int, int]) -> bytes:
    """As CRIU writes it: start, end, flags and status of each area among what is not read."""
    fields = [(14, message((1, a), (2, b), (3, 0), (5, 3), (6, c), (7, d), (8, 1))) for a, b, c, d in areas]
    body = message((1, 0x400000), (13, 33), *fields, (15, 1))
    return struct.pack("<III", 0x54564319, 0x57492820, len(body)) + body


def test_private_anonymous_memory_is_watched() -> None:
    """Unless it is locked, or the kernel's own."""
    data = record(
        (0x1000, 0x3000, PRIVATE | ANONYMOUS, 1),
        (0x3000, 0x4000, PRIVATE, 1),
        (0x4000, 0x5000, SHARED | ANONYMOUS, 1),
        (0x5000, 0x6000, PRIVATE | ANONYMOUS | LOCKED, 1),
        (0x7FFF_FFFF_0000, 0x7FFF_FFFF_2000, PRIVATE | ANONYMOUS, 1 | VDSO),
    )
    assert [area.is_watched for area in decode_areas(data)] == [True, False, False, False, False]
    assert decode_areas(data)[0] == Area(0x1000, 0x3000, True)


@given(st.data())
def test_any_damage_is_found_or_harmless(data: st.DataObject) -> None:
    """What is cut short, or changed anywhere, gives areas or a ValueError."""
    whole = record((0x1000, 0x3000, PRIVATE | ANONYMOUS, 1), (0x9000, 0xA000, PRIVATE, 1))
    with pytest.raises(ValueError, match="no record"):
        decode_areas(whole[: data.draw(st.integers(0, len(whole) - 1))])
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_areas(bytes(changed))
    except ValueError:
        return
