"""Taking out of CRIU's images what must not live twice: memory that the kernel itself would not give to a copy.

A program asks for such memory by MADV_WIPEONFORK or MAP_DROPPABLE, mostly for the state of a random generator: newer C
libraries keep the one of getrandom() there, and make it anew when they find zeros. CRIU before 4.2 doesn't know either:
it would store the pages, and restore memory that is no longer wiped.
"""

import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from barchan.snapshot.pagemap import PAGE_BYTES, decode_pagemap

Area = tuple[int, int]  # of an address space: where it starts and ends

_WIPE_ON_FORK = 1 << 18  # the number of MADV_WIPEONFORK, as CRIU records advice
_VMAS, _START, _ADVICE = 14, 1, 9  # of the images' messages: a memory map's areas, an area's fields
_HEAD_BYTES = 8
_AREA = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) |^VmFlags:.* (?:wf|dp)\b", re.MULTILINE)


def areas_of(smaps: bytes) -> list[Area]:
    """Those of a process that the kernel wipes in its children."""
    found: list[Area] = []
    last = (0, 0)
    for match in _AREA.finditer(smaps):
        if match[1] is None:
            found.append(last)
        else:
            last = int(match[1], 16), int(match[2], 16)
    return found


def wipe(images: Path, areas: Mapping[int, Sequence[Area]]) -> None:
    """Write zeros over the areas' pages, and see to it that they are wiped in children after a restore, too.

    Args:
        areas: By the process's pid inside.

    Raises:
        ValueError: The images are not as CRIU makes them.
    """
    for pid, of_process in areas.items():
        _wipe(images, pid, of_process)
        path = images / f"mm-{pid}.img"
        path.write_bytes(_advised(path.read_bytes(), {start for start, _ in of_process}))


def _wipe(images: Path, pid: int, areas: Sequence[Area]) -> None:
    page_map = decode_pagemap((images / f"pagemap-{pid}.img").read_bytes())
    position = 0
    with open(images / f"pages-{page_map.pages_id}.img", "r+b", buffering=0) as pages:
        for run in page_map.runs:
            if not run.is_present:
                continue
            for start, end in areas:
                first = max(start, run.address)
                last = min(end, run.address + run.pages * PAGE_BYTES)
                if first < last:
                    os.pwrite(pages.fileno(), bytes(last - first), position + first - run.address)
            position += run.pages * PAGE_BYTES


def _advised(image: bytes, starts: set[int]) -> bytes:
    """A memory map in which the areas that begin there are advised as they were."""
    (length,) = struct.unpack_from("<I", image, _HEAD_BYTES)
    message = image[_HEAD_BYTES + 4 : _HEAD_BYTES + 4 + length]
    out = bytearray()
    for field, value, raw in _fields(message):
        if field == _VMAS and isinstance(value, bytes):
            numbers = {number: item for number, item, _ in _fields(value) if isinstance(item, int)}
            if numbers.get(_START) in starts:
                kept = b"".join(part for number, _, part in _fields(value) if number != _ADVICE)
                area = kept + _encode(_ADVICE << 3) + _encode(numbers.get(_ADVICE, 0) | _WIPE_ON_FORK)
                raw = _encode(_VMAS << 3 | 2) + _encode(len(area)) + area
        out += raw
    return image[:_HEAD_BYTES] + struct.pack("<I", len(out)) + bytes(out)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Number, value and encoding of each field."""
    at = 0
    while at < len(message):
        begin = at
        key, at = _varint(message, at)
        value: int | bytes
        if key & 7 == 0:
            value, at = _varint(message, at)
        else:
            length = {1: 8, 5: 4}.get(key & 7)
            if length is None and key & 7 == 2:
                length, at = _varint(message, at)
            if length is None or at + length > len(message):
                raise ValueError("a memory map is not as CRIU writes it")
            value, at = message[at : at + length], at + length
        yield key >> 3, value, message[begin:at]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a memory map ends in a number")


def _encode(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
