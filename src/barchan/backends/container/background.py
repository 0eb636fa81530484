"""Starting programs that outlive the node: each says on one line how its start went, and goes into the background."""

import asyncio
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from barchan.errors import BootFailed

START_TIMEOUT_S = 60.0
LINE_BYTES_MAX = 4096


async def start(argv: Sequence[str | Path], errors: IO[bytes] | None = None) -> str:
    """Run the program until it has left a child behind, or failed; returns its line.

    What it says besides goes to `errors`, or to wherever the node's own goes.

    Raises:
        BootFailed: It ended without a line, as one does that is killed, or was not up in time and is dead.
    """
    return await asyncio.to_thread(_run, argv, errors)


def _run(argv: Sequence[str | Path], errors: IO[bytes] | None) -> str:
    # In a thread, since asyncio's own would tell of the end to a loop that may have closed by then.
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
    ) as process:
        try:
            line = _first_line(process)
            process.wait(START_TIMEOUT_S)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            os.killpg(process.pid, signal.SIGKILL)  # with the child, unless that has gone into a session of its own
            raise BootFailed(f"{argv[0]} was not up in {START_TIMEOUT_S:g} s") from error
    if not line:
        raise BootFailed(f"{argv[0]} ended as it started, without saying why: exit code {process.returncode}")
    return line


def _first_line(process: subprocess.Popen[bytes]) -> str:
    """All that can be read at once: what stays behind may hold the pipe for as long as it lives."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    if not poll.poll(START_TIMEOUT_S * 1e3):
        raise TimeoutError
    return os.read(process.stdout.fileno(), LINE_BYTES_MAX).decode("utf-8", "replace").strip()
