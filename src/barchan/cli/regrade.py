"""`barchan regrade`."""

import asyncio
import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

import barchan
from barchan.cli.common import DEFAULTS, FAILED, OK, Common, print_json, print_table
from barchan.errors import BackendError, InvalidSpec, NotFound, TaskError
from barchan.model.verdict import Verdict
from barchan.rollout.graders import grader_of
from barchan.rollout.record import RolloutRecord
from barchan.rollout.regrade import Regrading, gradable, grade_again
from barchan.rollout.settings import RunSettings
from barchan.rollout.store import read_rollouts, read_run, read_tasks
from barchan.rollout.task import Task
from barchan.rollout.tasksets import load_set

GRADERS_PER_CPU = 2
ROWS_MAX = 40
CHANGES = ("same", "changed", "newly void", "no longer void")


def regrade(
    folder: Path,
    /,
    *,
    tasks: str | None = None,
    graders: Annotated[int, Parameter(validator=Number(gte=1))] | None = None,
    template: str | None = None,
    memory_mib: Annotated[int, Parameter(validator=Number(gte=16))] | None = None,
    common: Common = DEFAULTS,
) -> int:
    """Grade the finished rollouts of a run again, from the artifacts that they
    have left, and tell what is different.

    Writes the records with their new verdicts to regrade-N.jsonl in the run's
    folder, and changes nothing else there. The exit code is 0 when anything was
    scored, and 1 when nothing was.

    Examples:

        barchan regrade runs/a
        barchan regrade runs/a --tasks ./mended_tasks.py

    Parameters
    ----------
    folder
        The run's folder.
    tasks
        A set as "barchan rollout" takes it, whose graders are used.
        [default: the run's own tasks, as they were]
    graders
        Gradings at once. [default: 2 per CPU of this machine]
    template
        Image for tasks without one of their own. [default: the run's]
    memory_mib
        Memory of each sandbox, where the task does not say. [default: the run's]
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the run's own graders were found there, too
    asked = read_run(folder).settings
    settings = RunSettings(
        run_id=f"regrade-{secrets.token_hex(4)}",
        template=template or str(asked.get("--template") or "debian"),
        backend=str(asked.get("--backend") or "container"),
        memory_mib=memory_mib or int(asked.get("--memory-mib") or 512),
        graders=graders or GRADERS_PER_CPU * len(os.sched_getaffinity(0)),
        keep_images=True,
    )
    by_id = {task.task_id: task for task in (read_tasks(folder) if tasks is None else load_set(tasks).tasks)}
    records = read_rollouts(folder)
    chosen = [record for record in records if gradable(record) and record.task_id in by_id]
    if not chosen:
        raise NotFound(f"{folder}: none of its {len(records)} rollouts left something that these tasks can grade")
    _check_graders(by_id[task_id] for task_id in {record.task_id: None for record in chosen})
    path, file = _results(folder)
    with file:
        done = asyncio.run(_regrade(folder, settings, chosen, by_id, file, common))
    _tell(done, len(records) - len(chosen), path, as_json=common.json)
    return OK if any(item.record.verdict.status == "scored" for item in done) else FAILED


def _check_graders(tasks: Iterable[Task]) -> None:
    """Better one line now than every rollout void."""
    for task in tasks:
        try:
            grader_of(task.grader)
        except TaskError as error:
            hint = "give --tasks with the file that it is in, or start where Python finds it"
            raise TaskError(f"task {task.task_id}: {error}; {hint}") from error


def _results(folder: Path) -> tuple[Path, IO[bytes]]:
    """The first free name, made."""
    number = 1
    while True:
        path = folder / f"regrade-{number}.jsonl"
        try:
            return path, path.open("xb")
        except FileExistsError:
            number += 1
        except OSError as error:
            raise InvalidSpec(f"{path}: {error.strerror}") from error


async def _regrade(
    folder: Path,
    settings: RunSettings,
    records: list[RolloutRecord],
    tasks: dict[str, Task],
    file: IO[bytes],
    common: Common,
) -> list[Regrading]:
    done: list[Regrading] = []

    def keep(item: Regrading) -> None:
        try:
            file.write(msgspec.json.encode(item.record) + b"\n")
            file.flush()
        except OSError as error:
            raise BackendError(f"the results can't be written to {folder}: {error.strerror}") from error
        done.append(item)

    async with barchan.connect_async(**common.connection) as client:
        await grade_again(client, settings, folder, records, tasks, keep)
    return done


def _tell(done: list[Regrading], left_out: int, path: Path, *, as_json: bool) -> None:
    counts = {change: sum(item.change == change for item in done) for change in CHANGES}
    different = sorted((item for item in done if item.change != "same"), key=lambda item: item.record.rollout_id)
    columns = ("ROLLOUT", "TASK", "OLD", "NEW", "CHANGE", "CAUSE")
    print_table(columns, [_row(item) for item in different[:ROWS_MAX]], empty="every verdict is the same")
    if len(different) > ROWS_MAX:
        sys.stdout.write(f"... and {len(different) - ROWS_MAX} more\n")
    before, after = _mean(item.before for item in done), _mean(item.record.verdict for item in done)
    told = ", ".join(f"{count} {change}" for change, count in counts.items())
    sys.stdout.write(f"{len(done)} graded again: {told}; {left_out} left out\n")
    sys.stdout.write(f"mean reward {_number(after)}, was {_number(before)}; results in {path}\n")
    if as_json:
        print_json(
            {
                "graded": len(done),
                **{change.replace(" ", "_"): count for change, count in counts.items()},
                "left_out": left_out,
                "reward_mean_before": before,
                "reward_mean": after,
                "out": str(path),
            }
        )


def _row(item: Regrading) -> list[str]:
    before, after = item.before, item.record.verdict
    shown = [verdict.status if verdict.reward is None else f"{verdict.reward:g}" for verdict in (before, after)]
    return [item.record.rollout_id, item.record.task_id, *shown, item.change, after.cause]


def _mean(verdicts: Iterable[Verdict]) -> float | None:
    rewards = [verdict.reward for verdict in verdicts if verdict.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
