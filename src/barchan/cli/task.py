"""`barchan task`."""

import asyncio
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

import barchan
from barchan.cli.common import DEFAULTS, FAILED, OK, Common, key_values, print_json, print_table
from barchan.cli.image_build import base_config
from barchan.cli.progress import progress
from barchan.errors import InvalidSpec
from barchan.rollout.admission import Admission, check
from barchan.rollout.prepare import Prepared, prepare_all
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Task
from barchan.rollout.tasksets import SetOptions, load_set

app = App(name="task", help_format="plaintext")

Count = Annotated[int, Parameter(validator=Number(gte=1))]
Words = Annotated[tuple[str, ...], Parameter(consume_multiple=False, show_default=False)]
KINDS = 3  # oracle, nop, empty
LONG_CHARS = 60


@app.command(name="check")
def check_(
    tasks: str,
    /,
    *,
    limit: Count | None = None,
    task: Words = (),
    rounds: Count = 2,
    concurrency: Count | None = None,
    write: Path | None = None,
    template: str = "debian",
    memory_mib: Count = 512,
    repos: Path | None = None,
    base: Words = (),
    common: Common = DEFAULTS,
) -> int:
    """See which tasks of a set can be trusted.

    In each round the oracle has to score 1, and doing nothing and handing in
    nothing have to score less. What is not the same in every round is named.
    The exit code is 1 when a task is not admitted.

    For example:

        barchan task check humaneval --limit 10
        barchan task check ./tasks --write admitted.txt --json

    Args:
        tasks: The set, as for `barchan rollout`.
        limit: Only the first so many tasks.
        task: Only the task of this id; may be repeated.
        rounds: Times that each is tried.
        concurrency: Attempts at once. [default: 2 per CPU of this machine]
        write: A file for the ids of the tasks that are admitted, one a line.
        template: Name or digest of an image with Python, for tasks without one of their own.
        memory_mib: Memory of each sandbox, where the task does not say.
        repos: swe: the folder with the rows' repositories.
        base: Harbor: the image of the node that a task's base means, as NAME=IMAGE; may be repeated.
    """
    chosen = _chosen(tasks, limit, task, repos, base, common)
    at_once = concurrency or 2 * len(os.sched_getaffinity(0))
    settings = RunSettings(
        run_id=f"check_{secrets.token_hex(6)}",
        template=template,
        concurrency=at_once,
        graders=at_once,
        memory_mib=memory_mib,
    )
    found = asyncio.run(_check(chosen, settings, rounds, common))
    admitted = [item for item in found if item.admitted]
    if write is not None:
        _write(write, [item.task_id for item in admitted])
    columns = ("TASK", "ADMITTED", "ORACLE", "NOP", "EMPTY", "SECONDS", "WHY NOT")
    print_table(columns, _admission_rows(found), empty="no tasks")
    print(f"{len(admitted)} of {len(found)} admitted")
    if common.json:
        print_json(found)
    return OK if len(admitted) == len(found) else FAILED


@app.command(name="prepare")
def prepare_(
    tasks: str,
    /,
    *,
    limit: Count | None = None,
    task: Words = (),
    repos: Path | None = None,
    base: Words = (),
    common: Common = DEFAULTS,
) -> int:
    """Build what a set's tasks start from, before a run needs it.

    An image is made for each environment, for each grader that has one of its
    own, and of what the test.sh of a Harbor task installs, which then needs no
    network when it grades. What is there already is left as it is. The exit
    code is 1 when a task could not be prepared.

    For example:

        barchan task prepare ./tasks

    Args:
        tasks: The set, as for `barchan rollout`.
        limit: Only the first so many tasks.
        task: Only the task of this id; may be repeated.
        repos: swe: the folder with the rows' repositories.
        base: Harbor: the image of the node that a task's base means, as NAME=IMAGE; may be repeated.
    """
    chosen = _chosen(tasks, limit, task, repos, base, common)
    found = asyncio.run(_prepare(chosen, common))
    ready = sum(item.ready for item in found)
    rows = [
        [item.task_id, _ready(item), ", ".join(item.images) or "-", f"{item.seconds:.1f}", item.why or "-"]
        for item in found
    ]
    print_table(("TASK", "READY", "IMAGES", "SECONDS", "WHY NOT"), rows, empty="no tasks")
    print(f"{ready} of {len(found)} ready")
    if common.json:
        print_json(found)
    return OK if ready == len(found) else FAILED


def _chosen(
    spec: str, limit: int | None, ids: Sequence[str], repos: Path | None, base: Sequence[str], common: Common
) -> list[Task]:
    options = SetOptions(repos, key_values(base, "--base"), os.environ, base_config(common))
    found = load_set(spec, options).tasks
    if missing := set(ids) - {task.task_id for task in found}:
        raise InvalidSpec(f"--task {sorted(missing)[0]}: the set has no such task")
    return [task for task in found if not ids or task.task_id in ids][:limit]


async def _check(tasks: list[Task], settings: RunSettings, rounds: int, common: Common) -> list[Admission]:
    over = 0

    def done(task_id: str, what: str) -> None:
        nonlocal over
        over += 1
        say(f"{over} of at most {len(tasks) * rounds * KINDS}: {what} of {task_id}")

    async with barchan.connect_async(**common.connection) as client:
        with progress("checking") as say:
            return await check(client, tasks, settings, rounds=rounds, done=done)


async def _prepare(tasks: list[Task], common: Common) -> list[Prepared]:
    async with barchan.connect_async(**common.connection) as client:
        with progress("preparing") as say:
            return await prepare_all(client, tasks, progress=say)


def _write(path: Path, ids: Sequence[str]) -> None:
    try:
        path.write_text("".join(f"{task_id}\n" for task_id in ids))
    except OSError as error:
        raise InvalidSpec(f"--write {path}: {error.strerror}") from error


def _admission_rows(found: Sequence[Admission]) -> list[list[str]]:
    """A long reason is told once; who has the same names the task that it stands at."""
    rows, first = [], dict[str, str]()
    for item in found:
        rewards = [_rewards(given) for given in (item.oracle, item.nop, item.empty)]
        why = "; ".join(item.why) or "-"
        at = first.setdefault(why, item.task_id)
        if at != item.task_id and len(why) > LONG_CHARS:
            why = f"as {at}"
        rows.append([item.task_id, _yes(item.admitted), *rewards, f"{item.seconds:.1f}", why])
    return rows


def _rewards(given: Sequence[float | None]) -> str:
    return " ".join("void" if reward is None else f"{reward:g}" for reward in given) or "-"


def _ready(item: Prepared) -> str:
    return "yes; no oracle tests its verifier" if item.untested else _yes(item.ready)


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
