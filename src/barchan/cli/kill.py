"""`barchan kill`."""

import sys
from typing import Annotated

from cyclopts import Parameter

import barchan
from barchan.cli.common import DEFAULTS, FAILED, OK, Common, key_values, print_error, print_json
from barchan.cli.run import Words
from barchan.errors import InvalidSpec, NotFound, SandboxExpired, SandboxLost


def kill(
    *sandboxes: str,
    label: Words = (),
    all_: Annotated[bool, Parameter(name="--all")] = False,
    common: Common = DEFAULTS,
) -> int:
    """End sandboxes; returns when nothing of them is left.

    For example:

        barchan kill sb_x1 sb_x2
        barchan kill --label job=eval
        barchan kill --all

    Args:
        sandboxes: Their ids.
        label: KEY=VALUE: end those that have it; may be repeated, then all must match.
        all_: End every sandbox of the node.
    """
    if sum((bool(sandboxes), bool(label), all_)) != 1:
        raise InvalidSpec("give either ids, or --label, or --all")
    ended_before: list[str] = []
    with barchan.connect(**common.connection) as client:
        if sandboxes:
            ended_before = [sandbox for sandbox in sandboxes if not _end(client, sandbox)]
            killed = len(sandboxes) - len(ended_before)
        else:
            killed = client.kill(labels=key_values(label, "--label"))
    if common.json:
        print_json({"killed": killed, "not_found": ended_before})
    else:
        sys.stdout.write(f"killed {killed}\n")
    if ended_before:
        print_error(f"no live sandbox {', '.join(ended_before)}", "barchan ps")
    return FAILED if ended_before else OK


def _end(client: barchan.Client, sandbox_id: str) -> bool:
    """Whether it was alive."""
    try:
        return client.attach(sandbox_id).kill()
    except (NotFound, SandboxExpired, SandboxLost):
        return False
