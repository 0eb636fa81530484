"""`barchan trajectory replay`."""

import asyncio
import secrets
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

import barchan
from barchan.cli.common import DEFAULTS, FAILED, OK, Common, print_json, print_table
from barchan.errors import InvalidSpec, NotFound
from barchan.rollout.record import RolloutRecord
from barchan.rollout.regrade import artifact_of
from barchan.rollout.replay.full import Fidelity, as_json, replay
from barchan.rollout.settings import RunSettings
from barchan.rollout.store import read_rollouts, read_run, read_tasks
from barchan.rollout.task import Task
from barchan.sdk.aio.client import AsyncClient
from barchan.trajectory.format import FOLDER, SUFFIX, log_files, log_path
from barchan.trajectory.reader import load

DIFFERENCES_MAX = 20
NAMES_TOLD = 5


def replay_(
    source: Path,
    /,
    *,
    rollout: str | None = None,
    times: Annotated[int, Parameter(validator=Number(gte=1, lte=8))] = 1,
    common: Common = DEFAULTS,
) -> int:
    """Carry the operations of finished rollouts out again, each in a fresh
    sandbox of its task, and compare what they give with the log.

    The exit code is 0 where everything is equal, and 1 where something is not.

    For example:

        barchan trajectory replay runs/a/trajectories/a-000003.trajectory.jsonl
        barchan trajectory replay runs/a --rollout a-000003 --times 2 --json

    Args:
        source: A log in a run's folder, or that folder.
        rollout: Only this rollout of the folder.
        times: Replays of each. With two or more, what is not deterministic
            by itself is told from what differs from the log only.
    """
    folder, logs = _found(source, rollout)
    tasks = {task.task_id: task for task in read_tasks(folder)}
    records = {record.rollout_id: record for record in read_rollouts(folder)}
    found = asyncio.run(_replay(folder, logs, tasks, records, times, common))
    if common.json:
        print_json([as_json(item) for item in found])
    else:
        _tell(found)
    return OK if all(item.is_equal for item in found) else FAILED


def _found(source: Path, rollout: str | None) -> tuple[Path, list[Path]]:
    """The run's folder, and the logs that are meant."""
    if not source.is_dir():
        if rollout is not None:
            raise InvalidSpec("--rollout is of a run's folder, and this is one log")
        if source.parent.name != FOLDER:
            raise InvalidSpec(f"{source} lies in no run's folder, where its task is: replay it where it was written")
        return source.parent.parent, [source]
    if rollout is not None:
        return source, [_log_of(source, rollout)]
    logs = log_files(source / FOLDER)
    if not logs:
        raise NotFound(f"there is no trajectory log below {source} (try: a run's folder)")
    return source, logs


def _log_of(folder: Path, rollout: str) -> Path:
    path = log_path(folder, rollout)
    if path.exists():
        return path
    names = [log.name.removesuffix(SUFFIX) for log in log_files(folder / FOLDER)]
    more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
    there_are = f"there are: {', '.join(names[:NAMES_TOLD])}{more}" if names else "there is none"
    raise NotFound(f"{folder} has no log of a rollout {rollout!r}; {there_are} (try: barchan trajectory show {folder})")


async def _replay(
    folder: Path,
    logs: list[Path],
    tasks: dict[str, Task],
    records: dict[str, RolloutRecord],
    times: int,
    common: Common,
) -> list[Fidelity]:
    asked = read_run(folder).settings
    async with barchan.connect_async(**common.connection) as client:
        found = []
        for path in logs:
            settings = RunSettings(
                run_id=f"replay-{secrets.token_hex(4)}",
                template=str(asked.get("--template") or "debian"),
                backend=str(asked.get("--backend") or "container"),
                memory_mib=int(asked.get("--memory-mib") or 512),
            )
            found.append(await _one(client, settings, folder, path, tasks, records, times))
        return found


async def _one(
    client: AsyncClient,
    settings: RunSettings,
    folder: Path,
    path: Path,
    tasks: dict[str, Task],
    records: dict[str, RolloutRecord],
    times: int,
) -> Fidelity:
    log = load(path)
    header = log.header
    if header.task_id not in tasks:
        raise NotFound(f"{path}: the run's folder has no task {header.task_id}")
    record = records.get(header.rollout_id)
    has_left = record is not None and record.artifact_kind in ("file", "patch", "files")
    return await replay(
        client,
        settings,
        tasks[header.task_id],
        log.entries,
        rollout_id=header.rollout_id,
        policy_name=header.policy,
        kept=artifact_of(folder, record) if record is not None and has_left else None,
        times=times,
    )


def _tell(found: list[Fidelity]) -> None:
    columns = ("ROLLOUT", "TASK", "OPERATIONS", "EQUAL", "SHARE", "SKIPPED", "ARTIFACT", "FILES", "FIRST DIVERGENCE")
    print_table(columns, [_row(item) for item in found], empty="no logs")
    for item in found:
        for difference in item.differences[:DIFFERENCES_MAX]:
            by_itself = ", not deterministic by itself" if difference.seq in item.unstable else ""
            members = ", ".join(difference.members)
            sys.stdout.write(f"\n{item.rollout_id} entry {difference.seq}: {_flat(difference.text)}\n")
            sys.stdout.write(f"  {members} differs ({difference.why}{by_itself})\n")
            sys.stdout.write(f"  log:    {_flat(difference.expected)}\n  replay: {_flat(difference.got)}\n")
        if len(item.differences) > DIFFERENCES_MAX:
            sys.stdout.write(f"\n... and {len(item.differences) - DIFFERENCES_MAX} more of {item.rollout_id}\n")
        for skipped in item.skipped:
            text = f"{item.rollout_id} entry {skipped.seq}: {_flat(skipped.text)}: not carried out: {skipped.why}"
            sys.stdout.write(f"\n{text}\n")


def _row(item: Fidelity) -> list[str]:
    return [
        item.rollout_id,
        item.task_id,
        str(item.operations),
        str(item.equal),
        f"{item.share:.3f}",
        str(len(item.skipped)),
        item.artifact,
        item.files,
        "-" if item.first is None else f"entry {item.first.seq}: {item.first.why}",
    ]


def _flat(text: str) -> str:
    """A guest's output must not steer the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)[:160]
