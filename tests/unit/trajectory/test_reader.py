"""What a check finds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from barchan.errors import BackendError, BlobCorrupt, NotFound
from barchan.trajectory.format import GENESIS, Entry, seal
from barchan.trajectory.reader import load, read, verify
from tests.unit.trajectory.logs import header, new_log, write_rollout

Lines = list[bytes]


def a_log(folder: Path) -> Path:
    with new_log(folder) as log:
        write_rollout(log)
    return log.path


def swapped(lines: Lines) -> Lines:
    return [*lines[:4], lines[5], lines[4], *lines[6:]]


@pytest.mark.parametrize(
    ("change", "bad_seq"),
    [
        (lambda lines: [*lines[:3], *lines[4:]], 3),
        (lambda lines: lines[1:], 0),
        (swapped, 4),
        (lambda lines: [*lines[:6], lines[5], *lines[6:]], 6),
        (lambda lines: [*lines[:3], lines[3].replace(b"turn 0", b"turn 1"), *lines[4:]], 3),
        (lambda lines: [*lines[:2], b"\n", *lines[2:]], 2),
        (lambda lines: [], 0),
        (lambda lines: [lines[0], b"x" * 100 + b"\n"], 1),
    ],
    ids=["removed", "no header", "swapped", "repeated", "changed", "empty line", "empty file", "foreign"],
)
def test_a_change_is_found_where_it_is(tmp_path: Path, change: Callable[[Lines], Lines], bad_seq: int) -> None:
    """A removed, moved, repeated, changed or foreign line is found, at its place."""
    path = a_log(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))
    found = verify(path)
    assert (found.ok, found.bad_seq, found.entries) == (False, bad_seq, bad_seq)
    with pytest.raises(BlobCorrupt) as caught:
        load(path)
    assert caught.value.details == {"seq": bad_seq}


def test_entries_before_a_break_are_given(tmp_path: Path) -> None:
    """Reading gives every entry that the chain vouches for, and then raises."""
    path = a_log(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], *lines[6:]]))
    seen = []
    with pytest.raises(BlobCorrupt, match="entry 5: seq 6 stands where 5 belongs"):
        for entry in read(path):
            seen.append(entry.seq)
    assert seen == [0, 1, 2, 3, 4]


def test_a_shortened_log_is_found_by_its_last_hash(tmp_path: Path) -> None:
    """Whole lines missing at the end are seen by whoever kept the last hash, and only then."""
    with new_log(tmp_path) as log:
        write_rollout(log)
    assert verify(log.path, head_hash=log.head_hash).ok
    log.path.write_bytes(b"".join(log.path.read_bytes().splitlines(keepends=True)[:-1]))
    assert verify(log.path).ok
    found = verify(log.path, head_hash=log.head_hash)
    assert (found.ok, found.why) == (False, "the log ends before the entry that was its last")


BODY = msgspec.to_builtins(header())
FIRST = Entry(seq=0, part="header", epoch=1, unix_ns=1, mono_ns=1, body=BODY, prev_hash=GENESIS)
LATER: dict[str, Any] = {"seq": 1, "epoch": 1, "unix_ns": 1, "mono_ns": 1, "body": {}}


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([Entry(part="entry", kind="note", prev_hash="", **{**LATER, "seq": 0})], "does not start with a header"),
        ([replace(FIRST, body={})], "the header is none"),
        ([replace(FIRST, body={**BODY, "format": "other/1"})], "this version reads"),
        ([replace(FIRST, epoch=2)], "can't follow epoch"),
        ([FIRST, Entry(part="header", prev_hash="", **{**LATER, "body": BODY})], "can't follow epoch 1"),
        ([FIRST, Entry(part="entry", kind="note", prev_hash="", **{**LATER, "epoch": 2})], "stands in epoch 1"),
        ([FIRST, Entry(part="entry", prev_hash="", **LATER)], "has no kind"),
        ([FIRST, Entry(part="entry", kind="note", of=0, prev_hash="", **LATER)], "refers to 0"),
        ([FIRST, Entry(part="result", kind="exec", of=0, prev_hash="", **LATER)], "no open exec"),
        ([FIRST, Entry(part="result", kind="exec", prev_hash="", **LATER)], "no open exec"),
        ([FIRST, Entry(part="entry", kind="note", prev_hash="", **{**LATER, "body": {"a": {"$bytes": 1}}})], "a value"),
        (
            [
                FIRST,
                Entry(
                    part="entry",
                    kind="model_call",
                    prev_hash="",
                    **{**LATER, "body": {"prompt_ids": {"$extends": [0, 9, []]}}},
                ),
            ],
            "continues no call",
        ),
    ],
)
def test_a_chain_that_says_nonsense_is_refused(tmp_path: Path, entries: list[Entry], why: str) -> None:
    """A log whose hashes fit and whose entries break the format's rules, as only another program writes it, is bad."""
    lines, last = [], GENESIS
    for entry in entries:
        line, last = seal(replace(entry, prev_hash=last))
        lines.append(line)
    path = tmp_path / "log"
    path.write_bytes(b"".join(lines))
    found = verify(path)
    assert (found.ok, found.bad_seq) == (False, len(entries) - 1)
    assert why in found.why


def test_where_no_log_is(tmp_path: Path) -> None:
    """A missing file and a folder are typed errors."""
    with pytest.raises(NotFound):
        verify(tmp_path / "none")
    with pytest.raises(BackendError):
        load(tmp_path)
