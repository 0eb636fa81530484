"""A run's folder that many processes write to."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from barchan.errors import BlobCorrupt, Conflict, InvalidSpec, NotFound
from barchan.model.verdict import Verdict
from barchan.rollout import shared as module
from barchan.rollout.attempt import Job
from barchan.rollout.record import RolloutRecord, Timings
from barchan.rollout.shared import Lines, SharedFolder, group_name, member_id, member_of
from barchan.rollout.store import ROLLOUTS, read_rollouts, read_run, read_tasks
from barchan.trajectory.format import log_path
from tests.unit.rollout.fakes import task

SCORED = Verdict(status="scored", reward=1.0, fault="none", cause="completed")


def folder(path: Path, run_id: str = "r") -> SharedFolder:
    return SharedFolder(path, run_id, "1.0")


def record(rollout_id: str, verdict: Verdict = SCORED) -> RolloutRecord:
    return RolloutRecord(
        run_id="r",
        rollout_id=rollout_id,
        task_id="t",
        sample_index=0,
        policy="p",
        verdict=verdict,
        timings=Timings(),
        started_unix_s=0.0,
    )


@pytest.mark.parametrize("key", ["step12/t7", "k", "", "a" * 500, "ä/\0\n", ".."])
def test_a_name_follows_from_run_and_key(key: str) -> None:
    """The same everywhere, fit for a file and an id, and its members' ids are read back whatever the key is."""
    name = group_name("grpo 7", key)
    assert name == group_name("grpo 7", key)
    assert name.isascii() and len(member_id(name, 99999, 99)) < 100
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
    assert member_of(member_id(name, 15, 2)) == (name, 15, 2)


def test_threads_see_every_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask at once, none is told that there is no verdict while another one reads it."""
    ids = [f"k-{index}-0" for index in range(200)]
    writer = folder(tmp_path)
    for rollout_id in ids:
        writer.add(record(rollout_id))
    read = module.Lines.new

    def slowly(lines: Lines[object]) -> list[object]:
        found = read(lines)
        time.sleep(0.01)
        return found

    monkeypatch.setattr(module.Lines, "new", slowly)
    with ThreadPoolExecutor(16) as threads:
        for _ in range(3):
            assert list(threads.map(folder(tmp_path).verdict, ids)) == [SCORED] * len(ids)


def test_other_runs_and_keys_have_other_names() -> None:
    """Also where what is readable of them is the same."""
    names = {group_name(run_id, key) for run_id in ("a", "a/", "b") for key in ("k", "k/", "k-", "k" * 100, "k" * 101)}
    assert len(names) == 15


@pytest.mark.parametrize("rollout_id", ["", "x", "x-1", "x-1-b", "-1-1"])
def test_what_is_no_members_id_is_not_found(rollout_id: str) -> None:
    """An id of another kind names no rollout of a run."""
    with pytest.raises(NotFound):
        member_of(rollout_id)


def test_a_group_is_claimed_once(tmp_path: Path) -> None:
    """Whoever asks with the same task and size has the same group; another is a conflict, for every process."""
    one, two = folder(tmp_path), folder(tmp_path)
    first = one.claim("g1", "k1", 4, task())
    assert two.claim("g1", "k1", 4, task()) == first
    assert (two.claim("g2", "k2", 4, task(1)).group_index, two.group("g1")) == (1, first)
    with pytest.raises(Conflict, match="another task"):
        two.claim("g1", "k1", 4, task(1))
    with pytest.raises(Conflict, match="another size"):
        two.claim("g1", "k1", 5, task())
    with pytest.raises(NotFound, match="g3"):
        one.group("g3")


def test_a_task_is_written_once_whoever_claims_it(tmp_path: Path) -> None:
    """So that a finished run can be graded again from its folder; a name stands for one task."""
    one, two = folder(tmp_path), folder(tmp_path)
    one.claim("g1", "k1", 4, task())
    two.claim("g2", "k2", 4, task())
    two.claim("g3", "k3", 4, task(1))
    assert read_tasks(tmp_path) == [task(), task(1)]


def test_every_process_sees_the_others_verdicts(tmp_path: Path) -> None:
    """As soon as they are written, and again in a folder that is opened later."""
    one, two = folder(tmp_path), folder(tmp_path)
    assert two.verdict("r1") is None
    one.add(record("r1"))
    assert two.verdict("r1") == SCORED
    two.add(record("r2"))
    assert [folder(tmp_path).verdict(name) for name in ("r1", "r2", "r3")] == [SCORED, SCORED, None]
    assert [row.rollout_id for row in read_rollouts(tmp_path)] == ["r1", "r2"]


def test_what_a_killed_writer_left_of_a_line_is_cut(tmp_path: Path) -> None:
    """No reader takes it for a line, and the next writer's stands by itself."""
    one = folder(tmp_path)
    one.add(record("r1"))
    whole = (tmp_path / ROLLOUTS).read_bytes()
    with (tmp_path / ROLLOUTS).open("ab") as file:
        file.write(b'{"rollout_id": "' + b"x" * 200_000)
    assert one.verdict("r2") is None
    folder(tmp_path).add(record("r2"))
    assert (tmp_path / ROLLOUTS).read_bytes().startswith(whole)
    assert [one.verdict(name) for name in ("r1", "r2")] == [SCORED, SCORED]


WRITER = """
import sys
from pathlib import Path
from barchan.rollout.shared import Lines
lines = Lines(Path(sys.argv[1]), dict)
for number in range(200):
    lines.append({"from": sys.argv[2], "number": number, "filling": "x" * 5000})
"""


def test_processes_do_not_mix_their_lines(tmp_path: Path) -> None:
    """Four that write at once: every line is whole, and each process's are in its order."""
    path = tmp_path / "lines"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(name)]) for name in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    lines = Lines(path, dict).new()
    for name in range(4):
        assert [line["number"] for line in lines if line["from"] == str(name)] == list(range(200))
    assert len(lines) == 800


def test_a_file_that_another_run_holds_is_a_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds its lock for good is no process of this run."""
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.05)
    one = folder(tmp_path)
    with Lines(tmp_path / ROLLOUTS, dict).locked(), pytest.raises(Conflict, match="does not let go"):
        one.add(record("r1"))


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    """One folder, one run; and a file is no folder. What is told apart by is the folder's own."""
    assert folder(tmp_path / "out").salt == folder(tmp_path / "out").salt != folder(tmp_path / "other").salt
    assert read_run(tmp_path / "out").run_id == "r"
    with pytest.raises(InvalidSpec, match="'r'"):
        folder(tmp_path / "out", "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSpec, match="folder"):
        folder(tmp_path / "file")


def test_a_line_that_is_none_is_told(tmp_path: Path) -> None:
    """A whole line that is no record is somebody's doing, not a crash: it is not passed over."""
    one = folder(tmp_path)
    (tmp_path / ROLLOUTS).write_bytes(b"nonsense\n")
    with pytest.raises(InvalidSpec, match=ROLLOUTS):
        one.verdict("r1")


def test_a_log_is_begun_or_taken_over(tmp_path: Path) -> None:
    """The second who asks has it from then on; what its head was is known before anything is written."""
    one, two = folder(tmp_path), folder(tmp_path)
    job = Job("g-0-0", task(), 0)
    assert not one.has_log("g-0-0")
    first = one.log(job)
    first.entry("note", {})
    head_hash = first.head_hash
    assert one.has_log("g-0-0")
    first.entry("note", {})
    with pytest.raises(Conflict, match="gone on"):
        two.log_as_of("g-0-0", head_hash)
    first.check()
    head_hash = first.head_hash
    second = two.log_as_of("g-0-0", head_hash)
    assert second.found_hash == head_hash
    with pytest.raises(Conflict):
        first.check()
    first.close()
    second.close()
    path = log_path(tmp_path, "g-0-0")
    path.write_bytes(path.read_bytes().replace(b'"note"', b'"nope"'))
    with pytest.raises(BlobCorrupt, match="g-0-0"):
        two.log(job)


def test_a_broken_group_file_is_told(tmp_path: Path) -> None:
    """With its name."""
    one = folder(tmp_path)
    one.claim("g1", "k1", 4, task())
    (tmp_path / "groups/g1.json").write_bytes(msgspec.json.encode({"key": "k1"}))
    with pytest.raises(InvalidSpec, match=r"g1\.json"):
        one.claim("g1", "k1", 4, replace(task(), instruction="x"))
