"""`barchan node`."""

import fcntl
import os
import sys
import time
from pathlib import Path

from cyclopts import App

from barchan.cli.common import DEFAULTS, OK, Common, print_json
from barchan.errors import BackendError
from barchan.model.node import Stopped
from barchan.sdk.background import run
from barchan.sdk.embedded import listens
from barchan.sdk.endpoint import SOCKET_NAME, endpoint_of
from barchan.sdk.transport import Call, Transport

app = App(name="node", help_format="plaintext")

SHUTDOWN = Call("node_shutdown", Stopped)
LOCK = "node.lock"
SHUTDOWN_S = 300.0  # all its sandboxes end
GONE_S = 60.0  # then it lets go of its state directory
LOOK_S = 0.05


@app.command
def stop(*, common: Common = DEFAULTS) -> int:
    """End the node of a state directory, and every sandbox that runs on it.

    What is hibernated stays on disk, and so do snapshots and images: the next
    node of the directory has them. A client that still holds sandboxes starts
    that one at once.

    Exit code 0 also where no node runs; 3 if it does not end.

    For example:

        barchan node stop
        barchan node stop --state-dir /srv/barchan
    """
    url, state_dir = common.node_url, common.local_state_dir
    told: Stopped | None = None
    if url is not None:
        told = run(_stopped(url, common.token))
    elif _listens(state_dir):
        told = run(_stopped(f"unix://{state_dir / SOCKET_NAME}", None))
        _wait_gone(state_dir)
    if common.json:
        print_json(told)
    elif told is None:
        sys.stdout.write(f"no node runs in {state_dir}\n")
    else:
        sys.stdout.write(
            f"the node of {url or state_dir} has ended; sandboxes that ended with it: {told.ended}; "
            f"on its disk stay: {told.asleep} hibernated, {told.snapshots} snapshots\n"
        )
    return OK


async def _stopped(url: str, token: str | None) -> Stopped:
    transport = Transport(endpoint_of(url, None), token)
    try:
        target = SHUTDOWN.target({"keep": True})
        return await transport.value(SHUTDOWN, target, timeout_s=SHUTDOWN_S, patience_s=0, resend=False)
    finally:
        await transport.close()


def _listens(state_dir: Path) -> bool:
    """Whether a node can be asked; one that is starting, or ending, is waited for.

    Raises:
        BackendError: It takes too long.
    """
    deadline = time.monotonic() + GONE_S
    while not listens(str(state_dir)):
        if not _is_held(state_dir):
            return False
        if time.monotonic() > deadline:
            raise BackendError(f"the node of {state_dir} neither starts nor ends (try: node.log there)")
        time.sleep(LOOK_S)
    return True


def _wait_gone(state_dir: Path) -> None:
    """Until its process has let go of the directory, which may then be removed.

    Raises:
        BackendError: It has not.
    """
    deadline = time.monotonic() + GONE_S
    while _is_held(state_dir):
        if time.monotonic() > deadline:
            raise BackendError(
                f"the node of {state_dir} has ended its sandboxes and does not go, or a client has started the next "
                "one (try: barchan ps --runs, and node.log there)"
            )
        time.sleep(LOOK_S)


def _is_held(state_dir: Path) -> bool:
    """Whether a node's process has the directory."""
    try:
        lock = os.open(state_dir / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
