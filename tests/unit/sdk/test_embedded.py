"""Joining and starting a user's own node, with a stand-in for `python -m barchan.node`."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import barchan
from barchan.errors import BackendError, ConnectTimeout, InvalidSpec, RequirementMissing
from barchan.sdk import embedded
from barchan.sdk.embedded import ensure_node
from tests.leaks import parent_of

# Stands in for the node's module: says ready, serves, and appends its pid to `started`.
STAND_IN = """
import os, sys, time
state_dir, ready = sys.argv[sys.argv.index("--state-dir") + 1], int(sys.argv[sys.argv.index("--ready-fd") + 1])
with open(state_dir + "/started", "a") as started:
    started.write(f"{os.getpid()} {os.getsid(0)} {os.getcwd()}\\n")
%s
"""
SERVE = """
from pathlib import Path
from tests.unit.sdk.fake_node import FakeNode
node = FakeNode(Path(state_dir))
node.start()
os.write(ready, b"ready\\n")
os.close(ready)
node._thread.join()
"""


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "state"
    yield folder
    for pid in pids(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def pids(folder: Path) -> list[int]:
    started = folder / "started"
    return [int(line.split()[0]) for line in started.read_text().splitlines()] if started.exists() else []


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An interpreter that runs the stand-in instead of `-m barchan.node`; its text decides what the node does."""
    script, interpreter = tmp_path / "node.py", tmp_path / "python"
    script.write_text(STAND_IN % SERVE)
    root, real = Path(barchan.__file__).parents[2], sys.executable
    interpreter.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "-m barchan.node" ] || exec {real} "$@"\n'
        f'PYTHONPATH={root}:{root}/src exec {real} {script} "$@"\n'
    )
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    yield script


def test_the_node_is_a_process_of_its_own(stand_in: Path, state_dir: Path) -> None:
    """It is nobody's child, has a session that isn't ours, and the directory is the user's alone."""
    ensure_node(str(state_dir))
    pid, session, cwd = (state_dir / "started").read_text().split()
    assert (int(session) != os.getsid(0), cwd, state_dir.stat().st_mode & 0o777) == (True, "/", 0o700)
    assert parent_of(int(pid)) != os.getpid()
    ensure_node(str(state_dir))
    assert len(pids(state_dir)) == 1
    os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(ChildProcessError):
        os.waitpid(int(pid), os.WNOHANG)


def test_32_processes_share_one_node(stand_in: Path, state_dir: Path) -> None:
    """Of callers at the same time one starts it, and all get a working one."""
    code = textwrap.dedent(f"""
        import sys, barchan
        sys.executable = {sys.executable!r}
        with barchan.connect(state_dir={str(state_dir)!r}) as client:
            print(client.node_info().node_id)
    """)
    root = Path(barchan.__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}/src"}
    python = stand_in.parent / "python"
    running = [
        subprocess.Popen([str(python), "-c", code], stdout=subprocess.PIPE, env=env, text=True) for _ in range(32)
    ]
    assert [process.communicate(timeout=90)[0] for process in running] == ["fake\n"] * 32
    assert len(pids(state_dir)) == 1


def test_a_node_that_ended_is_started_again_by_the_next_call(stand_in: Path, state_dir: Path) -> None:
    """A client whose embedded node is gone (its socket too, or left behind) starts another without being asked."""
    with barchan.connect(state_dir=state_dir) as client:
        os.kill(pids(state_dir)[0], signal.SIGKILL)
        assert client.node_info().node_id == "fake"
        assert len(pids(state_dir)) == 2
        os.kill(pids(state_dir)[1], signal.SIGKILL)
        (state_dir / "node.sock").unlink()
        assert client.node_info().node_id == "fake"
        assert len(pids(state_dir)) == 3


def test_what_the_node_says_is_raised(stand_in: Path, state_dir: Path) -> None:
    """A node that refuses to start sends its error; one that dies is quoted from its log."""
    body = '{"code":"requirement_missing","message":"no user namespaces: sysctl ..."}'
    stand_in.write_text(STAND_IN % f"os.write(ready, {body.encode()!r} + b'\\n')")
    with pytest.raises(RequirementMissing, match="no user namespaces"):
        ensure_node(str(state_dir))
    stand_in.write_text(STAND_IN % "sys.exit('it broke')")
    with pytest.raises(BackendError, match="it broke"):
        ensure_node(str(state_dir))


def test_a_node_that_is_still_ending_is_waited_for(stand_in: Path, state_dir: Path) -> None:
    """The old node no longer listens but holds the directory: starting is tried until it has let go."""
    conflict = b'{"code":"conflict","message":"another node runs"}'
    stand_in.write_text(
        STAND_IN
        % f"""
if len(open(state_dir + "/started").readlines()) < 3:
    os.write(ready, {conflict!r} + b"\\n")
    sys.exit(1)
"""
        + SERVE
    )
    ensure_node(str(state_dir))
    assert len(pids(state_dir)) == 3


def test_a_node_that_never_gets_ready_is_given_up(
    stand_in: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for it is bounded."""
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 1.0)
    stand_in.write_text(STAND_IN % "time.sleep(60)")
    with pytest.raises(ConnectTimeout):
        ensure_node(str(state_dir))


def test_a_state_directory_that_can_not_be_one_is_told(tmp_path: Path) -> None:
    """A file in its place is InvalidSpec."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSpec):
        ensure_node(str(tmp_path / "file"))
