"""`barchan conformance`."""

import asyncio
import sys
from typing import Annotated

from cyclopts import Parameter

from barchan.cli.common import DEFAULTS, FAILED, OK, Common, one_line, print_json
from barchan.cli.run import Words


def conformance(
    *,
    backend: str = "container",
    template: str = "debian",
    only: Words = (),
    lacks: Words = (),
    list_: Annotated[bool, Parameter(name="--list")] = False,
    common: Common = DEFAULTS,
) -> int:
    """Check that a backend keeps what docs/conformance.md promises for all.

    It runs real sandboxes on a node of its own, in a state directory of its
    own with this one's images, and looks at what is left afterwards. The
    exit code is 0 when all has passed but declared gaps, else 1.

    For example:

        sudo barchan conformance --backend container
        sudo barchan conformance --backend gvisor --only limits --only files
        barchan conformance --list

    Args:
        backend: Its name; one of another package by that of its entry point.
        template: Name of the image that sandboxes are made of: with a shell, coreutils and python3.
        only: An area, or one check; may be repeated. [default: all]
        lacks: What a backend of another package declares to lack; may be repeated.
        list_: Print the checks, and run none.
    """
    from barchan.testing.profiles import profile_of
    from barchan.testing.suite import Outcome, Suite, chosen, run

    checks = chosen(only)
    if list_:
        for each in checks:
            sys.stdout.write(f"{each.area:10}  {each.name}  {each.needs or ''}".rstrip() + "\n")
        return OK
    suite = Suite(backend, template, profile_of(backend, lacks), common.local_state_dir / "images")

    def told(outcome: Outcome) -> None:
        if not common.json:
            sys.stdout.write(f"{outcome.result:6}  {outcome.took_s:5.1f} s  {outcome.area}  {outcome.name}\n")
            if outcome.message:
                sys.stdout.write(f"        {one_line(outcome.message)}\n")
            sys.stdout.flush()

    report = asyncio.run(run(suite, checks, told=told))
    if common.json:
        print_json(report)
    else:
        sys.stdout.write(f"\n{report.summary()}\n")
    return OK if report.ok else FAILED
