"""`barchan trajectory`, from the command line to the exit code."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from barchan.cli.main import main
from barchan.trajectory.reader import verify
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.trajectory.logs import header, new_log, write_rollout


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two logs, of which the second is unfinished, and files that are none."""
    with new_log(tmp_path, "r-000000") as log:
        write_rollout(log)
    with new_log(tmp_path, "r-000001") as log:
        log.intent("exec", {"command": "make"})
    (tmp_path / "rollouts.jsonl").write_text("{}\n")
    return tmp_path


def first(run: Path) -> Path:
    return run / "trajectories" / "r-000000.trajectory.jsonl"


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"turn 1", b"turn 2"))


def test_show_of_a_log(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log is told turn by turn: commands with exit codes, model calls with token counts."""
    assert main(["trajectory", "show", str(first(run))]) == 0
    out = capsys.readouterr().out
    assert "exec: ls -> exit code 1, " in out
    assert "model: 54 tokens in, 3 out, " in out
    assert "verdict: scored, completed, reward 1.0" in out


def test_show_cuts_long_outputs_and_steers_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a long output a few lines are shown, all with --full; no control character of a guest comes through."""
    with new_log(tmp_path) as log:
        seq = log.intent("exec", {"command": "\x1b[2Jseq"})
        log.result(seq, {"exit_code": 0, "stdout": b"".join(b"\x1b[31mline %d\n" % line for line in range(100))})
    assert main(["trajectory", "show", str(log.path)]) == 0
    out = capsys.readouterr().out
    assert ("line 5\n" in out, "line 50\n" in out, "... 88 lines more ..." in out) == (True, False, True)
    assert "\x1b" not in out
    assert main(["trajectory", "show", "--full", str(log.path)]) == 0
    assert "line 50\n" in capsys.readouterr().out


def test_show_keeps_the_lines_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As they were indented, in one column below each other."""
    with new_log(tmp_path) as log:
        seq = log.intent("exec", {"command": "cat >a.py <<E\nif x:\n    y()\n\tz()\nE"})
        log.result(seq, {"exit_code": 0})
    assert main(["trajectory", "show", str(log.path)]) == 0
    _, first, *more = capsys.readouterr().out.splitlines()
    column = first.index("exec: ") + 2
    assert first[column - 2 :] == "exec: cat >a.py <<E"
    assert [line[:column] for line in more] == [" " * column] * 4
    assert [line[column:] for line in more[:3]] == ["if x:", "    y()", " z()"]
    assert more[3][column:].startswith("E -> exit code 0, ")


def test_replay_of_a_rollout_that_is_not_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some that are there are named."""
    assert main(["trajectory", "replay", str(run), "--rollout", "r-1"]) == 1
    assert "has no log of a rollout 'r-1'; there are: r-000000, r-000001 (try: " in capsys.readouterr().err


def test_show_of_a_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder is a table with a line per rollout, or JSON."""
    assert main(["trajectory", "show", str(run)]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:5] == ["ROLLOUT", "TASK", "TURNS", "TOOLS", "EXECS"]
    assert [row.split()[0] for row in rows] == ["r-000000", "r-000001"]
    assert main(["trajectory", "show", str(run), "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert [(one["rollout_id"], one["reward"], one["open_intents"]) for one in told] == [
        ("r-000000", 1.0, []),
        ("r-000001", None, [1]),
    ]


def test_show_tells_what_a_killed_writer_left(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Intents without a result and a torn last line are said."""
    log = run / "trajectories" / "r-000001.trajectory.jsonl"
    log.write_bytes(log.read_bytes() + b'{"seq":2')
    assert main(["trajectory", "show", str(log)]) == 0
    out = capsys.readouterr().out
    assert "no result in the log for: 1\n" in out
    assert "killed in an entry: 8 bytes" in out


def test_verify_names_file_and_entry(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Good logs give 0; one changed byte gives 1, and the file and the entry by name."""
    assert main(["trajectory", "verify", str(run)]) == 0
    assert capsys.readouterr().out.startswith("2 logs, 22 entries: 0 broken, 0 torn at the end, 1 intents")
    damage(first(run))
    assert main(["trajectory", "verify", str(run)]) == 1
    assert f"{first(run)}: entry 9: the hash does not match the line" in capsys.readouterr().err
    assert main(["trajectory", "verify", str(first(run)), "--json"]) == 1
    (found,) = msgspec.json.decode(capsys.readouterr().out)
    assert (found["ok"], found["bad_seq"], found["entries"]) == (False, 9, 9)


def test_verify_holds_logs_to_the_results_of_their_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log that was cut behind a whole entry, or is gone, is found by its row, in the folder and alone."""
    (run / "rollouts.jsonl").write_bytes(
        msgspec.json.encode({"rollout_id": "r-000000", "head_hash": verify(first(run)).head_hash}) + b"\n"
    )
    assert main(["trajectory", "verify", str(run)]) == main(["trajectory", "verify", str(first(run))]) == 0
    first(run).write_bytes(b"".join(first(run).read_bytes().splitlines(keepends=True)[:-1]))
    assert main(["trajectory", "verify", str(run)]) == main(["trajectory", "verify", str(first(run))]) == 1
    assert f"{first(run)}: entry 19: the log ends before the entry that was its last" in capsys.readouterr().err
    first(run).unlink()
    assert main(["trajectory", "verify", str(run)]) == 1
    assert f"{first(run)}: it is gone" in capsys.readouterr().err


def test_export_as_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """jsonl has a line per entry of every log, with its rollout, readable bytes and whole token ids."""
    assert main(["trajectory", "export", str(run), "--format", "jsonl"]) == 0
    lines = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["rollout_id"] for line in lines] == ["r-000000"] * 20 + ["r-000001"] * 2
    prompts = [line["body"]["prompt_ids"] for line in lines if "prompt_ids" in line["body"]]
    assert prompts == [[*range(1000, 1050)], [*range(1000, 1050), 0, 7, 8, 9]]
    assert lines[6]["body"] == {"exit_code": 0, "stdout": "out\n", "stderr": "\N{REPLACEMENT CHARACTER}"}


def test_export_as_atif(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log becomes one document, a folder one file per rollout, for which a folder must be named."""
    assert main(["trajectory", "export", str(first(run)), "--format", "atif"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["trajectory_id"] == "r-000000"
    assert main(["trajectory", "export", str(run), "--format", "atif"]) == 2
    assert "give --out FOLDER" in capsys.readouterr().err
    out = run / "made" / "atif"
    assert main(["trajectory", "export", str(run), "--format", "atif", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["r-000000.json", "r-000001.json"]


def test_what_a_log_calls_itself_names_no_file(run: Path) -> None:
    """A log that somebody else has made can't have a file written beside the folder that was asked for."""
    foreign = run / "trajectories" / "foreign.trajectory.jsonl"
    with TrajectoryWriter.create(foreign, replace(header(), rollout_id="../../out-of-it")):
        pass
    out = run / "made" / "atif"
    assert main(["trajectory", "export", str(run), "--format", "atif", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["foreign.json", "r-000000.json", "r-000001.json"]
    assert not list(run.rglob("out-of-it*"))


def test_one_broken_log_hides_no_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder, the others are told of all the same, and the exit code says that one is broken."""
    damage(first(run))
    assert main(["trajectory", "show", str(run)]) == 1
    told = capsys.readouterr()
    assert "r-000001" in told.out
    assert f"{first(run)}: entry 9" in told.err


def test_export_as_trace(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """chrome is one file for all rollouts; with --json the command says what it wrote."""
    out = run / "trace.json"
    assert main(["trajectory", "export", str(run), "--format", "chrome", "--out", str(out), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out) == {"logs": 2, "format": "chrome", "out": str(out)}
    events = msgspec.json.decode(out.read_bytes())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}


@pytest.mark.parametrize("command", [["show"], ["verify"], ["export", "--format", "jsonl"]])
def test_where_no_log_is(tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without logs and a missing file are named, in every command."""
    for path in (tmp_path, tmp_path / "none"):
        assert main(["trajectory", *command, str(path)]) == 1
        assert "there is no trajectory log" in capsys.readouterr().err


def test_broken_logs_are_not_exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Show and export stop at a break with a typed error that names it."""
    damage(first(run))
    for command in (["show"], ["export", "--format", "chrome"]):
        assert main(["trajectory", *command, str(first(run))]) == 3
        assert "entry 9: the hash does not match" in capsys.readouterr().err


def test_an_output_that_cannot_be_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in the place of a folder is a typed error."""
    (run / "file").write_text("")
    arguments = ["trajectory", "export", str(run), "--format", "jsonl", "--out", str(run / "file" / "x")]
    assert main(arguments) == 3
    assert "can't be written" in capsys.readouterr().err


def test_a_log_of_two_writers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log that was taken over shows and exports like any other."""
    with TrajectoryWriter.reopen(first(run)) as log:
        log.entry("note", {"text": "again"})
    assert main(["trajectory", "show", str(first(run))]) == 0
    assert "note: text=again" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["show", "verify", "export"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command explains itself with an example that names it, in lines that fit a terminal."""
    assert main(["trajectory", command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"    barchan trajectory {command} " in text
    assert max(len(line) for line in text.splitlines()) <= 80
