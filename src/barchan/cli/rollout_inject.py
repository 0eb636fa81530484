"""`barchan rollout --inject`: the same run as a process of its own, with faults done to it from this one."""

import asyncio
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from barchan.cli.common import FAILED, OK, Common, one_line, print_json, print_table
from barchan.errors import InvalidSpec

if TYPE_CHECKING:
    from barchan.testing.faults.judge import FaultTable

OWN = ("inject", "inject_seed", "common", "out", "resume", "base_url", "tasks")  # not passed on as they are


def inject(words: Sequence[str], seed: int | None, given: Mapping[str, Any], common: Common) -> int:
    """Carry a run out under a plan.

    Args:
        given: The command's other arguments, by their names as its function has them.

    Raises:
        InvalidSpec: The plan can't be read, or does not go with the rest.
    """
    from barchan.testing.faults.campaign import Campaign
    from barchan.testing.faults.plan import read_plan
    from barchan.testing.faults.policies import truth_of

    if common.node_url is not None:
        raise InvalidSpec("a run with --inject has a node of its own, and no other is touched: leave --url away")
    if given["resume"] is not None:
        raise InvalidSpec("--inject is for a new run: give --out")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-faults-{secrets.token_hex(2)}"
    out = given["out"] or Path("runs", name)

    def told(text: str) -> None:
        sys.stderr.write(f"fault: {one_line(text)}\n")

    campaign = Campaign(
        read_plan(words, seed),
        [given["tasks"], *arguments_of(given)],
        out,
        images=common.local_state_dir / "images",
        template=given["template"],
        base_url=given["base_url"],
        quiet=common.json,
        told=told,
    )
    table = asyncio.run(campaign.run(truth_of(given["policy"])))
    if common.json:
        print_json(table)
    else:
        print_faults(table)
    return campaign.exit_code or (OK if table.ok else FAILED)


def arguments_of(given: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line that means the same."""
    words: list[str] = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if name in OWN or value is None or value is False:
            continue
        if value is True:
            words.append(option)
        else:
            words += [f"{option}={each}" for each in (value if isinstance(value, tuple) else (value,))]
    return words


def print_faults(table: "FaultTable") -> None:
    """The table on stdout, and what must not be."""
    print_table(
        ("FAULT", "INJECTED", "HIT", "RIGHT", "FALSE-VALID", "UNTOLD", "VOID", "CANCELLED"),
        [
            [
                row.kind,
                str(row.injected),
                str(row.hit),
                str(row.right),
                str(row.wrong),
                str(row.untold),
                ", ".join(f"{count} {cause}" for cause, count in row.void.items()) or "0",
                str(row.cancelled),
            ]
            for row in table.rows
        ],
        empty="",
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{table.rollouts} records in {table.wall_s:.1f} s: {table.scored} scored, {table.void} void, "
        f"{len(table.false_valid)} false-valid, {len(table.false_void)} false-void, {table.retried} tried again, "
        f"resumed {table.resumed} times, seed {table.seed}"
    )
    for what, wrongs in (("false-valid", table.false_valid), ("false-void", table.false_void)):
        for wrong in wrongs:
            hit_by = f", hit by {', '.join(wrong.faults)}" if wrong.faults else ""
            console.print(
                f"{what}: {wrong.rollout_id} of {wrong.task_id}: {wrong.cause}, reward {wrong.reward}, "
                f"truth {wrong.truth}{hit_by}",
                markup=False,
            )
    for line in table.left:
        console.print(f"left: {line}", markup=False)
