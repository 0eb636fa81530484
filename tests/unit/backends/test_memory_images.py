"""What is written over in CRIU's images, what its words mean, and which connections leave a sandbox."""

import struct
from pathlib import Path

import pytest

from barchan.backends.container import criu, inside
from barchan.backends.container.inside import is_place, outside_connections
from barchan.backends.container.memory import RESTORE_S, restore_s
from barchan.backends.container.wipe import areas_of, wipe
from barchan.snapshot.pagemap import PAGE_BYTES, PageMap, Run, encode_pagemap

HEAD = struct.pack("<II", 0x54564319, 0x57492820)
START = 0x7F0000000000
SMAPS = b"""7f0000000000-7f0000002000 rw-p 00000000 00:00 0
Size:                  8 kB
VmFlags: rd wr mr mw me ac wf
7f0000003000-7f0000005000 rw-p 00000000 00:00 0
Size:                  8 kB
VmFlags: rd wr mr mw me ac
7f0000006000-7f0000007000 rw-p 00000000 00:00 0
Size:                  4 kB
VmFlags: rd wr mr mw me nr wf dp
"""


def _number(field: int, value: int) -> bytes:
    out = bytearray([field << 3])
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def _memory_map(areas: list[tuple[int, int, int | None]]) -> bytes:
    """As CRIU writes it: a number, the areas with their advice, a string."""
    message = _number(1, 4096)
    for start, end, advice in areas:
        area = _number(1, start) + _number(2, end) + (b"" if advice is None else _number(9, advice))
        message += bytes([14 << 3 | 2, len(area)]) + area
    message += bytes([13 << 3 | 2, 3]) + b"end"
    return HEAD + struct.pack("<I", len(message)) + message


def test_areas_that_a_child_would_not_get_are_found() -> None:
    """Those marked `wf` or `dp`, and no others."""
    assert areas_of(SMAPS) == [(START, START + 0x2000), (START + 0x6000, START + 0x7000)]


def test_pages_are_wiped_and_the_advice_is_kept(tmp_path: Path) -> None:
    """Exactly the pages of the areas, where they lie behind others; the areas are advised again at a restore."""
    runs = (Run(START - PAGE_BYTES, 2), Run(START + 0x1000, 1, is_present=False), Run(START + 0x6000, 2))
    (tmp_path / "pagemap-7.img").write_bytes(encode_pagemap(PageMap(3, runs)))
    (tmp_path / "pages-3.img").write_bytes(b"".join(bytes([65 + index]) * PAGE_BYTES for index in range(4)))
    areas = [
        (START, START + 0x2000, None),
        (START + 0x3000, START + 0x5000, 2),
        (START + 0x6000, START + 0x7000, 1 << 16),
    ]
    (tmp_path / "mm-7.img").write_bytes(_memory_map(areas))
    wipe(tmp_path, {7: areas_of(SMAPS)})
    pages = (tmp_path / "pages-3.img").read_bytes()
    assert [pages[at] for at in range(0, len(pages), PAGE_BYTES)] == [65, 0, 0, 68]
    assert pages[PAGE_BYTES : 3 * PAGE_BYTES] == bytes(2 * PAGE_BYTES)
    expected = [(areas[0][0], areas[0][1], 1 << 18), areas[1], (areas[2][0], areas[2][1], 1 << 18 | 1 << 16)]
    assert (tmp_path / "mm-7.img").read_bytes() == _memory_map(expected)


@pytest.mark.parametrize("cut", [9, 13, 20, 30])
def test_a_memory_map_that_ends_early_is_refused(tmp_path: Path, cut: int) -> None:
    """As an error, not with something made of it."""
    (tmp_path / "pagemap-7.img").write_bytes(encode_pagemap(PageMap(3, (Run(START, 1),))))
    (tmp_path / "pages-3.img").write_bytes(bytes(PAGE_BYTES))
    (tmp_path / "mm-7.img").write_bytes(_memory_map([(START, START + 0x2000, None)])[:cut])
    with pytest.raises((ValueError, struct.error)):
        wipe(tmp_path, {7: [(START, START + 0x2000)]})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("tty: ctty inheritance detected sid/pgrp 7/0, ctty pid_real 99", "/dev/tty"),
        ("fsnotify: Can't dump that handle", "watches files"),
        ("inet: In-flight connection (l) for e", "not accepted"),
        ("Can't lookup mount=31 for fd=3 path=/q", "message queue"),
        ("Can't lookup mount=15 for fd=3 path=/secretmem (deleted)", "secret memory"),
        ("Can't dump file 3 of that type [600] (anon anon_inode:[landlock-ruleset])", "Landlock"),
        ("something never seen", ""),
    ],
)
def test_the_first_error_decides(error: str, words: str) -> None:
    """Behind a warning that is no error; and CRIU's own words are kept."""
    log = (
        "Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
        f"Error (criu/x.c:1): {error}\nError (criu/cr-dump.c:2111): Dumping FAILED.\n"
    )
    found, first = criu.reason(log)
    assert (words in found, bool(found), first) == (True, bool(words), error)


def test_places_are_single_names() -> None:
    """What comes with a snapshot never leads out of the guest's group."""
    assert [is_place(name) for name in (".", "p2", "p-3_4.x")] == [True] * 3
    assert not any(is_place(name) for name in ("", "..", "a/b", "a\nb", ".hidden", "a b", "p" * 200))


def test_connections_that_leave_are_told_from_those_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another address, and the proxy's port where there is a proxy; not loopback, listeners or what has ended."""
    tcp = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:0C38 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0100007F:1B58 0100007F:A1B2 01 00000000:00000000 00:00000000 00000000     0        0 2
   2: 0100007F:A1B2 0100007F:0C38 01 00000000:00000000 00:00000000 00000000     0        0 3
   3: 6400000A:A1B3 08080808:01BB 01 00000000:00000000 00:00000000 00000000     0        0 4
   4: 6400000A:A1B4 09090909:01BB 06 00000000:00000000 00:00000000 00000000     0        0 0
   5: 6400000A:A1B5 0A0A0A0A:01BB 05 00000000:00000000 00:00000000 00000000     0        0 0
"""
    tcp6 = """  sl  local_address                         remote_address                        st tx_queue
   0: 00000000000000000000000001000000:1F90 00000000000000000000000001000000:1F91 01 00000000:00000000 00:0 0 0 0 7
   1: 0000000000000000FFFF00000100007F:1F90 0000000000000000FFFF00000100007F:1F91 08 00000000:00000000 00:0 0 0 0 7
"""
    monkeypatch.setattr(inside.Path, "read_text", lambda path: tcp6 if path.name == "tcp6" else tcp)
    assert outside_connections(1, "proxy") == ["8.8.8.8:443", "the proxy"]
    assert outside_connections(1, "open") == ["8.8.8.8:443"]
    assert outside_connections(1, "none") == []


def test_a_large_memory_has_longer_to_come_back() -> None:
    """Its pages may still be on their way from the disk while CRIU waits; what a record says is bounded."""
    assert restore_s(0) == restore_s(-1) == RESTORE_S
    assert restore_s(8 << 30) > RESTORE_S + 600
    assert restore_s(1 << 90) < 1 << 20
