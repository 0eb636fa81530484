"""`barchan up`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from barchan.cli.common import DEFAULTS, OK, PLATFORM, Common, print_json
from barchan.errors import BackendError, from_wire
from barchan.sdk.endpoint import store_url
from barchan.wire.api import ErrorBody


def up(
    *,
    listen: str = "127.0.0.1:7070",
    store: str | None = None,
    warm: int | None = None,
    memory_overcommit: float | None = None,
    common: Common = DEFAULTS,
) -> int:
    """Run a node in the foreground, reachable over HTTP with a bearer token.

    Ends on SIGINT or SIGTERM. The token is made on first use, in a file that
    only you can read; it is never printed.

    For example:

        barchan up
        barchan up --listen 127.0.0.1:8000 --state-dir /srv/barchan

    Args:
        listen: HOST:PORT to serve on.
        store: Blob store of images that are not here: a directory, s3://BUCKET/PREFIX, gs://, az://, https://HOST/PATH
            (environment: BARCHAN_STORE).
        warm: Sandboxes to keep ready for creates, at least (default: 4 per processor, at least 16; 0: none).
        memory_overcommit: How many times the host's memory the limits of sandboxes may add up to (default: 16).
    """
    state_dir = common.local_state_dir
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    token_file = common.token_file.absolute() if common.token_file else state_dir / "token"
    node = [sys.executable, "-m", "barchan.node", "--state-dir", str(state_dir), "--idle-exit-s", "0"]
    node += ["--listen", listen, "--token-file", str(token_file)]
    if store := store or os.environ.get("BARCHAN_STORE"):
        node += ["--store", store_url(store)]
    if warm is not None:
        node += ["--warm", str(warm)]
    if memory_overcommit is not None:
        node += ["--memory-overcommit", str(memory_overcommit)]
    ready, ready_end = os.pipe()
    with subprocess.Popen([*node, "--ready-fd", str(ready_end)], pass_fds=(ready_end,)) as process:
        os.close(ready_end)
        with open(ready, "rb") as pipe, _signals_to(process):
            if (said := pipe.readline()) != b"ready\n":
                process.wait()
                raise _refusal(said)
            if common.json:
                socket = str(state_dir / "node.sock")
                print_json({"url": f"http://{listen}", "token_file": str(token_file), "socket": socket})
            else:
                sys.stdout.write(_how_to_connect(listen, token_file))
                sys.stdout.flush()
            return PLATFORM if process.wait() else OK


@contextmanager
def _signals_to(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """The node ends on these signals, and this command when it has."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda caught, _: process.send_signal(caught)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _refusal(said: bytes) -> Exception:
    try:
        body = msgspec.json.decode(said, type=ErrorBody)
    except msgspec.MsgspecError:
        return BackendError("the node did not start, and what it said is above")
    return from_wire(body.code, body.message, body.details)


def _how_to_connect(listen: str, token_file: Path) -> str:
    return (
        f"A node on http://{listen}; Ctrl-C ends it. From another terminal:\n\n"
        f'  curl -H "Authorization: Bearer $(cat {token_file})" http://{listen}/v1/node\n'
        f"  barchan --url http://{listen} --token-file {token_file} ps\n\n"
    )
