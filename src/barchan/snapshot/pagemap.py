"""CRIU's page maps: which address each page of a pages file has.

A map (`pagemap-ID.img`, or `pagemap-shmem-ID.img` of shared memory) is two magic numbers and records, each a length
and a protobuf message: first the number of its pages file, then runs of pages in the order in which they lie there.
What is read here was made by CRIU from what a guest did: sizes are bounded, and nothing else is believed.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

PAGE_BYTES = 4096
_HEAD = struct.Struct("<II")
_COMMON_MAGIC, _PAGEMAP_MAGIC = 0x54564319, 0x56084025
_LENGTH = struct.Struct("<I")
_RECORD_BYTES_MAX = 256
_IN_PARENT, _LAZY, _PRESENT = 1, 2, 4
_ADDRESS_MAX = 1 << 64
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Run(NamedTuple):
    """Neighbouring pages of an address space.

    `is_present`: the pages file has them; `is_lazy`: a restore may have them after the process goes on.
    """

    address: int
    pages: int
    is_present: bool = True
    is_lazy: bool = False


class PageMap(NamedTuple):
    """One map: the number of its pages file (`pages-N.img`), and its runs, upwards."""

    pages_id: int
    runs: tuple[Run, ...]

    @property
    def pages(self) -> int:
        """Pages that lie in the pages file."""
        return sum(run.pages for run in self.runs if run.is_present)


def decode_pagemap(data: bytes) -> PageMap:
    """Read a page map.

    Raises:
        ValueError: It is none, or has pages in another dump (a parent), which no file of ours holds.
    """
    records = _records(data)
    head = next(records, None)
    if head is None or 1 not in (found := _fields(head)):
        raise ValueError("it names no pages file")
    runs: list[Run] = []
    end = 0
    for record in records:
        run = _run(_fields(record))
        if run.address < end:
            raise ValueError(f"its runs are not in order at {run.address:#x}")
        end = run.address + run.pages * PAGE_BYTES
        if end > _ADDRESS_MAX:
            raise ValueError(f"its run of {run.pages} pages at {run.address:#x} passes the end of memory")
        runs.append(run)
    return PageMap(found[1], tuple(runs))


def encode_pagemap(page_map: PageMap) -> bytes:
    """The same as CRIU writes it."""
    out = bytearray(_HEAD.pack(_COMMON_MAGIC, _PAGEMAP_MAGIC))
    messages = [_field(1, page_map.pages_id)]
    for run in page_map.runs:
        flags = _PRESENT * run.is_present | _LAZY * run.is_lazy
        short = min(run.pages, 0xFFFFFFFF)
        messages.append(_field(1, run.address) + _field(2, short) + _field(4, flags) + _field(5, run.pages))
    for message in messages:
        out += _LENGTH.pack(len(message)) + message
    return bytes(out)


def _run(fields: dict[int, int]) -> Run:
    if 1 not in fields or 2 not in fields:
        raise ValueError("a run lacks its address or its size")
    # As CRIU reads maps of its earlier releases: without flags all pages are there, a wide count goes before the old.
    flags = fields.get(4, _PRESENT)
    if flags & _IN_PARENT or fields.get(3, 0):
        raise ValueError("it has pages in an earlier dump, its parent")
    if flags & ~(_LAZY | _PRESENT):
        raise ValueError(f"it has a run with unknown flags {flags:#x}")
    address, pages = fields[1], fields.get(5, fields[2])
    if address % PAGE_BYTES:
        raise ValueError(f"its run at {address:#x} does not begin with a page")
    return Run(address, pages, bool(flags & _PRESENT), bool(flags & _LAZY))


def _records(data: bytes) -> Iterator[bytes]:
    if data[: _HEAD.size] != _HEAD.pack(_COMMON_MAGIC, _PAGEMAP_MAGIC):
        raise ValueError("it is no page map")
    at = _HEAD.size
    while at < len(data):
        if len(data) - at < _LENGTH.size:
            raise ValueError("it ends in a record's length")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > _RECORD_BYTES_MAX or length > len(data) - at:
            raise ValueError(f"it has a record of {length} bytes")
        yield data[at : at + length]
        at += length


def _fields(message: bytes) -> dict[int, int]:
    """Numbers of a message, by field; what is no number is passed over."""
    found: dict[int, int] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            found[key >> 3], at = _varint(message, at)
        elif kind == _BYTES:
            length, at = _varint(message, at)
            at += length
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"it has a field of the unknown type {kind}")
    if at > len(message):
        raise ValueError("it ends in a field")
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        if at >= len(message):
            raise ValueError("it ends in a number")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (_ADDRESS_MAX - 1), at
        shift += 7
    raise ValueError("it has a number of more than 64 bits")


def _field(number: int, value: int) -> bytes:
    out = bytearray([number << 3])
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
