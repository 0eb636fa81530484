"""All of an attempt that changes, in one place, and the line of the results that it becomes."""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from barchan.errors import CallerError
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.artifact import text_of
from barchan.rollout.calls import Message
from barchan.rollout.graders.base import Artifact
from barchan.rollout.limits import Meter
from barchan.rollout.record import Completion, RolloutRecord, Timings
from barchan.rollout.sandboxes import SandboxesState
from barchan.rollout.task import Task
from barchan.rollout.verdict import Stage
from barchan.sdk.aio.shell import ShellPoint


@dataclass(kw_only=True)
class AttemptState:
    """Values only, so that it pickles with the rollout: a copy goes on where this one is.

    Attributes:
        since: When `stage` began, on this machine's monotonic clock, as is `started`.
        sandbox_id: The agent's sandbox, as long as it lives.
        shell: Where the agent's shell stood, between two turns.
        said: Text of the model call that the next turn belongs to.
        over: Why no further turn is taken.
        artifact: Without its sandbox where it is `shared`: that is the one of `sandbox_id`.
        head_hash: Of the trajectory log's last entry.
        image: Name of the image that a `diff` artifact is, or was about to be.
        ended: How the policy's part ended, once it was handed in; `facts` says how far it came.
    """

    meter: Meter
    messages: list[Message]
    stage: Stage = "setup"
    since: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.monotonic)
    started_unix_s: float = field(default_factory=time.time)
    spent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    first_s: float | None = None
    sandbox_id: str | None = None
    sandboxes: SandboxesState = field(default_factory=SandboxesState)
    shell: ShellPoint | None = None
    said: str = ""
    completions: list[Completion] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    malformed: int = 0
    over: Cause | None = None
    ended: Cause | None = None
    facts: tuple[Evidence, ...] = ()
    artifact: Artifact | None = None
    image: str = ""
    verdict: Verdict | None = None
    head_hash: str = ""

    def enter(self, stage: Stage) -> None:
        """Go on to a stage; the time since the last one is that one's."""
        now = time.monotonic()
        self.spent_s[self.stage] += now - self.since
        self.stage, self.since = stage, now


def record_of(
    state: AttemptState, task: Task, *, run_id: str, rollout_id: str, place: tuple[int, int, int], policy: str
) -> RolloutRecord:
    """An ended attempt as a line of the results.

    Args:
        place: `group_index`, `sample_index`, `attempt`.
    """
    if state.verdict is None:
        raise CallerError(f"rollout {rollout_id} has not ended")
    group_index, sample_index, attempt = place
    agent = state.sandboxes.ids["agent"]
    return RolloutRecord(
        run_id=run_id,
        rollout_id=rollout_id,
        task_id=task.task_id,
        sample_index=sample_index,
        group_index=group_index,
        attempt=attempt,
        policy=policy,
        verdict=state.verdict,
        timings=_timings(state),
        started_unix_s=round(state.started_unix_s, 3),
        agent_sandbox_id=agent[0] if agent else None,
        grader_sandbox_ids=tuple(state.sandboxes.ids["grader"] + state.sandboxes.ids["control"]),
        turns=state.meter.turns,
        tool_calls=dict(state.calls),
        malformed_calls=state.malformed,
        agent_s=round(state.meter.agent_s, 4),
        prompt_tokens=sum(completion.prompt_tokens for completion in state.completions),
        completion_tokens=state.meter.tokens,
        resources=state.sandboxes.resources,
        artifact=text_of(state.artifact) if state.artifact is not None else None,
        artifact_kind=state.artifact.kind if state.artifact is not None else None,
        head_hash=state.head_hash,
        completions=tuple(state.completions),
    )


def _timings(state: AttemptState) -> Timings:
    spent_s = {**state.spent_s, "queue": state.sandboxes.queue_s, "total": time.monotonic() - state.started}
    for untold in ("create", "cleanup"):
        spent_s.pop(untold, None)
    if "agent" in state.sandboxes.create_s:
        spent_s["create"] = state.sandboxes.create_s["agent"]
        if state.first_s is not None:
            spent_s["ttfi"] = spent_s["create"] + state.first_s
    return Timings(**{f"{stage}_ms": round(seconds * 1e3, 3) for stage, seconds in spent_s.items()})
