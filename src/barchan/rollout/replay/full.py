"""Carries all operations of a finished rollout out again, in fresh sandboxes of its task, and says how far that gives
the same.
"""

import hashlib
import io
import tarfile
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from barchan.errors import BarchanError, GuestError
from barchan.rollout.artifact import take
from barchan.rollout.graders.base import Artifact
from barchan.rollout.ports import Client, NoLog, Sandbox
from barchan.rollout.replay.carrier import Carrier
from barchan.rollout.replay.operations import Difference, Operation, compare, digest, operations, why_not_again
from barchan.rollout.sandboxes import Sandboxes, SandboxesState
from barchan.rollout.setting_up import set_up
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import DiffArtifact, SharedArtifact, Task
from barchan.rollout.tools.base import Workspace, in_time, is_guests_doing
from barchan.trajectory.format import Entry

TREE_BYTES_MAX = 256 << 20
TREE_S_MAX = 120.0
# Below the agent's directory, what programs make anew each time: caches, locks, histories.
VOLATILE = ("__pycache__", ".cache", ".pytest_cache", ".mypy_cache", ".bash_history", ".python_history")
Same = Literal["equal", "different", "unknown"]


class Skipped(Struct, frozen=True, kw_only=True):
    """An operation that was not carried out again, and why."""

    seq: int
    text: str
    why: str


class Fidelity(Struct, frozen=True, kw_only=True):
    """How far a replay came out like its log.

    Attributes:
        operations: In the log; each is in `equal`, `differences` or `skipped`.
        share: Of those carried out, how many were equal; 1.0 where there were none.
        differences: The first is where the replay left the log's way; later ones may follow from it.
        unstable: Seqs of operations that also differ between two replays: they are not deterministic by themselves.
            Empty where there was one replay only.
        artifact: What leaves the sandbox, against what left the log's.
        files: The agent's directory at the end of one replay against another's.
        files_digest: Of that directory after the first replay: names, kinds, modes, contents and link targets, without
            times and what `VOLATILE` names; "": it could not be read.
    """

    rollout_id: str
    task_id: str
    operations: int
    equal: int
    share: float
    differences: tuple[Difference, ...]
    skipped: tuple[Skipped, ...]
    unstable: tuple[int, ...]
    artifact: Same
    files: Same
    files_digest: str

    @property
    def first(self) -> Difference | None:
        """Where it left the log's way."""
        return self.differences[0] if self.differences else None

    @property
    def is_equal(self) -> bool:
        """Whether everything was carried out, and nothing that was looked at came out otherwise."""
        return not self.differences and not self.skipped and "different" not in (self.artifact, self.files)


class _Play(Struct, frozen=True, kw_only=True):
    differences: dict[int, Difference]
    skipped: tuple[Skipped, ...]
    digests: dict[int, str]
    artifact: Same
    files_digest: str


async def replay(
    client: Client,
    settings: RunSettings,
    task: Task,
    entries: Sequence[Entry],
    *,
    rollout_id: str,
    policy_name: str,
    kept: Artifact | None = None,
    times: int = 1,
) -> Fidelity:
    """Carry a rollout's operations out again, on and on also where results differ.

    Args:
        settings: Its `run_id` begins the new sandboxes' ids, and must be another each time.
        kept: What left the rollout's own sandbox, where that is known.
        times: Replays, each in a sandbox of its own; with two, what is not deterministic by itself is told from what
            differs from the log only.

    Raises:
        BarchanError: The platform failed; no sandbox is left.
    """
    done = operations(entries)
    plays = [await _play(client, settings, task, done, number, policy_name, kept) for number in range(times)]
    first = plays[0]
    carried = len(done) - len(first.skipped)
    digests = {play.files_digest for play in plays}
    return Fidelity(
        rollout_id=rollout_id,
        task_id=task.task_id,
        operations=len(done),
        equal=carried - len(first.differences),
        share=1.0 if carried == 0 else (carried - len(first.differences)) / carried,
        differences=tuple(first.differences.values()),
        skipped=first.skipped,
        unstable=tuple(
            seq for seq in first.digests if any(play.digests.get(seq) != first.digests[seq] for play in plays[1:])
        ),
        artifact=first.artifact,
        files="unknown" if times == 1 or "" in digests else "equal" if len(digests) == 1 else "different",
        files_digest=first.files_digest,
    )


async def _play(
    client: Client,
    settings: RunSettings,
    task: Task,
    done: Sequence[Operation],
    number: int,
    policy_name: str,
    kept: Artifact | None,
) -> _Play:
    differences: dict[int, Difference] = {}
    digests: dict[int, str] = {}
    skipped: list[Skipped] = []
    made = Sandboxes(client, settings, f"{settings.run_id}-{number}", state=SandboxesState())
    async with made.opened("agent", task.environment) as sandbox:
        await set_up(sandbox, task, policy_name, NoLog())
        carrier = Carrier(sandbox)
        for item in done:
            if why := why_not_again(item):
                skipped.append(Skipped(seq=item.seq, text=item.text, why=why))
                continue
            outcome = await carrier.carry_out(item)
            digests[item.seq] = digest(outcome)
            if difference := compare(item, outcome):
                differences[item.seq] = difference
        files_digest = await _files_digest(sandbox, task)
        return _Play(
            differences=differences,
            skipped=tuple(skipped),
            digests=digests,
            artifact=await _artifact(sandbox, task, kept),
            files_digest=files_digest,
        )


async def _artifact(sandbox: Sandbox, task: Task, kept: Artifact | None) -> Same:
    """Of a layer or a sandbox nothing is left to compare with, nor of an artifact that its record could not hold."""
    if kept is None or kept.notes or isinstance(task.artifact, DiffArtifact | SharedArtifact):
        return "unknown"
    taken = await take(Workspace(sandbox, task.limits.output_chars_max), task, "")
    if not isinstance(taken, Artifact):
        return "different"
    if kept.kind == "files":
        return "equal" if tree_digest(taken.data) == tree_digest(kept.data) else "different"
    return "equal" if taken.data == kept.data else "different"


async def _files_digest(sandbox: Sandbox, task: Task) -> str:
    try:
        data = await in_time(
            sandbox.files.read_tar(task.environment.workdir or ".", max_bytes=TREE_BYTES_MAX), TREE_S_MAX
        )
        return tree_digest(data)
    except BarchanError as error:  # too large, or not readable: the guest's doing, and no failure of the replay
        if not isinstance(error, GuestError) and not is_guests_doing(error):
            raise
        return ""
    except tarfile.TarError:
        return ""


def tree_digest(data: bytes) -> str:
    """Digest of the files of a tar, but for times, owners and what programs make anew each time.

    Raises:
        tarfile.TarError: It is none.
    """
    found: list[bytes] = []
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            if not set(member.name.split("/")).isdisjoint(VOLATILE) or member.name.endswith(".pyc"):
                continue
            file = tar.extractfile(member) if member.isreg() else None
            content = hashlib.sha256(file.read()).hexdigest() if file is not None else member.linkname
            found.append(repr((member.name.rstrip("/"), member.type, member.mode & 0o7777, content)).encode())
    return hashlib.sha256(b"\n".join(sorted(found))).hexdigest()


def as_json(found: Fidelity) -> dict[str, Any]:
    """A report as `--json` prints it."""
    return {
        **{name: getattr(found, name) for name in found.__struct_fields__},
        "first_divergence": found.first,
        "is_equal": found.is_equal,
    }
