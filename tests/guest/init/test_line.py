"""Connections over a line that never ends, and what only the init of a machine or a service does."""

import resource
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guest.init.driver import DETACH, MAIN, GuestReplyError, start_body
from tests.guest.init.guest import INIT
from tests.guest.init.line import CONFIGURE, COUNTERS, MAGIC, SECRET, Line

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(60)]


@pytest.fixture
def make_line(tmp_path: Path) -> Iterator[Callable[..., Line]]:
    made: list[tuple[subprocess.Popen[bytes], Line]] = []

    def make(*options: str) -> Line:
        ours, theirs = socket.socketpair()
        spool = tempfile.mkdtemp(dir=tmp_path)
        argv = [INIT, "--serial-fd", str(theirs.fileno()), "--spool-dir", spool, "--spool-max-bytes", str(64 << 20)]
        process = subprocess.Popen(
            [*argv, *options],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            env={"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"},
        )
        theirs.close()
        made.append((process, Line(ours)))
        return made[-1][1]

    yield make
    for process, line in made:
        assert process.poll() is None, process.communicate()
        process.kill()
        assert process.communicate()[1] == b""
        line.close()


@pytest.fixture
def line(make_line: Callable[..., Line]) -> Line:
    """One after its first greeting and HELLO."""
    line = make_line()
    line.greet()
    line.hello()
    return line


def test_programs_run_without_any_group(line: Line) -> None:
    """An init that is given no cgroups, and has none, starts programs and those of the platform all the same."""
    assert line.sh("echo out; exit 3").code == 3
    assert line.sh("echo out", flags=16 | 8).out == b"out\n"
    assert line.applet("stat", "/").code == 0


def test_frames_before_a_greeting_mean_nothing(make_line: Callable[..., Line]) -> None:
    """Whatever comes before a confirmed greeting is passed over, a greeting that was never confirmed too."""
    line = make_line()
    line.socket.sendall(bytes(100) + start_body("x", ["true"]) + MAGIC + MAGIC[:7])
    stale = line.call()
    line.socket.sendall(MAGIC + b"K" + bytes(16) + SECRET + MAGIC)
    line.greet()
    line.hello()
    assert stale and line.ping()["total"] == 0


def test_a_greeting_in_the_middle_of_a_frame(line: Line) -> None:
    """The secret ends a connection at once, wherever it stood, and nothing of its half frame is carried out."""
    whole = start_body("half", ["true"], stdin=b"x" * 1_000_000)
    for sent in (1, 11, 13, 5000, 600_000):
        frame = len(whole).to_bytes(4, "little") + bytes([3, 0, 0, 0, 9, 0, 0, 0]) + whole
        line.socket.sendall(frame[:sent])
        line.greet()
        line.hello()
        with pytest.raises(GuestReplyError):
            line.lookup("half")


def test_a_secret_that_comes_in_pieces(line: Line) -> None:
    """It is known wherever the line cuts it."""
    for cut in (1, 16, 31):
        line.socket.sendall(SECRET[:cut])
        time.sleep(0.05)
        line.socket.sendall(SECRET[cut:])
        line.greet()
        line.hello()
        assert line.ping()["running"] == 0


def test_greetings_in_what_a_program_is_sent(line: Line) -> None:
    """A call in a frame's body, as anybody can have a guest sent it, is data and nothing else."""
    evil = MAGIC + b"C" + bytes(16) + bytes(100) + MAGIC + b"K" + bytes(48)
    assert line.sh("cat", stdin=evil * 1000).out == evil * 1000
    assert line.ping()["total"] == 1


def test_output_under_way_is_passed_over(line: Line) -> None:
    """A new host finds its answer behind all that the one before had not read, and follows where it likes."""
    handle, _, _ = line.start("yes", ["yes"], flags=0)
    line.follow(handle)
    time.sleep(0.2)
    line.greet()
    line.hello()
    assert line.signal(handle, signal.SIGKILL, MAIN) == 1
    assert line.sh("echo still").out == b"still\n"


def test_detach(line: Line) -> None:
    """After DETACH no frame is heard, and the next greeting may be of a host that does not know the secret."""
    line.request(DETACH)
    line.send(2)
    assert line.is_silent()
    line.greet(b"\7" * 32)
    line.hello()
    line.greet(b"\7" * 32)
    line.hello()
    assert line.ping()["total"] == 0


def test_nothing_of_a_machine_without_one(line: Line) -> None:
    """Counters, settings and operations of a machine are refused by an init that has none."""
    for kind, body in ((COUNTERS, b""), (CONFIGURE, bytes(4 + 16))):
        with pytest.raises(GuestReplyError) as raised:
            line.request(kind, body)
        assert raised.value.errno == 95
    with pytest.raises(GuestReplyError) as raised:
        line.start("op", ["sync"], kind=3)
    assert raised.value.errno == 95


def test_an_agent_is_a_service(make_line: Callable[..., Line]) -> None:
    """Its programs have what the machine gives their users, it reaps its own children only, and counts the kernel's."""
    line = make_line("--agent")
    line.greet()
    line.hello()
    status = line.sh("grep -E 'CapEff|NoNewPrivs' /proc/self/status; id -u", user="").out.decode().split()
    assert int(status[1], 16) & 1 << 21 and status[3:] == ["0", "0"]
    status = line.sh("grep CapEff /proc/self/status; id -u", user="65534:65534").out.decode().split()
    assert (int(status[1], 16), status[2]) == (0, "65534")
    counted = int.from_bytes(line.request(COUNTERS)[:8], "little")
    kernel = dict(map(str.split, Path("/proc/vmstat").read_text().splitlines()))["oom_kill"]
    assert 0 <= int(kernel) - counted < 100 and (counted > 0) == (kernel != "0")
    handle, _, _ = line.start("tree", ["sh", "-c", "sleep 100 & sleep 100"])
    time.sleep(0.2)
    assert line.signal(handle, signal.SIGKILL, 2) == 3
    assert line.wait_exit(handle).code == -signal.SIGKILL
    assert line.sh("ulimit -n").out == f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}\n".encode()
