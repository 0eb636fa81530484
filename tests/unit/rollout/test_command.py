"""The command's own part: options that don't fit together, and what a person sees."""

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from barchan.cli import rollout_report
from barchan.cli.main import main
from barchan.cli.rollout_policy import PolicyOptions, limited
from barchan.cli.rollout_report import Progress, print_summary
from barchan.rollout.summary import Tally
from tests.unit.rollout.fakes import task
from tests.unit.rollout.test_summary import ONE, VOID, ZERO, record

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    "words",
    [
        ["--policy", "chat"],
        ["--policy", "chat", "--model", "m"],
        ["--policy", "chat", "--base-url", "ftp://x", "--model", "m"],
        ["--policy", "oracle", "--model", "m"],
        ["--policy", "guess"],
        ["--policy", "no.such.module:Policy"],
        ["--policy", "barchan.rollout.task:TOOLS"],
        ["--policy", "barchan.rollout.task:Task"],
        ["--policy", "barchan.rollout.limits:Limits"],
        ["--policy", "script"],
        ["--policy", "script", "--script", "missing.json"],
        ["--policy", "oracle", "--script", "s.json"],
        ["--policy", "oracle", "--seed", "1"],
        ["--max-turns", "0"],
        ["--max-tokens", "0"],
        ["--group", "0"],
        ["--over-sample", "-1"],
        ["--refill", "-1"],
        ["--graders", "0"],
        ["--priority", "101"],
        ["--tool-format", "text"],
        ["--turn-tokens", "5"],
        ["--policy", "chat", "--base-url", "http://x", "--model", "m", "--tool-format", "xml"],
        ["--task", "HumanEval/0", "--task", "HumanEval/999"],
        ["--repos", "."],
        ["--base", "a=b"],
        ["--base", "a"],
        ["--out", "r", "--resume", "r"],
        ["--limit", "-3"],
    ],
)
def test_options_that_do_not_fit_are_wrong_usage(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, exit code 2, and no folder is made."""
    monkeypatch.chdir(tmp_path)
    assert main(["rollout", "humaneval", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        ("nothing", "no task set 'nothing'; give humaneval, a folder"),
        ("swe:", "no task set"),
        ("swe:missing.jsonl", "missing.jsonl"),
        ("missing.py", "missing.py"),
        ("no.such.module:tasks", "no.such.module"),
        ("empty", "empty"),
    ],
)
def test_a_set_that_can_not_be_used_is_told_before_anything_starts(
    tasks: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr names it; no run's folder is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["rollout", tasks]) in (1, 2)
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_tasks_of_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids tell tasks apart, so there can't be two of one."""
    (tmp_path / "twice.py").write_text(
        "from tests.unit.rollout.fakes import task\n\n\ndef tasks():\n    return [task(0), task(0)]\n"
    )
    assert main(["rollout", str(tmp_path / "twice.py"), "--out", str(tmp_path / "r")]) == 1
    assert "Fake/0" in capsys.readouterr().err


def test_an_oracle_needs_a_known_good_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of every task, and that is known before the run."""
    (tmp_path / "bare.py").write_text(
        "from tests.unit.rollout.fakes import task\n\n\ndef tasks():\n    return [task(0), task(1, oracle=())]\n"
    )
    assert main(["rollout", str(tmp_path / "bare.py"), "--out", str(tmp_path / "r")]) == 2
    assert "Fake/1 has no known-good attempt" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("words", "turns", "tokens"),
    [
        ({"policy": "chat"}, (1, 50), (512, 65536)),
        ({"policy": "mine:Policy"}, (50, 50), (25600, 65536)),
        ({"policy": "chat", "max_turns": 4}, (4, 4), (2048, 65536)),
        ({"policy": "chat", "max_turns": 4, "max_tokens": 100}, (4, 4), (100, 100)),
    ],
)
def test_limits_are_the_tasks_unless_asked_for(
    words: dict[str, Any], turns: tuple[int, int], tokens: tuple[int, int]
) -> None:
    """A task that asks for one function has one turn, for who needs no more; the options overrule everything."""
    given = limited([task(0), task(1, stub=None)], options(**words))
    assert tuple(item.limits.turns_max for item in given) == turns
    assert tuple(item.limits.tokens_max for item in given) == tokens


def options(**given: Any) -> PolicyOptions:
    names = ("base_url", "model", "seed", "api_key", "script", "max_turns", "max_tokens", "turn_tokens")
    return PolicyOptions(**{**dict.fromkeys(names), "tool_format": "openai", "temperature": 0.0, **given})


@pytest.mark.parametrize("script", ["[]", '{"HumanEval/9": []}', '{"HumanEval/9": [{"name": "submit"}]}'])
def test_a_script_without_a_line_for_a_task_is_refused(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle does not play in its place."""
    (tmp_path / "s.json").write_text(script)
    words = ["--limit", "1", "--policy", "script", "--script", str(tmp_path / "s.json"), "--out", str(tmp_path / "r")]
    assert main(["rollout", "humaneval", *words]) == 2
    assert "nothing for task HumanEval/0" in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--out` of an earlier run is wrong usage: nothing is written over."""
    (tmp_path / "rollouts.jsonl").write_text("earlier\n")
    assert main(["rollout", "humaneval", "--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err
    assert (tmp_path / "rollouts.jsonl").read_text() == "earlier\n"


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live counts, rate, time left and what goes on go to stderr, at most one line in so many seconds."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(rollout_report, "LINE_EVERY_S", 0.0)
    tally = Tally()
    progress = Progress(tally)
    with progress.shown(3, lambda: "2 at work"):
        progress.update()
        for verdict in (ONE, ZERO, VOID):
            tally.add(record(verdict))
            progress.update()
            monkeypatch.setattr(rollout_report, "LINE_EVERY_S", 3600.0)
        progress.say("task a can't be set up:\nno image")
    first, second, third, said = errors.getvalue().splitlines()
    assert first == "0/3 rollouts: 0 scored, 0 void, mean reward -; 2 at work"
    assert re.fullmatch(r"1/3 rollouts: 1 scored, 0 void, mean reward 1\.000; [\d.]+/s, \d+s left; 2 at work", second)
    assert third.startswith("2/3 rollouts: 2 scored, 0 void, mean reward 0.500; ")
    assert said == "task a can't be set up: no image"


def test_the_table_says_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts, mean with what voiding could change, groups, causes, times and where the results are."""
    tally = Tally()
    for verdict in (ONE, ZERO, VOID):
        tally.add(record(verdict))
    tally.add(record(ONE, "easy"))
    summary = tally.summary(run_id="r", task_set="s", policy="p", wanted=4, wall_s=1.0, out="runs/x")
    print_summary(summary, tally.rows)
    shown = capsys.readouterr().out
    for words in (
        "3 scored, 1 void",
        "0.6667",
        "0.5000 to 0.7500",
        "1 mixed",
        "boot_failure",
        "exec_timeout",
        "runs/x",
    ):
        assert words in shown
    tasks = [line.split()[0] for line in shown.splitlines()[-2:]]
    assert tasks == ["a", "easy"]  # the worst first


def test_many_tasks_are_cut_to_the_worst(capsys: pytest.CaptureFixture[str]) -> None:
    """The table stays readable, and says that there are more."""
    tally = Tally()
    for number in range(40):
        tally.add(record(ZERO if number == 39 else ONE, f"task{number}"))
    print_summary(tally.summary(run_id="r", task_set="s", policy="p", wanted=40, wall_s=1.0, out="o"), tally.rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "the worst 30 of 40 tasks; tasks.json has them all"
    assert lines[-31].startswith("task39")
