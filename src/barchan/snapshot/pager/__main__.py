"""`python -m barchan.snapshot.pager`: the pager of one node, until nobody needs it."""

import argparse
import asyncio
import fcntl
import os
import sys
import time
from pathlib import Path

from barchan.errors import BarchanError, Conflict
from barchan.snapshot.pager.keeper import GRACE_S, KILL_S, Keeper

LOCK_WAIT_S = GRACE_S + KILL_S + 5.0  # the keeper of one that was killed holds the lock until its sandboxes are gone


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="barchan.snapshot.pager", description="Give restored sandboxes their memory.")
    parser.add_argument("--dir", type=Path, required=True, help="its sockets lie there; one pager each")
    parser.add_argument("--shelf", type=Path, required=True, help="where the node keeps snapshots")
    return parser.parse_args()


def _lock(root: Path) -> None:
    """Held by this process's table of descriptors, so for as long as its keeper lives."""
    root.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Conflict(f"another pager uses {root}") from None
            time.sleep(0.02)


async def _run(arguments: argparse.Namespace, keeper: Keeper) -> None:
    from barchan.snapshot.pager.server import Pager  # the keeper needs none of it

    pager = Pager(arguments.dir, arguments.shelf, keeper)
    os.write(sys.stdout.fileno(), b"ready\n")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whoever waits for that line waits for no more
    await pager.run()


def main() -> int:
    """Run a pager; returns its exit code."""
    arguments = _arguments()
    if os.fork():  # whoever started this is not its parent: it may end first
        os._exit(0)
    os.umask(0o077)
    try:
        _lock(arguments.dir)
        asyncio.run(_run(arguments, Keeper()))
    except (BarchanError, OSError) as error:
        os.write(sys.stdout.fileno(), f"error {str(error)[:400]}\n".encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
