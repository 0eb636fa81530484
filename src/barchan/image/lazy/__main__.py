"""`python -m barchan.image.lazy`: one reader, from its start until the file system it serves is gone."""

import argparse
import asyncio
import fcntl
import os
import socket
import sys
import time
from pathlib import Path

from barchan.errors import BarchanError, Conflict
from barchan.image.lazy.mounter import start_mounter

LOCK_WAIT_S = 10.0  # for a reader that is just ending
FIRST_WAIT_S = 30.0  # for the node that started this one
WAIT_S = 60.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="barchan.image.lazy", description="Serve layers of a blob store, on demand.")
    parser.add_argument("--cache-dir", type=Path, required=True, help="where what was read is kept; one reader each")
    parser.add_argument("--socket", type=Path, required=True, help="where the node comes to")
    parser.add_argument("--budget-mib", type=int, required=True, help="cached data at most")
    parser.add_argument("--wait-s", type=float, default=WAIT_S, help="how long a store may take to give a chunk")
    return parser.parse_args()


def _lock(root: Path) -> int:
    root.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Conflict(f"another reader uses {root}") from None
            time.sleep(0.02)


async def _run(arguments: argparse.Namespace, child: tuple[socket.socket, int]) -> None:
    from barchan.image.lazy.reader import Reader  # only the reader itself needs what reading from stores needs

    budget = arguments.budget_mib << 20
    reader = Reader(arguments.cache_dir, arguments.socket, budget, arguments.wait_s, child)
    loop = asyncio.get_running_loop()
    loop.call_later(FIRST_WAIT_S, lambda: reader.ended.set() if reader.is_idle else None)
    os.write(sys.stdout.fileno(), b"ready\n")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whoever waits for that line waits for no more
    await reader.run()


def main() -> int:
    """Run a reader; returns its exit code."""
    arguments = _arguments()
    if os.fork():  # whoever started this is not its parent: it may end first
        os._exit(0)
    os.umask(0o077)
    child = start_mounter()
    try:
        lock = _lock(arguments.cache_dir)
        asyncio.run(_run(arguments, child))
        os.close(lock)
    except (BarchanError, OSError) as error:
        os.write(sys.stdout.fileno(), f"error {str(error)[:400]}\n".encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
