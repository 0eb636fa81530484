"""The command line against a real node: one sandbox's life, terminals, interrupts, a node of one's own."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs"), pytest.mark.timeout(120)]

BARCHAN = (sys.executable, "-m", "barchan.cli")


@pytest.fixture
def environment(node: NodeProcess) -> dict[str, str]:
    """What makes the command line use the suite's own node."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("BARCHAN_")}
    return {**kept, "BARCHAN_STATE_DIR": str(node.state_dir), "TERM": "xterm"}


Barchan = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def barchan(environment: dict[str, str]) -> Barchan:
    """Run the program to its end."""

    def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        argv = [*BARCHAN, *arguments]
        return subprocess.run(argv, env=environment, input=stdin, capture_output=True, check=False, timeout=60)

    return run


@pytest.fixture
def kept(barchan: Barchan) -> Iterator[str]:
    """A sandbox that lives on between commands."""
    done = barchan("run", "debian", "--keep", "--ttl-s", "100", "--label", "suite=cli")
    assert done.returncode == 0, done.stderr
    sandbox_id = done.stdout.decode().strip()
    yield sandbox_id
    barchan("kill", sandbox_id)


def test_run_is_the_guest_s_program(barchan: Barchan, node: NodeProcess) -> None:
    """Input, both outputs and the exit code pass; nothing stays."""
    done = barchan("run", "debian", "--", "sh", "-c", "cat; echo bad >&2; exit 5", stdin=b"some\n\xff\0")
    assert (done.returncode, done.stdout, done.stderr) == (5, b"some\n\xff\0", b"bad\n")
    assert barchan("run", "debian", "--", "sh", "-c", "kill -9 $$").returncode == 137
    assert barchan("run", "debian", "--", "/nonexistent").returncode == 127
    assert barchan("run", "debian", "--timeout-s", "0.5", "--", "sleep", "60").returncode == 124
    assert node.wait_empty(10) == []


def test_limits_and_identity_reach_the_guest(barchan: Barchan) -> None:
    """User, directory and variables are as asked for, and the memory limit kills with its evidence."""
    done = barchan(
        "run", "debian", "--user", "root", "--workdir", "/tmp", "--env", "A=1", "--", "sh", "-c", "id -u; pwd; echo $A"
    )
    assert done.stdout.decode().split() == ["0", "/tmp", "1"]
    hungry = ("--", "python3", "-c", "x = b'x' * (200 << 20)")
    done = barchan("run", "debian", "--memory-mib", "64", "--json", *hungry)
    end = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, end["exit_code"], end["process"]["oom_killed"]) == (137, 137, True)


def test_a_kept_sandbox_from_exec_to_kill(barchan: Barchan, kept: str, tmp_path: Path) -> None:
    """exec, cp both ways, ps and kill see the same sandbox."""
    data = os.urandom(3_000_000)
    assert barchan("exec", kept, "--", "cat", stdin=data).stdout == data
    (tmp_path / "in").write_bytes(data)
    assert barchan("cp", str(tmp_path / "in"), f"{kept}:/tmp/").returncode == 0
    assert barchan("exec", kept, "--", "cat", "/tmp/in").stdout == data
    assert barchan("exec", kept, "--", "sh", "-c", "mkdir -p d/e; echo x > d/e/f").returncode == 0
    assert barchan("cp", f"{kept}:d", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out/e/f").read_text() == "x\n"
    listed = json.loads(barchan("ps", "--label", "suite=cli", "--json").stdout)
    assert [info["sandbox_id"] for info in listed] == [kept]
    assert kept in barchan("ps").stdout.decode()
    assert barchan("kill", kept).stdout == b"killed 1\n"
    assert barchan("kill", kept).returncode == 1
    gone = barchan("exec", kept, "--", "true")
    assert gone.returncode == 125
    assert re.fullmatch(rb"error: .*\(try: .*\)\n", gone.stderr)


def test_what_is_wrong_is_said_in_one_line(barchan: Barchan) -> None:
    """An unknown image, and a value the node refuses."""
    for arguments in (("nope",), ("debian", "--memory-mib", "1"), ("debian", "--user", "no such user")):
        done = barchan("run", *arguments, "--", "true")
        assert done.returncode in (125, 126)
        assert done.stderr.count(b"\n") == 1


class Terminal:
    """The program on a terminal of the test's; as a context it is killed on leaving, if it still runs."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execvpe(BARCHAN[0], [*BARCHAN, *arguments], environment)
        self.seen = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def read_until(self, wanted: bytes) -> None:
        deadline = time.monotonic() + 30
        while wanted not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += os.read(self.fd, 4096)
        self.seen = self.seen.split(wanted, 1)[1]

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def exit_code(self) -> int:
        deadline = time.monotonic() + 30
        ended, wstatus = 0, 0
        while not ended:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            ended, wstatus = os.waitpid(self.pid, os.WNOHANG)
        self.pid = 0
        return os.waitstatus_to_exitcode(wstatus)


def test_an_interactive_shell(environment: dict[str, str]) -> None:
    """A prompt, a new size, Ctrl-C for the guest's program, the shell's exit code."""
    with Terminal(environment, "run", "debian", "-t", "--env", "PS1=ready> ", "--", "bash", "--norc") as terminal:
        terminal.read_until(b"ready> ")
        terminal.type(b"tty; echo $((6 * 7))\r")
        terminal.read_until(b"/dev/pts/0\r\n42\r\n")
        subprocess.run(["stty", "rows", "50", "cols", "132"], stdin=terminal.fd, check=True)
        terminal.type(b"until stty size | grep -q '^50 132'; do sleep 0.1; done\r")
        terminal.type(b"sh -c 'stty size; exec sleep 100'\r")  # a job of its own when it answers
        terminal.read_until(b"50 132\r\n")
        terminal.type(b"\x03")
        terminal.read_until(b"^C\r\n")
        terminal.type(b"exit 9\r")
        assert terminal.exit_code() == 9


def test_interrupts_end_a_run_and_its_sandbox(environment: dict[str, str], node: NodeProcess) -> None:
    """The first Ctrl-C is the guest's, the second ends this program; nothing stays."""
    stubborn = "trap 'echo caught' INT; echo up; while :; do sleep 0.1; done"
    argv = [*BARCHAN, "run", "debian", "--", "bash", "-c", stubborn]
    with subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"caught\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert node.wait_empty(15) == []


def test_a_node_in_the_foreground(images: Path, tmp_path: Path) -> None:
    """`up` serves HTTP with a token in a private file; `--url` and curl's own request use it; SIGINT ends it."""
    state_dir = tmp_path / "s"
    state_dir.mkdir(mode=0o700)
    (state_dir / "images").symlink_to(images)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    argv = [*BARCHAN, "up", "--listen", address, "--state-dir", str(state_dir)]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while not (state_dir / "node.sock").exists() or not (state_dir / "token").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        token = state_dir / "token"
        assert token.stat().st_mode & 0o777 == 0o600
        remote = ("--url", f"http://{address}", "--token-file", str(token))
        argv = [*BARCHAN, "run", "debian", *remote, "--", "echo", "hi"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (0, b"hi\n"), done.stderr
        request = urllib.request.Request(f"http://{address}/v1/node")
        request.add_header("Authorization", f"Bearer {token.read_text().strip()}")
        with urllib.request.urlopen(request, timeout=10) as response:
            assert json.loads(response.read())["creates_total"] == 1
        denied = subprocess.run([*BARCHAN, "ps", *remote[:2]], capture_output=True, check=False, timeout=60)
        assert denied.returncode == 1
        assert b"BARCHAN_TOKEN" in denied.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stdout is not None
        said = process.stdout.read().decode()
    assert f"http://{address}" in said
    assert "Bearer $(cat" in said
