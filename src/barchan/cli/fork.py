"""`barchan fork`."""

import sys
from typing import Annotated

from cyclopts import Parameter

import barchan
from barchan.cli.common import DEFAULTS, FAILED, OK, Common, key_values, print_error, print_json
from barchan.cli.run import Words
from barchan.model.fork import ForkKind
from barchan.sdk.options import CreateOptions


def fork(
    sandbox: str,
    /,
    *,
    number: Annotated[int, Parameter(name=("--number", "-n"))] = 1,
    kind: ForkKind = "fs",
    memory_mib: int | None = None,
    ttl_s: float | None = None,
    env: Words = (),
    label: Words = (),
    common: Common = DEFAULTS,
) -> int:
    """Make sandboxes that start as a live one is at this moment, and print
    their ids.

    Where one could not be made, the reason is told and the others stay.

    For example:

        barchan fork sb_x1 -n 16
        barchan fork sb_x1 -n 4 --kind memory --label attempt=2

    Args:
        sandbox: Id of the one to start from, which goes on.
        number: How many.
        kind: fs: its files, and no processes. memory: its processes, too.
        memory_mib: Memory of each, instead of the same as its parent's.
        ttl_s: Life of each, instead of the same as its parent's, from now on.
        env: KEY=VALUE, over its parent's variables; may be repeated.
        label: KEY=VALUE, over its parent's labels; may be repeated.
    """
    options: CreateOptions = {"env": key_values(env, "--env"), "labels": key_values(label, "--label")}
    if memory_mib is not None:
        options["memory_mib"] = memory_mib
    if ttl_s is not None:
        options["ttl_s"] = ttl_s
    with barchan.connect(**common.connection) as client:
        children = client.attach(sandbox).fork(number, kind=kind, **options)
    made = [child.id for child in children if isinstance(child, barchan.Sandbox)]
    failed = [str(child) for child in children if isinstance(child, barchan.BarchanError)]
    if common.json:
        print_json({"sandboxes": made, "failed": failed})
    else:
        sys.stdout.write("".join(f"{sandbox_id}\n" for sandbox_id in made))
    for reason in failed:
        print_error(reason)
    return FAILED if failed else OK
