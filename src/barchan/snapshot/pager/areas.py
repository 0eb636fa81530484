"""CRIU's record of a process's areas: `mm-PID.img`, of which only addresses and kinds are read."""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

AREAS_BYTES_MAX: Final = 256 << 10
"""Of a record that is read here: some thousands of areas."""
_HEAD = struct.Struct("<III")  # two magic numbers, and the length of the only message
_AREAS = 14
_START, _END, _FLAGS, _STATUS = 1, 2, 6, 7
_PRIVATE, _ANONYMOUS, _LOCKED, _HUGE = 0x02, 0x20, 0x2000, 0x40000
_KERNEL_OWN = 1 << 2 | 1 << 3 | 1 << 12  # vsyscall, vdso, vvar
_PAGE_BYTES = 4096


class Area(NamedTuple):
    """`is_watched`: CRIU registers it with the userfaultfd."""

    start: int
    end: int
    is_watched: bool


def decode_areas(data: bytes) -> list[Area]:
    """The areas, upwards.

    Raises:
        ValueError: It is no such record, or too long.
    """
    if not _HEAD.size <= len(data) <= AREAS_BYTES_MAX or _HEAD.unpack_from(data)[2] != len(data) - _HEAD.size:
        raise ValueError(f"{len(data)} bytes are no record of areas")
    areas = []
    for field, content in _fields(memoryview(data)[_HEAD.size :]):
        if field != _AREAS or isinstance(content, int):
            continue
        numbers = {name: value for name, value in _fields(content) if isinstance(value, int)}
        start, end, flags, status = (numbers.get(name, 0) for name in (_START, _END, _FLAGS, _STATUS))
        if start % _PAGE_BYTES or end % _PAGE_BYTES or not start < end:
            raise ValueError(f"an area from {start:#x} to {end:#x}")
        is_plain = flags & (_PRIVATE | _ANONYMOUS) == _PRIVATE | _ANONYMOUS and not flags & (_LOCKED | _HUGE)
        areas.append(Area(start, end, is_plain and not status & _KERNEL_OWN))
    return areas


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a protobuf message that has numbers and nested messages only."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        value, at = _number(message, at)
        if key & 7 == 0:
            yield key >> 3, value
        elif key & 7 == 2 and value <= len(message) - at:
            yield key >> 3, message[at : at + value]
            at += value
        else:
            raise ValueError(f"a field of kind {key & 7} that is not expected, or too long")


def _number(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number that does not end")
