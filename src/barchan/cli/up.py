"""`barchan up`."""

import os
import sys
from pathlib import Path

from barchan.cli.common import DEFAULTS, Common, print_json


def up(*, listen: str = "127.0.0.1:7070", common: Common = DEFAULTS) -> int:
    """Run a node in the foreground, reachable over HTTP with a bearer token.

    Ends on SIGINT or SIGTERM. The token is made on first use, in a file that
    only you can read; it is never printed.

    For example:

        barchan up
        barchan up --listen 127.0.0.1:8000 --state-dir /srv/barchan

    Args:
        listen: HOST:PORT to serve on.
    """
    state_dir = common.local_state_dir
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    token_file = common.token_file.absolute() if common.token_file else state_dir / "token"
    if common.json:
        print_json({"url": f"http://{listen}", "token_file": str(token_file), "socket": str(state_dir / "node.sock")})
    else:
        sys.stdout.write(_how_to_connect(listen, token_file))
        sys.stdout.flush()
    node = [sys.executable, "-m", "barchan.node", "--state-dir", str(state_dir), "--idle-exit-s", "0"]
    os.execv(sys.executable, [*node, "--listen", listen, "--token-file", str(token_file)])


def _how_to_connect(listen: str, token_file: Path) -> str:
    return (
        f"A node on http://{listen}; Ctrl-C ends it. From another terminal:\n\n"
        f'  curl -H "Authorization: Bearer $(cat {token_file})" http://{listen}/v1/node\n'
        f"  barchan --url http://{listen} --token-file {token_file} ps\n\n"
    )
