"""The command's own part: options that don't fit together, and what a person sees."""

import io
import sys
from pathlib import Path

import pytest

from barchan.cli import rollout_report
from barchan.cli.main import main
from barchan.cli.rollout_report import Progress, print_summary
from barchan.rollout.summary import Tally
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


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--out` of an earlier run is wrong usage: nothing is written over."""
    (tmp_path / "rollouts.jsonl").write_text("earlier\n")
    assert main(["rollout", "humaneval", "--out", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err
    assert (tmp_path / "rollouts.jsonl").read_text() == "earlier\n"


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live counts go to stderr, at most one line in so many seconds."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(rollout_report, "LINE_EVERY_S", 0.0)
    tally = Tally()
    with Progress(3, tally) as progress:
        for verdict in (ONE, ZERO, VOID):
            tally.add(record(verdict))
            progress.update()
            monkeypatch.setattr(rollout_report, "LINE_EVERY_S", 3600.0)
    assert errors.getvalue().splitlines() == [
        "1/3 rollouts: 1 scored, 0 void, mean reward 1.000",
        "2/3 rollouts: 2 scored, 0 void, mean reward 0.500",
    ]


def test_the_table_says_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts, mean with what voiding could change, groups, causes, times and where the results are."""
    tally = Tally()
    for verdict in (ONE, ZERO, VOID):
        tally.add(record(verdict))
    print_summary(tally.summary(run_id="r", task_set="s", policy="p", not_started=0, wall_s=1.0, out="runs/x"))
    shown = capsys.readouterr().out
    for words in (
        "2 scored, 1 void",
        "0.5000",
        "0.3333 to 0.6667",
        "1 mixed",
        "boot_failure",
        "exec_timeout",
        "runs/x",
    ):
        assert words in shown
