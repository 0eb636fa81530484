"""A log told while it is written, and where the policy's version changed."""

from pathlib import Path

import msgspec
import pytest

from barchan.cli.main import main
from barchan.errors import BlobCorrupt
from barchan.trajectory.format import Kind
from barchan.trajectory.reader import Following, load
from barchan.trajectory.story import Teller, account, follow, story
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.trajectory.logs import new_log, write_rollout


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_what_is_told_as_it_comes_is_what_is_told_at_the_end(tmp_path: Path, size: int) -> None:
    """However many entries come at once: the same lines, in the same order, each once."""
    with new_log(tmp_path) as log:
        write_rollout(log, turns=3)
    whole = load(log.path)
    teller, told = Teller(), []
    for start in range(0, len(whole.entries), size):
        told += teller.tell(whole.entries[start : start + size])
    assert teller.is_over
    assert told == story(whole)


def test_following_ends_with_the_verdict(tmp_path: Path) -> None:
    """Lines come while the writer is at work; half an entry waits for its end, a later writer's goes on behind it."""
    log = new_log(tmp_path)

    def half() -> None:
        with log.path.open("ab") as file:
            file.write(b'{"seq":')

    def later(kind: Kind, body: dict[str, str]) -> None:
        with TrajectoryWriter.reopen(log.path) as other:
            other.entry(kind, body)

    steps = [
        lambda: log.entry("message", {"role": "user", "content": "a"}),
        half,
        lambda: later("message", {"role": "user", "content": "b"}),
        lambda: later("verdict", {"status": "void"}),
    ]

    def pause() -> None:
        steps.pop(0)()

    told = [line.text for line in follow(log.path, pause)]
    assert told == ["user:", "user:", "verdict: void, "]
    assert steps == []
    log.close()


def test_a_break_is_found_while_following(tmp_path: Path) -> None:
    """What was read before is not read again; a line that does not continue it is refused."""
    with new_log(tmp_path) as log:
        reading = Following(log.path)
        assert len(reading.new()) == 1
        log.entry("note", {})
        assert [entry.seq for entry in reading.new()] == [1]
        with log.path.open("ab") as file:
            file.write(log.path.read_bytes().splitlines(keepends=True)[1])
        with pytest.raises(BlobCorrupt, match="entry 2"):
            reading.new()


def switching(folder: Path) -> TrajectoryWriter:
    log = new_log(folder)
    for version in (3, 3, None, 4, "4", 5):
        log.entry("model_call", {"text": "x", "policy_version": version})
    grade = log.intent("grade", {})
    log.entry("model_call", {"text": "judge", "policy_version": 9})
    log.result(grade, {})
    log.entry("verdict", {"status": "scored", "reward": 1.0})
    return log


def test_a_switch_of_the_policy_is_told(tmp_path: Path) -> None:
    """Before the call that another version answered; a judge's version and calls without one are none."""
    switching(tmp_path).close()
    log = load(next(tmp_path.rglob("*.jsonl")))
    told = [(line.seq, line.text) for line in story(log) if line.text.startswith("policy switch")]
    assert told == [(4, "policy switch: from version 3 to 4"), (6, "policy switch: from version 4 to 5")]
    assert account(log).policy_switches == 2
    teller, lines = Teller(), []
    for entry in log.entries:
        lines += teller.tell([entry])
    assert lines == story(log)


def test_follow_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log that is over is told whole, as `show` does; with --json a line each; a folder is refused."""
    path = switching(tmp_path).path
    assert main(["trajectory", "show", str(path), "--follow"]) == 0
    assert "policy switch: from version 3 to 4" in capsys.readouterr().out
    assert main(["trajectory", "show", str(path), "--follow", "--json"]) == 0
    assert [msgspec.json.decode(line)["seq"] for line in capsys.readouterr().out.splitlines()][-1] == 10
    assert main(["trajectory", "show", str(tmp_path), "--follow"]) == 2
    assert "--follow is of one log" in capsys.readouterr().err
