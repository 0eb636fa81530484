"""Starting programs that outlive the node: each says on one line how its start went, and goes into the background."""

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from barchan.errors import BootFailed

START_TIMEOUT_S = 60.0


async def start(argv: Sequence[str | Path], errors: IO[bytes] | None = None) -> str:
    """Run the program until it has left a child behind, or failed; returns its line.

    What it says besides goes to `errors`, or to wherever the node's own goes.

    Raises:
        BootFailed: It ended without a line, as one does that is killed, or was not up in time and is dead.
    """
    return await asyncio.to_thread(_run, argv, errors)


def _run(argv: Sequence[str | Path], errors: IO[bytes] | None) -> str:
    # In a thread, since asyncio's own would tell of the end to a loop that may have closed by then.
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BootFailed(f"{argv[0]} was not up in {START_TIMEOUT_S:g} s") from error
    line = done.stdout.partition(b"\n")[0].decode("utf-8", "replace").strip()
    if not line:
        raise BootFailed(f"{argv[0]} ended as it started, without saying why: exit code {done.returncode}")
    return line
