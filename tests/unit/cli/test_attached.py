"""A process on this terminal: what goes in, what comes out, interrupts, size, and the end."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

from barchan.cli.attached import exit_code
from barchan.model.sandbox import ProcessInfo

ROOT = Path(__file__).parents[3]

# Follows a stand-in for a process: it echoes its input as stdout, and as stderr what else happened to it. `mode`:
# what it does at an interrupt (end or go on), or `deaf`: it has closed its input, or `lost`: the connection breaks.
FOLLOW = textwrap.dedent("""
    import asyncio, sys
    from typing import Any
    from barchan.cli import attached
    from barchan.errors import BarchanError, ConnectionLost, Conflict
    from barchan.model.sandbox import ProcessInfo

    mode = sys.argv[1]

    class Echo:
        def __init__(self):
            self.out = asyncio.Queue()
            self.code = 0
        async def output(self, *, quiet_timeout_s):
            offset = 0
            yield "stderr", 0, b"ready\\n"
            if mode == "lost":
                raise ConnectionLost("gone")
            while (item := await self.out.get()) is not None:
                yield item[0], offset, item[1]
                offset += len(item[1])
        async def write_stdin(self, data, *, eof, timeout_s):
            if mode == "deaf":
                await self.out.put(("stderr", b"refused\\n"))
                await self.out.put(None)
                raise Conflict("stdin is closed")
            await self.out.put(("stdout", data))
            if eof:
                await self.out.put(None)
        async def signal(self, name):
            await self.out.put(("stderr", b"signal " + name.encode() + b"\\n"))
            if mode == "end":
                self.code = 130
                await self.out.put(None)
        async def resize(self, rows, cols):
            await self.out.put(("stderr", b"size %d %d\\n" % (rows, cols)))
        async def kill(self):
            print("killed", file=sys.stderr, flush=True)
        async def wait(self, timeout_s):
            return ProcessInfo(process_id="p", pid=1, running=False, exit_code=self.code)

    async def main() -> int:
        process: Any = Echo()
        return attached.exit_code(await attached.follow(process, use_tty="tty" in sys.argv, end_line=False))
    try:
        sys.exit(attached.run(main()))
    except KeyboardInterrupt:
        sys.exit(99)
    except BarchanError as error:
        print(type(error).__name__, file=sys.stderr)
        sys.exit(98)
""")


def start(*arguments: str, stdin: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", FOLLOW, *arguments],
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stderr is not None
    assert process.stderr.readline() == line


def test_input_goes_in_and_both_streams_come_out_apart() -> None:
    """Bytes of any kind pass; the end of our input is the end of its input."""
    data = bytes(range(256)) * 4096
    with start("end") as process:
        out, err = process.communicate(data, timeout=30)
    assert (process.returncode, out, err) == (0, data, b"ready\n")


@pytest.mark.parametrize("source", ["/dev/null", "file", "closed"])
def test_input_that_cannot_be_polled_works(source: str, tmp_path: Path) -> None:
    """A regular file is passed on; /dev/null and a closed descriptor are an input that is at its end."""
    (tmp_path / "file").write_bytes(b"x" * 200_000)
    if source == "closed":
        command = f'exec {sys.executable} -c "$0" end <&-'
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(["sh", "-c", command, FOLLOW], env=environment, capture_output=True, timeout=30)
        assert (done.returncode, done.stdout) == (0, b"")
        return
    path = source if source == "/dev/null" else tmp_path / "file"
    with open(path, "rb") as file, start("end", stdin=file.fileno()) as process:
        out = process.communicate(timeout=30)[0]
    assert (process.returncode, len(out)) == (0, 0 if source == "/dev/null" else 200_000)


def test_a_process_that_has_closed_its_input_is_no_error() -> None:
    """As with a pipe: the rest of the input is nobody's, the output still counts."""
    with start("deaf") as process:
        out, err = process.communicate(b"x", timeout=30)
    assert (process.returncode, out, err) == (0, b"", b"ready\nrefused\n")


def test_the_first_interrupt_is_the_process_s(tmp_path: Path) -> None:
    """It gets SIGINT, and its own exit code counts."""
    with start("end") as process:
        wait_for(process, b"ready\n")
        process.send_signal(signal.SIGINT)
        wait_for(process, b"signal INT\n")
        assert process.wait(30) == 130


def test_the_second_interrupt_kills() -> None:
    """When the first did not help, the process is killed before this program ends."""
    with start("go-on") as process:
        wait_for(process, b"ready\n")
        process.send_signal(signal.SIGINT)
        wait_for(process, b"signal INT\n")
        process.send_signal(signal.SIGINT)
        wait_for(process, b"killed\n")
        assert process.wait(30) == 99


def test_termination_kills() -> None:
    """SIGTERM kills the process at once."""
    with start("go-on") as process:
        wait_for(process, b"ready\n")
        process.send_signal(signal.SIGTERM)
        wait_for(process, b"killed\n")
        assert process.wait(30) == 99


def test_a_lost_connection_is_that_error() -> None:
    """Not a group of errors; what may still run is killed as far as possible."""
    with start("lost") as process:
        err = process.communicate(b"", timeout=30)[1]
    assert process.returncode == 98
    assert err.splitlines() == [b"ready", b"killed", b"ConnectionLost"]


def test_a_terminal_is_raw_while_it_runs_and_as_before_afterwards() -> None:
    """Keys arrive as typed, Ctrl-C among them; a change of size is passed on."""
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))
    with start("end", "tty", stdin=slave) as process:
        wait_for(process, b"ready\n")
        deadline = time.monotonic() + 30
        while termios.tcgetattr(slave)[3] & termios.ICANON and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not termios.tcgetattr(slave)[3] & (termios.ICANON | termios.ECHO | termios.ISIG)
        os.write(master, b"a\x03b")
        assert process.stdout is not None
        assert process.stdout.read(3) == b"a\x03b"
        process.send_signal(signal.SIGWINCH)
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"size ")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


def test_exit_codes_of_ends() -> None:
    """The process's own, 124 when it was killed for its time."""

    def ended(**fields: object) -> int:
        return exit_code(ProcessInfo(process_id="p", pid=1, running=False, **fields))  # type: ignore[arg-type]

    assert ended(exit_code=0) == 0
    assert ended(exit_code=137, signal=9) == 137
    assert ended(exit_code=137, signal=9, timed_out=True) == 124
