"""What commands share: global options, addresses, tokens, text fit for a terminal."""

import os
import sys
from pathlib import Path

import pytest

from barchan.cli.common import (
    Common,
    hint_of,
    hoist_globals,
    human_age,
    human_bytes,
    key_values,
    one_line,
    print_table,
)
from barchan.errors import BY_CODE, Denied, ExecFailed, InvalidSpec, NotFound, from_wire
from barchan.sdk.endpoint import SYSTEM_STATE_DIR, default_state_dir, endpoint_of


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BARCHAN_URL", "BARCHAN_TOKEN", "BARCHAN_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ""),
        ("ps", "ps"),
        ("--json ps", "ps --json"),
        ("--url http://x ps --label a=b", "ps --label a=b --url http://x"),
        ("--url=http://x --json image list", "image list --url=http://x --json"),
        ("--state-dir /x run t -- ls --json", "run t --state-dir /x -- ls --json"),
        ("--json", "--json"),
        ("--url", "--url"),
        ("--other ps", "--other ps"),
    ],
)
def test_leading_global_options_move_behind_the_command(given: str, expected: str) -> None:
    """But never behind `--`, where they would be the guest's."""
    assert hoist_globals(given.split()) == expected.split()


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Address: --url, then --state-dir, then BARCHAN_URL, then BARCHAN_STATE_DIR, then the default."""
    assert Common().connection == {"state_dir": default_state_dir()}
    monkeypatch.setenv("BARCHAN_STATE_DIR", "/env")
    assert Common().connection == {"state_dir": Path("/env")}
    monkeypatch.setenv("BARCHAN_URL", "http://env:1")
    monkeypatch.setenv("BARCHAN_TOKEN", "t" * 20)
    assert Common().connection == {"url": "http://env:1", "token": "t" * 20}
    assert Common(state_dir=Path("/option")).connection == {"state_dir": Path("/option")}
    assert Common(url="http://option:1").connection == {"url": "http://option:1", "token": "t" * 20}
    (tmp_path / "token").write_text("from-file\n")
    assert Common(token_file=tmp_path / "token").connection["token"] == "from-file"
    with pytest.raises(InvalidSpec, match="not both"):
        _ = Common(url="http://x:1", state_dir=Path("/x")).connection
    assert Common(state_dir=Path("relative")).local_state_dir == Path.cwd() / "relative"
    monkeypatch.setenv("BARCHAN_STATE_DIR", "")
    assert Common().local_state_dir == SYSTEM_STATE_DIR if os.geteuid() == 0 else Path.home() / ".local/share/barchan"


def test_a_program_finds_the_node_that_commands_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """`barchan.connect()` looks at BARCHAN_STATE_DIR, too; an argument wins over it."""
    monkeypatch.setenv("BARCHAN_STATE_DIR", "relative")
    assert endpoint_of(None, None).state_dir == str(Path.cwd() / "relative")
    assert endpoint_of(None, "/given").state_dir == "/given"


def test_words_become_a_mapping() -> None:
    """Only the first `=` separates; a word without one, or without a key, is refused naming the option."""
    assert key_values(["a=1", "b=x=y", "c="], "--env") == {"a": "1", "b": "x=y", "c": ""}
    for word in ("a", "=1", ""):
        with pytest.raises(InvalidSpec, match="--env"):
            key_values([word], "--env")


def test_a_message_cannot_steer_the_terminal() -> None:
    """Control characters, escapes and line ends become blanks."""
    assert one_line("a\x1b[31mb\r\nc\x07\u202e\t d") == "a [31mb c d"


def test_every_error_has_a_next_step() -> None:
    """Unless it is the guest's or the task's own failure."""
    for code, kind in BY_CODE.items():
        assert bool(hint_of(from_wire(code, "x", {}), "ps")) == (kind.fault not in ("policy", "task"))
    assert hint_of(ExecFailed("x"), "run") == ""


def test_sizes_and_ages_are_short() -> None:
    """Bytes in binary units, ages in the largest unit that gives at least two."""
    assert [human_bytes(n) for n in (0, 1023, 1536, 56_692_736, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "54.1 MiB",
        "3.0 GiB",
    ]
    assert [human_age(s) for s in (0, 119.9, 120, 7199, 7200, 172_800)] == ["0s", "119s", "2m", "119m", "2h", "2d"]


def test_a_table_is_cut_on_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets whole rows; a terminal gets one line a row; no rows give the hint."""
    print_table(["A", "B"], [["x", "y" * 200], ["longer", "z\n"]], empty="none")
    assert capsys.readouterr().out == f"A       B\nx       {'y' * 200}\nlonger  z\n"
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((20, 5)))
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
    print_table(["A", "B"], [["x", "y" * 200]], empty="none")
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [4, 20]
    print_table(["A", "B"], [], empty="none")
    assert capsys.readouterr().out == "none\n"


def test_hints_fit_what_went_wrong() -> None:
    """A token is the remedy only for a wrong token, `ps` only for a sandbox; help is that of the command itself."""
    assert "token" in hint_of(Denied("this node wants its bearer token"), "ps")
    assert "token" not in hint_of(Denied("read /etc/shadow: Permission denied", errno=13), "cp").lower()
    assert "--state-dir" in hint_of(Denied("no access to the state directory"), "ps")
    assert hint_of(NotFound("no sandbox", sandbox_id="sb_x"), "exec") == "barchan ps"
    assert hint_of(NotFound("no image", template="x"), "run") == "barchan image list"
    assert hint_of(NotFound("stat /x: No such file", errno=2), "cp") == "another path"
    assert hint_of(InvalidSpec("x"), "image pull") == "barchan image pull --help"
    assert hint_of(InvalidSpec("x"), "") == "barchan --help"
