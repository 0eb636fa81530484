"""Snapshots that a rollout makes of its agent's sandbox as it goes, so that it can go on where that is lost.

Each replaces the one before. Their names are in the log before they are made: whoever ends the rollout, in whatever
process, knows them.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from barchan.errors import (
    BarchanError,
    InvalidSpec,
    NotSnapshotable,
    Preempted,
    RequirementMissing,
    SnapshotIncompatible,
)
from barchan.rollout.ports import Log, NoLog, Sandbox
from barchan.rollout.sandboxes import Sandboxes
from barchan.rollout.tools.base import Workspace
from barchan.sdk.aio.shell import ShellPoint
from barchan.trajectory.format import Entry

# What says that this backend, or this sandbox, keeps no processes; its files can be kept all the same.
_NO_MEMORY = (NotSnapshotable, SnapshotIncompatible, RequirementMissing, InvalidSpec)


class Taken(Struct, frozen=True, kw_only=True):
    """A snapshot that the log tells of.

    Attributes:
        seq: Of its intent; what comes before it is in the snapshot.
        shell: Where the agent's shell stood; it goes on there only `with_memory`.
    """

    seq: int
    snapshot_id: str
    with_memory: bool
    shell: ShellPoint | None


def snapshot_name(rollout_id: str, turn: int) -> str:
    return f"rollout-{rollout_id}-turn-{turn}"


async def snapshot_after(workspace: Workspace, log: Log, sandboxes: Sandboxes, turn: int) -> None:
    """Keep the agent's sandbox as it is after a turn, where the run wants that and it is due; its processes, too, where
    the backend can. Without a log there is nothing that could go on from it, and so no snapshot.

    A failure is in the log, and changes nothing for the rollout: it then has the snapshot before, or none. Where the
    sandbox is lost, the next operation finds that, too.

    Args:
        turn: How many turns were taken.

    Raises:
        Preempted: The rollout is to be left as it is.
    """
    every, rollout_id = sandboxes.snapshot_every, sandboxes.rollout_id
    if every <= 0 or turn % every or isinstance(log, NoLog):
        return
    sandbox, name, point = workspace.sandbox, snapshot_name(rollout_id, turn), workspace.point
    args = {"sandbox_id": sandbox.id, "name": name, "turn": turn}
    seq = log.intent("snapshot", {**args, **({"shell": asdict(point)} if point is not None else {})})
    earlier = [*sandboxes.state.snapshots]
    sandboxes.state.snapshots.append(name)
    try:
        outcome = await _taken(sandbox, name, {"rollout": rollout_id, "turn": str(turn)})
    except Preempted:
        raise
    except BarchanError as error:
        log.result(seq, {"error": {"type": type(error).__name__, "message": str(error)[:400]}})
        return
    log.result(seq, outcome)
    await _remove(sandboxes, earlier)


async def _taken(sandbox: Sandbox, name: str, metadata: dict[str, str]) -> dict[str, Any]:
    lost = ""
    try:
        made = await sandbox.snapshot(name, kind="memory", metadata=metadata)
    except _NO_MEMORY as error:
        lost = f"processes: {error}"[:400]
        made = await sandbox.snapshot(name, kind="fs", metadata=metadata)
    return {"snapshot_id": made.id, "snapshot_kind": made.kind, **({"lost": lost} if lost else {})}


async def remove_snapshots(sandboxes: Sandboxes) -> None:
    """Remove what a rollout has kept. What fails is noted, as other failures of tidying up."""
    await _remove(sandboxes, [*sandboxes.state.snapshots])


async def _remove(sandboxes: Sandboxes, names: Sequence[str]) -> None:
    for name in names:
        await sandboxes.remove_image(name)
        sandboxes.state.snapshots.remove(name)


def last_snapshot(entries: Sequence[Entry]) -> Taken | None:
    """The last one that was made."""
    results = {entry.of: entry.body for entry in entries if entry.kind == "snapshot" and entry.of is not None}
    for entry in reversed(entries):
        if entry.kind != "snapshot" or entry.part != "intent":
            continue
        result, shell = results.get(entry.seq, {}), entry.body.get("shell")
        if "snapshot_id" in result:
            return Taken(
                seq=entry.seq,
                snapshot_id=result["snapshot_id"],
                with_memory=result["snapshot_kind"] == "memory",
                shell=ShellPoint(**shell) if shell is not None else None,
            )
    return None
