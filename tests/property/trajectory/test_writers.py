"""Writers that take a log from each other, and what was changed afterwards: in any order, of any bytes."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from barchan.errors import Conflict
from barchan.trajectory.reader import Following, load, verify
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.trajectory.logs import header

# What a writer does: appends an entry or an intent, ends its last intent, or a new one takes the log over.
STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["entry", "intent", "result", "take over"])), max_size=30)


@settings(deadline=None, max_examples=40)
@given(STEPS)
def test_only_the_last_writer_appends(steps: list[tuple[int, str]]) -> None:
    """Writers in any order: an entry is in the log exactly where its append returned, and the chain holds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        writers = [TrajectoryWriter.create(path, header())]
        following, seen, accepted = Following(path), 0, 0
        for number, (which, what) in enumerate(steps):
            writer = writers[which % len(writers)]
            if what == "take over":
                writers.append(TrajectoryWriter.reopen(path))
                continue
            try:
                if what == "entry":
                    writer.entry("note", {"n": number})
                elif what == "intent":
                    writer.intent("exec", {"n": number})
                elif writer.open_intents:
                    writer.result(writer.open_intents[-1].seq, {"n": number})
                else:
                    continue
            except Conflict:
                assert writer is not writers[-1]
            else:
                assert writer is writers[-1]
                accepted += 1
            seen += len(following.new())
        found = verify(path, head_hash=writers[-1].head_hash)
        assert (found.ok, found.entries) == (True, accepted + len(writers))
        assert seen + len(following.new()) == found.entries
        for writer in writers:
            writer.close()


def lines_of(bodies: list[dict[str, Any]]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        with TrajectoryWriter.create(path, header()) as log:
            for body in bodies:
                log.entry("note", body)
        return path.read_bytes()


BODIES = st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=20) | st.integers() | st.binary(max_size=9)))


@settings(deadline=None, max_examples=40)
@given(BODIES, st.data())
def test_whatever_is_changed_in_any_log_is_found(bodies: list[dict[str, Any]], data: st.DataObject) -> None:
    """A byte, a lost, repeated or exchanged line of any log is found at its line; whole lines before it are given."""
    written = lines_of(bodies)
    lines = written.splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines) - 1))
    change = data.draw(st.sampled_from(["byte", "drop", "repeat", "swap"]))
    bad = at
    if change == "byte":
        position = data.draw(st.integers(0, len(lines[at]) - 2))
        value = data.draw(st.integers(1, 255).filter(lambda bits: lines[at][position] ^ bits != 0x0A))
        changed = bytearray(lines[at])
        changed[position] ^= value
        lines[at] = bytes(changed)
    elif change == "drop":
        del lines[at]
    elif change == "repeat":
        lines.insert(at, lines[at])
        bad = at + 1
    else:
        lines.insert(0, lines.pop(at))
        bad = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(b"".join(lines))
        found = verify(path)
        if b"".join(lines) == written:
            assert found.ok
        elif change == "drop" and at == len(lines):  # the last one: only the last hash, kept elsewhere, tells
            assert found.ok == (at > 0)
        else:
            assert (found.ok, found.bad_seq) == (False, bad)


@settings(deadline=None, max_examples=40)
@given(BODIES, st.data())
def test_any_log_cut_anywhere_is_mended(bodies: list[dict[str, Any]], data: st.DataObject) -> None:
    """Its whole lines are kept, the torn one is cut by the next writer, which goes on behind them."""
    written = lines_of(bodies)
    length = data.draw(st.integers(written.index(b"\n") + 1, len(written)))
    whole = written.count(b"\n", 0, length)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(written[:length])
        torn = length - (written.rindex(b"\n", 0, length) + 1)
        assert (load(path).torn_bytes, verify(path).entries) == (torn, whole)
        with TrajectoryWriter.reopen(path) as log:
            assert log.entry("note", {}) == whole + 1
        assert (verify(path).ok, verify(path).entries, verify(path).torn_bytes) == (True, whole + 2, 0)
