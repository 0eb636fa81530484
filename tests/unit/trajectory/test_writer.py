"""What a writer promises: order, pairs, fencing, and what it does when it can't write."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from barchan.errors import BackendError, BlobCorrupt, Conflict, InvalidSpec, LocalProtocolError, NotFound
from barchan.trajectory.format import GENESIS, log_path
from barchan.trajectory.reader import load, verify
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.trajectory.logs import header, new_log, write_rollout


def test_entries_come_back_as_they_were_given(tmp_path: Path) -> None:
    """Intents, results and entries are read back in order, with their pairs, ids and bodies."""
    with new_log(tmp_path) as log:
        first = log.intent("exec", {"command": ["ls"], "stdin": b"\xff"}, op_id="op-1")
        assert log.result(first, {"exit_code": 0, "stdout": b"a"}) == 2
        assert log.entry("note", {"text": "x"}) == 3
        second = log.intent("file_write", {"path": "p", "data": b"1"})
    read = load(log.path)
    assert read.header == header()
    assert [(e.seq, e.part, e.kind, e.of, e.op_id) for e in read.entries[1:]] == [
        (1, "intent", "exec", None, "op-1"),
        (2, "result", "exec", 1, None),
        (3, "entry", "note", None, None),
        (4, "intent", "file_write", None, None),
    ]
    assert [e.body for e in read.entries[1:3]] == [
        {"command": ["ls"], "stdin": b"\xff"},
        {"exit_code": 0, "stdout": b"a"},
    ]
    assert [e.seq for e in read.open_intents] == [second]
    assert all(a.mono_ns <= b.mono_ns for a, b in zip(read.entries, read.entries[1:], strict=False))


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    """A second log of the same rollout is refused, and the first is untouched."""
    with new_log(tmp_path) as log:
        log.entry("note", {})
    before = log.path.read_bytes()
    with pytest.raises(Conflict, match="is there already"):
        new_log(tmp_path)
    assert log.path.read_bytes() == before


def test_a_header_that_was_cut_short_is_replaced(tmp_path: Path) -> None:
    """A writer killed before its first line was whole leaves nothing that anybody could have relied on."""
    path = log_path(tmp_path, "r-000000")
    path.parent.mkdir()
    path.write_bytes(b'{"seq":0,"par')
    new_log(tmp_path).close()
    assert verify(path).entries == 1


@pytest.mark.parametrize("rollout_id", ["", "a/b", "a\0b"])
def test_a_rollout_id_that_is_no_file_name(tmp_path: Path, rollout_id: str) -> None:
    """An id can't lead out of the folder."""
    with pytest.raises(InvalidSpec):
        log_path(tmp_path, rollout_id)


def test_results_need_an_open_intent(tmp_path: Path) -> None:
    """A result of nothing, or a second one, is our own fault, and leaves no trace."""
    with new_log(tmp_path) as log:
        seq = log.intent("exec", {})
        log.result(seq, {})
        for wrong in (0, seq, 99):
            with pytest.raises(LocalProtocolError):
                log.result(wrong, {})
        assert verify(log.path).entries == 3


def test_what_cannot_be_logged_leaves_no_trace(tmp_path: Path) -> None:
    """A body with a foreign object is refused by name; the log goes on."""
    with new_log(tmp_path) as log:
        with pytest.raises(InvalidSpec, match=r"entry 1 \(note\): a object"):
            log.entry("note", {"a": object()})
        assert log.entry("note", {}) == 1


def test_a_closed_writer_writes_no_more(tmp_path: Path) -> None:
    """After close, which may be repeated, an append is refused."""
    log = new_log(tmp_path)
    log.close()
    log.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        log.entry("note", {})


def test_a_later_writer_fences_the_earlier(tmp_path: Path) -> None:
    """Whoever takes a log over gets the next epoch and the open intents; the old writer can't append from then on."""
    old = new_log(tmp_path)
    seq = old.intent("exec", {"command": "make"})
    new = TrajectoryWriter.reopen(old.path)
    with pytest.raises(Conflict, match="took"):
        old.entry("note", {"late": True})
    assert new.header.epoch == 2
    assert [entry.seq for entry in new.open_intents] == [seq]
    new.result(seq, {"exit_code": 0})
    new.close()
    old.close()
    read = load(old.path)
    assert [(entry.part, entry.epoch) for entry in read.entries] == [
        ("header", 1),
        ("intent", 1),
        ("header", 2),
        ("result", 2),
    ]
    assert read.open_intents == ()


@pytest.mark.parametrize("epoch", [3, 4])
def test_a_lower_or_equal_epoch_is_refused(tmp_path: Path, epoch: int) -> None:
    """A stale client can't take a log back; the file stays as it is."""
    new_log(tmp_path).close()
    path = log_path(tmp_path, "r-000000")
    TrajectoryWriter.reopen(path, epoch=4).close()
    before = path.read_bytes()
    with pytest.raises(Conflict, match="epoch 4"):
        TrajectoryWriter.reopen(path, epoch=epoch)
    assert path.read_bytes() == before


@pytest.mark.parametrize("left", [1, 40, -1])
def test_a_torn_last_line_is_cut(tmp_path: Path, left: int) -> None:
    """What a killed writer left of a line goes when the log is taken over; every whole line stands."""
    with new_log(tmp_path) as log:
        log.entry("note", {"n": 1})
        whole = log.path.stat().st_size
        log.entry("note", {"n": 2})
    data = log.path.read_bytes()
    log.path.write_bytes(data[: whole + left] if left > 0 else data[:left])
    torn_bytes = log.path.stat().st_size - whole
    found = verify(log.path)
    assert (found.ok, found.entries, found.torn_bytes) == (True, 2, torn_bytes)
    TrajectoryWriter.reopen(log.path).close()
    read = load(log.path)
    assert [entry.body.get("n") for entry in read.entries] == [None, 1, None]
    assert read.torn_bytes == 0


def test_a_broken_or_missing_log_is_not_taken_over(tmp_path: Path) -> None:
    """Nobody appends to a log whose past does not verify, or that is not there."""
    with pytest.raises(NotFound):
        TrajectoryWriter.reopen(tmp_path / "none")
    with new_log(tmp_path) as log:
        log.entry("note", {"n": 1})
    log.path.write_bytes(log.path.read_bytes().replace(b'"n":1', b'"n":2'))
    before = log.path.read_bytes()
    with pytest.raises(BlobCorrupt) as caught:
        TrajectoryWriter.reopen(log.path)
    assert caught.value.details == {"seq": 1}
    assert log.path.read_bytes() == before


def test_prompts_that_continue_are_written_once(tmp_path: Path) -> None:
    """A turn's prompt that starts with the turn before costs its new tokens only, and is read back whole."""
    prompts = [list(range(5000)), [*range(5000), 1, 2, 77], list(range(5000, 9000)), [*range(5000, 8000), 4]]
    with new_log(tmp_path) as log:
        sizes = []
        for prompt in prompts:
            before = log.path.stat().st_size
            log.entry("model_call", {"prompt_ids": prompt, "completion_ids": [1, 2]})
            sizes.append(log.path.stat().st_size - before)
    assert [entry.body["prompt_ids"] for entry in load(log.path).entries[1:]] == prompts
    assert [size > 10_000 for size in sizes] == [True, False, True, False]


def test_prompts_continue_across_writers(tmp_path: Path) -> None:
    """A writer that takes a log over refers to the calls before it as well."""
    prompt = list(range(3000))
    with new_log(tmp_path) as log:
        seq = log.intent("model_call", {"prompt_ids": prompt})
        log.result(seq, {"completion_ids": [5, 6]})
    before = log.path.stat().st_size
    with TrajectoryWriter.reopen(log.path) as log:
        log.entry("model_call", {"prompt_ids": [*prompt, 5, 6, 7]})
    assert load(log.path).entries[-1].body["prompt_ids"] == [*prompt, 5, 6, 7]
    assert log.path.stat().st_size - before < 2000


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from barchan.errors import BackendError, LocalProtocolError
from barchan.trajectory.writer import TrajectoryWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
log = TrajectoryWriter.reopen(Path(sys.argv[1]))
kept = 0
try:
    while True:
        log.entry("note", {"text": "x" * 700})
        kept += 1
except BackendError as error:
    print(kept, type(error).__name__)
try:
    log.entry("note", {})
except LocalProtocolError:
    print("closed")
"""


def test_no_space_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    """When the file can't grow, the append fails, the writer is closed, and what was acknowledged is all there."""
    with new_log(tmp_path) as log:
        pass
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(log.path)], capture_output=True, text=True, timeout=60, check=True
    )
    kept = int(run.stdout.split()[0])
    assert run.stdout.split("\n") == [f"{kept} BackendError", "closed", ""]
    found = verify(log.path)
    assert (found.ok, found.entries) == (True, kept + 2)
    assert found.torn_bytes > 0


def test_where_no_file_can_be(tmp_path: Path) -> None:
    """A folder that can't be made or a log that is a folder is a typed error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError):
        TrajectoryWriter.create(tmp_path / "file" / "x", header())
    with pytest.raises(BackendError):
        TrajectoryWriter.create(tmp_path, header())


def test_writers_leave_no_descriptor(tmp_path: Path) -> None:
    """Neither a closed writer nor a refused one keeps a file open."""
    before = len(os.listdir("/proc/self/fd"))
    with new_log(tmp_path) as log:
        write_rollout(log)
    with pytest.raises(Conflict):
        new_log(tmp_path)
    with pytest.raises(Conflict):
        TrajectoryWriter.reopen(log.path, epoch=1)
    TrajectoryWriter.reopen(log.path, durable=True).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_writer_can_tell_that_it_was_relieved(tmp_path: Path) -> None:
    """Before it acts, without writing; whoever relieved it knows what the log held then."""
    old = new_log(tmp_path)
    old.entry("note", {"n": 1})
    old.check()
    head_hash = old.head_hash
    new = TrajectoryWriter.reopen(old.path)
    assert (new.found_hash, old.found_hash) == (head_hash, GENESIS)
    new.check()
    with pytest.raises(Conflict):
        old.check()
    for log in (old, new):
        log.close()
    with pytest.raises(LocalProtocolError):
        new.check()


def test_threads_append_one_after_the_other(tmp_path: Path) -> None:
    """The lock of the file tells processes apart, and no threads: these take their turns all the same."""
    with new_log(tmp_path) as log:
        long = bytes(range(256)) * 4096

        def append() -> None:
            for _ in range(8):
                log.result(log.intent("exec", {"stdin": long}), {"stdout": long})

        threads = [threading.Thread(target=append) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = verify(log.path)
    assert (found.ok, found.entries, found.open_intents) == (True, 1 + 3 * 8 * 2, ())


def test_nothing_comes_after_the_verdict(tmp_path: Path) -> None:
    """What a thread is still about to log when the rollout is over: the verdict's hash stays the last."""
    with new_log(tmp_path) as log:
        log.entry("verdict", {"status": "cancelled"})
        before = log.head_hash
        with pytest.raises(LocalProtocolError, match="has its verdict"):
            log.entry("artifact", {"kind": "text", "data": "x"})
    assert verify(log.path, head_hash=before).ok


def test_a_log_that_has_gone_on_is_left_alone(tmp_path: Path) -> None:
    """Who knows a log as it was takes it over only as that: its owner goes on else, and is not fenced."""
    with new_log(tmp_path) as log:
        was = log.head_hash
        log.entry("note", {})
        with pytest.raises(Conflict, match="has gone on"):
            TrajectoryWriter.reopen(log.path, found_hash=was)
        log.entry("note", {})
        TrajectoryWriter.reopen(log.path, found_hash=log.head_hash).close()
        with pytest.raises(Conflict):
            log.check()
