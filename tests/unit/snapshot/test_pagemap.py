"""CRIU's page maps: read as CRIU writes them, refused when they are anything else."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.snapshot.pagemap import PAGE_BYTES, PageMap, Run, decode_pagemap, encode_pagemap


def record(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


HEAD = bytes.fromhex("1943565425400856")
FIRST = record(b"\x08\x07")


def entry(*fields: tuple[int, int]) -> bytes:
    """A record of fields below 128."""
    return record(b"".join(bytes((number << 3, value)) for number, value in fields))


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 2**34), st.booleans(), st.booleans()), max_size=20),
)
def test_what_is_written_is_read(pages_id: int, parts: list[tuple[int, int, bool, bool]]) -> None:
    """A map comes back as it was, whatever its gaps, sizes and flags."""
    runs, address = [], 0
    for gap, pages, is_present, is_lazy in parts:
        address += gap * PAGE_BYTES
        runs.append(Run(address, pages, is_present, is_lazy))
        address += pages * PAGE_BYTES
    expected = PageMap(pages_id, tuple(runs))
    assert decode_pagemap(encode_pagemap(expected)) == expected
    assert expected.pages == sum(run.pages for run in runs if run.is_present)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (((1, 0), (2, 3), (4, 4)), Run(0, 3, True, False)),
        (((1, 0), (2, 3), (4, 6)), Run(0, 3, True, True)),
        (((1, 0), (2, 3), (4, 2)), Run(0, 3, False, True)),
        (((1, 0), (2, 3), (4, 0)), Run(0, 3, False, False)),
        (((1, 0), (2, 3)), Run(0, 3, True, False)),
        (((1, 0), (2, 3), (3, 0)), Run(0, 3, True, False)),
        (((1, 0), (2, 3), (4, 4), (5, 9)), Run(0, 9, True, False)),
        (((1, 0), (2, 3), (4, 4), (6, 1)), Run(0, 3, True, False)),
    ],
)
def test_flags_of_every_release(fields: tuple[tuple[int, int], ...], expected: Run) -> None:
    """Flags say what is there; maps without them are of earlier releases; a wide count goes before the old one."""
    assert decode_pagemap(HEAD + FIRST + entry(*fields)) == PageMap(7, (expected,))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no page map"),
        (HEAD, "names no pages file"),
        (HEAD[:4] + b"1234" + FIRST, "no page map"),
        (HEAD + record(b""), "names no pages file"),
        (HEAD + FIRST + b"\x01", "record's length"),
        (HEAD + FIRST + struct.pack("<I", 5) + b"\x08", "record of 5 bytes"),
        (HEAD + FIRST + struct.pack("<I", 1 << 30), "record of 1073741824 bytes"),
        (HEAD + FIRST + entry((1, 0)), "lacks"),
        (HEAD + FIRST + entry((2, 1)), "lacks"),
        (HEAD + FIRST + entry((1, 5), (2, 1)), "does not begin with a page"),
        (HEAD + FIRST + entry((1, 0), (2, 1), (4, 1)), "parent"),
        (HEAD + FIRST + entry((1, 0), (2, 1), (4, 5)), "parent"),
        (HEAD + FIRST + entry((1, 0), (2, 1), (3, 1)), "parent"),
        (HEAD + FIRST + entry((1, 0), (2, 1), (4, 8)), "unknown flags"),
        (HEAD + FIRST + entry((1, 0), (2, 2)) * 2, "not in order"),
        (HEAD + FIRST + record(b"\x08\x00\x10" + b"\xff" * 9 + b"\x01"), "end of memory"),
        (HEAD + FIRST + record(b"\x08" + b"\xff" * 10 + b"\x01"), "64 bits"),
        (HEAD + FIRST + record(b"\x08"), "ends in a number"),
        (HEAD + FIRST + record(b"\x0a\x7f"), "ends in a field"),
        (HEAD + FIRST + record(b"\x0b"), "unknown type"),
    ],
)
def test_anything_else_is_refused(data: bytes, why: str) -> None:
    """What CRIU does not write, or means pages that are not here, is a ValueError that says what is wrong."""
    with pytest.raises(ValueError, match=why):
        decode_pagemap(data)


@given(st.binary(max_size=200))
def test_no_bytes_do_harm(tail: bytes) -> None:
    """Whatever follows the head is a map or a ValueError."""
    try:
        found = decode_pagemap(HEAD + FIRST + tail)
    except ValueError:
        return
    assert all(run.address % PAGE_BYTES == 0 for run in found.runs)
