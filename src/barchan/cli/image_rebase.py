"""`barchan image rebase`."""

import sys
from typing import Annotated

from cyclopts import Parameter

import barchan
from barchan.cli.common import DEFAULTS, FAILED, OK, Common, one_line, print_json
from barchan.cli.progress import progress


def rebase(
    *names: str,
    old: Annotated[str, Parameter(name="--from")],
    new: Annotated[str, Parameter(name="--to")],
    common: Common = DEFAULTS,
) -> int:
    """Put images that were built on one image on another one.

    Nothing is built and no layer is copied: each image keeps its own layers,
    and gets the new base's below them. Settings that an image has just as the
    old base has them, it gets as the new one has them. An image that can't lie
    on the new base stays as it was; the exit code is then 1.

    For example:

        barchan image rebase --from debian --to debian-2
        barchan image rebase --from debian --to debian-2 task-1 task-2

    Args:
        names: Which images; without any, all that were built on the old base.
        old: The image they were built on.
        new: The image they are to be on.
    """
    with barchan.connect(**common.connection) as client, progress("rebasing") as say:
        count = 0

        def told(item: barchan.Rebased) -> None:
            nonlocal count
            count += 1
            if sys.stderr.isatty() or count == item.total:
                say(f"{count} of {item.total}")

        done = client.rebase(old, new, names=names, progress=told)
    refused = [item for item in done if item.refused]
    if common.json:
        print_json(done)
    else:
        for item in refused:
            sys.stdout.write(f"{item.name}: left as it was: {one_line(item.refused)}\n")
        sys.stdout.write(f"{len(done) - len(refused)} of {len(done)} images are on {new} now\n")
    return FAILED if refused else OK
