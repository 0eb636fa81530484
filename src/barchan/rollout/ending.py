"""How an attempt's own part ends: its artifact, and what is known before anything is graded."""

from barchan.errors import BarchanError
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.limits import Meter
from barchan.rollout.task import FileArtifact, Task
from barchan.rollout.tools import Workspace
from barchan.rollout.verdict import TRUNCATING, scored

ARTIFACT_BYTES_MAX = 1 << 20


async def take_artifact(workspace: Workspace, task: Task) -> bytes | Evidence:
    """The one file that may leave the agent's sandbox, or why there is none.

    The reader takes regular files only, and one byte more than is allowed, to see whether there is more.
    """
    assert isinstance(task.artifact, FileArtifact)
    try:
        return await workspace.sandbox.files.read(task.artifact.path, length=ARTIFACT_BYTES_MAX + 1)
    except BarchanError as error:
        if not await workspace.is_guests_doing(error):
            raise
        return Evidence(source=f"artifact: {type(error).__name__}", fact="not readable", value=str(error)[:400])


def ungraded(data: bytes | Evidence, ended: Cause, facts: tuple[Evidence, ...]) -> Verdict | None:
    """The verdict on an artifact that needs no grading, which is zero; None where it has to be graded."""
    if isinstance(data, Evidence):
        return scored(0.0, ended, ended in TRUNCATING, (data, *facts))
    if len(data) > ARTIFACT_BYTES_MAX:
        fact = Evidence(source="artifact", fact="larger than bytes", value=ARTIFACT_BYTES_MAX)
        return scored(0.0, "output_limit", True, (fact, *facts))
    if not data.strip():
        fact = Evidence(source="artifact", fact="empty, of bytes", value=len(data))
        return scored(0.0, ended, ended in TRUNCATING, (fact, *facts))
    return None


def limit_facts(meter: Meter, ended: Cause) -> tuple[Evidence, ...]:
    """How far the attempt came, where a limit ended it."""
    used: dict[Cause, tuple[str, float]] = {
        "turn_limit": ("turns", meter.turns),
        "context_limit": ("completion tokens", meter.tokens),
        "agent_timeout": ("seconds of the agent's programs", round(meter.agent_s, 3)),
    }
    if ended not in used:
        return ()
    fact, value = used[ended]
    return (Evidence(source="limits", fact=fact, value=value),)
