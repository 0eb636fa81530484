"""Goes on with a rollout whose sandbox is gone: in a new one, made from the last snapshot or from the task's own start,
in which the operations since then are carried out again. Only if each gives what it gave before does it count.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from barchan.errors import BarchanError, NotFound, SnapshotIncompatible
from barchan.model.verdict import Evidence
from barchan.rollout.ports import Client, Log, NoLog, Sandbox
from barchan.rollout.replay.carrier import Carrier
from barchan.rollout.replay.operations import Operation, compare, operations, why_not_again
from barchan.rollout.replay.snapshots import Taken, last_snapshot
from barchan.rollout.sandboxes import Sandboxes
from barchan.rollout.setting_up import set_up
from barchan.rollout.task import Task
from barchan.sdk.aio.shell import ShellPoint
from barchan.trajectory.format import Entry

RESTORE_S_MAX = 900.0
SOURCE = "replay"


class Restored(NamedTuple):
    """A sandbox in which the agent's part can go on.

    Attributes:
        shell: Where the agent's shell stands in it; None: it has none yet.
        operations: How many were carried out again.
        snapshot: Id of the one that it was made from; "": the task's own start.
    """

    sandbox: Sandbox
    shell: ShellPoint | None
    operations: int
    snapshot: str


class _Start(NamedTuple):
    taken: Taken | None
    again: list[Operation]


async def restored(
    client: Client,
    task: Task,
    sandboxes: Sandboxes,
    entries: Sequence[Entry],
    *,
    log: Log,
    policy_name: str,
) -> Restored | Evidence:
    """A new sandbox in the state in which the log's last complete operation left the old one. What has no result in
    the log is not carried out: here it never began.

    Args:
        sandboxes: The rollout's own; `entries` are the whole log up to here.
        log: Is told of it, by one intent and its result.

    Returns:
        The sandbox, or why there is none: an operation that can't be repeated, or the first that gave another result.

    Raises:
        BarchanError: The platform failed at it; the sandbox that was being made is ended.
    """
    starts = _starts(task, entries)
    for start in starts:
        if isinstance(start, Evidence):
            continue
        found = await _restored_from(start, task, sandboxes, log, policy_name)
        if found is not None:
            return found
    return next(
        (start for start in starts if isinstance(start, Evidence)),
        Evidence(source=SOURCE, fact="not restored", value="its snapshot is gone"),
    )


def _starts(task: Task, entries: Sequence[Entry]) -> list[_Start | Evidence]:
    """What it can begin from, best first; for what it can't, why."""
    done, taken = operations(entries), last_snapshot(entries)
    starts: list[_Start | Evidence] = []
    if taken is not None:
        if not taken.with_memory and (why := _lost_with_processes(task, taken, done)):
            starts.append(Evidence(source=SOURCE, fact="the snapshot has no processes", value=why))
        else:
            starts.append(_checked(task, _Start(taken, [item for item in done if item.seq > taken.seq])))
    return [*starts, _checked(task, _Start(None, done))]


def _lost_with_processes(task: Task, taken: Taken, done: Sequence[Operation]) -> str:
    """What an agent would miss where only its files came back; a program left behind by an exec is among it."""
    before = [item for item in done if item.seq < taken.seq and item.kind == "exec"]
    if task.environment.services:
        return "the task's services ran"
    if any(item.is_shell for item in before):
        return "the agent's shell had a directory, variables and jobs"
    return "programs may have gone to the background" if before else ""


def _checked(task: Task, start: _Start) -> _Start | Evidence:
    if start.again and task.environment.network != "none":
        return Evidence(source=SOURCE, fact="not repeatable", value="the sandbox has a network")
    for item in start.again:
        if why := why_not_again(item):
            return Evidence(source=SOURCE, fact="not repeatable", value=f"entry {item.seq}: {item.text[:200]}: {why}")
    return start


async def _restored_from(
    start: _Start, task: Task, sandboxes: Sandboxes, log: Log, policy_name: str
) -> Restored | Evidence | None:
    """None: the snapshot is not there any more, or not for this host."""
    taken, again = start
    snapshot_id = taken.snapshot_id if taken is not None else ""
    seq = log.intent("restore", {"snapshot": snapshot_id, "operations": len(again)})
    await log.committed()
    log.check()  # whoever has taken it over meanwhile may have made one already
    await sandboxes.end_all("agent")  # also what an earlier life has half made
    sandbox: Sandbox | None = None
    try:
        sandbox = await sandboxes.create("agent", task.environment, template=snapshot_id or None)
        async with asyncio.timeout(RESTORE_S_MAX):
            if taken is None:
                await set_up(sandbox, task, policy_name, NoLog())
            found = await _gone_on(sandbox, taken, again)
        if isinstance(found, Restored):
            log.result(seq, {"sandbox_id": sandbox.id, "equal": len(again)})
            return found
    except BaseException as error:
        if sandbox is not None:
            await sandboxes.end(sandbox, "agent")
        if isinstance(error, BarchanError | TimeoutError):
            log.result(seq, {"error": {"type": type(error).__name__, "message": str(error)[:400]}})
        if isinstance(error, NotFound | SnapshotIncompatible) and sandbox is None and taken is not None:
            return None
        if isinstance(error, TimeoutError):
            return Evidence(source=SOURCE, fact="not restored", value=f"not done in {RESTORE_S_MAX:g} s")
        raise
    await sandboxes.end(sandbox, "agent")
    log.result(seq, {"error": {"type": found.fact, "message": found.value}})
    return found


async def _gone_on(sandbox: Sandbox, taken: Taken | None, again: Sequence[Operation]) -> Restored | Evidence:
    carrier = Carrier(sandbox, taken.shell if taken is not None and taken.with_memory else None)
    for item in again:
        difference = compare(item, await carrier.carry_out(item))
        if difference is not None:
            told = f"entry {item.seq}: {item.text[:160]}: {', '.join(difference.members)} ({difference.why})"
            return Evidence(source=SOURCE, fact="first divergence", value=told)
    snapshot_id = taken.snapshot_id if taken is not None else ""
    return Restored(sandbox, carrier.point, len(again), snapshot_id)
