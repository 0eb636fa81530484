"""A node that ends itself by SIGKILL at a chosen step of an operation, and the ends of inits, from outside.

    python -m tests.integration.resume_node WHEN NEEDLE --state-dir ...

The step is put around the node's own methods from here: nothing in the product knows of it.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from barchan.backends.guest import GuestConnection
from barchan.node.__main__ import main
from barchan.node.files import Files
from barchan.node.processes import Processes
from barchan.testing.node import READY_TIMEOUT_S, NodeProcess

ROOT = Path(__file__).parents[2]
LOOK_S = 0.005


class MortalNode(NodeProcess):
    """A node of which one life can be given a step to end at."""

    def start_to_end(self, when: str, needle: str) -> None:
        """As `start`, and it ends itself.

        Args:
            when: `before` the init is asked; `after` it has said so; `ended`: it is over, and nobody was told.
            needle: Among the program's arguments or in what it is given to read.
        """
        ready, ready_end = os.pipe()
        guard = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "tests.integration.resume_node", when, needle]
        words = ["--state-dir", str(self.state_dir), "--idle-exit-s", "0", "--ready-fd", str(ready_end)]
        with open(self.state_dir / "node.log", "ab") as log:
            self.process = subprocess.Popen(
                [*guard, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(ready_end,), cwd=ROOT
            )
        os.close(ready_end)
        with open(ready, "rb") as pipe:
            assert pipe.readline() == b"ready\n", self.log[-4000:]

    def running(self, program: str) -> Iterator[int]:
        """Host pids of the programs in this node's sandboxes that have this among their arguments."""
        ours = f"{self.state_dir}/".encode()
        for pid in running(program):
            with suppress(OSError):  # it ended meanwhile
                above = pid
                while above > 1 and ours not in (Path("/proc") / str(above) / "cmdline").read_bytes():
                    above = int(_status(above)["PPid"][0])
                if above > 1:
                    yield pid

    async def ended(self) -> None:
        """Wait until it has ended itself."""
        assert self.process is not None
        code = await asyncio.to_thread(self.process.wait, READY_TIMEOUT_S)
        assert code == -signal.SIGKILL, self.log[-4000:]
        self.process = None


def running(program: str) -> Iterator[int]:
    """Host pids of the programs that have this among their arguments."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                if program.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    yield int(entry.name)


def init_of(pid: int) -> int:
    """The init of the sandbox that a program runs in."""
    while (fields := _status(pid))["NSpid"][-1] != "1":
        pid = int(fields["PPid"][0])
    return pid


def _status(pid: int) -> dict[str, list[str]]:
    lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_after(program: str) -> None:
    """End this process when the program has run."""
    was_seen = False
    while not was_seen or any(running(program)):
        was_seen = was_seen or any(running(program))
        time.sleep(LOOK_S)
    _die()


def _arm(when: str, needle: str, program: str) -> None:
    real_start, real_stdin = GuestConnection.start, GuestConnection.write_stdin
    real_exec, real_in = Processes.exec, Files.stream_in

    async def start(self: GuestConnection, asked: Any, *words: Any) -> Any:
        is_here = needle in repr(asked)
        if is_here and when == "before":
            _die()
        process = await real_start(self, asked, *words)
        if is_here and when == "after":
            _die()
        return process

    async def write_stdin(self: GuestConnection, process: Any, offset: int, data: bytes, **more: Any) -> int:
        is_here = needle.encode() in data
        if is_here and when == "before":
            _die()
        reached = await real_stdin(self, process, offset, data, **more)
        if is_here and when == "after":
            _die()
        elif is_here and when == "ended":
            threading.Thread(target=_die_after, args=(program,), daemon=True).start()
        return reached

    async def run_to_its_end(self: Processes, request: Any) -> Any:
        result = await real_exec(self, request)
        if when == "ended" and needle in repr(request):
            _die()
        return result

    async def stream_in(self: Files, *words: Any, **more: Any) -> None:
        await real_in(self, *words, **more)
        if when == "ended" and needle in repr(words):
            _die()

    GuestConnection.start = start  # type: ignore[method-assign]
    GuestConnection.write_stdin = write_stdin  # type: ignore[method-assign]
    Processes.exec = run_to_its_end  # type: ignore[method-assign]
    Files.stream_in = stream_in  # type: ignore[method-assign]


if __name__ == "__main__":
    from tests.integration.resume_tasks import SLOW_SHELL

    _arm(sys.argv.pop(1), sys.argv.pop(1), SLOW_SHELL)
    sys.exit(main())
