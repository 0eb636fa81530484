"""All of an attempt that changes, in one place, and the line of the results that it becomes."""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from barchan.errors import CallerError
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.artifact import text_of
from barchan.rollout.calls import Message, Observation, ToolCall, ToolResult
from barchan.rollout.graders.base import Artifact
from barchan.rollout.limits import Meter
from barchan.rollout.prompts import NO_CALL
from barchan.rollout.record import Completion, RolloutRecord, Timings
from barchan.rollout.sandboxes import SandboxesState
from barchan.rollout.task import Task
from barchan.rollout.verdict import Stage
from barchan.sdk.aio.shell import ShellPoint


class Decided(Struct, frozen=True, kw_only=True):
    """What a policy's step wants done, as `policies.Step` has it."""

    tool_calls: tuple[ToolCall, ...] = ()
    is_last: bool = False
    cause: Cause | None = None


class Done(Struct, frozen=True, kw_only=True):
    """A call that was carried out, or was not and says so.

    Attributes:
        counts_as: Name of the tool; None: it was not carried out.
        over: Why it ended the attempt.
    """

    result: ToolResult
    agent_s: float = 0.0
    counts_as: str | None = None
    over: Cause | None = None


@dataclass(kw_only=True)
class Turn:
    """A turn that was planned. It is over when each of its calls has its result.

    Attributes:
        timeout_s: For each call, as its driver asked.
    """

    calls: list[ToolCall]
    timeout_s: float | None = None
    results: list[ToolResult] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return len(self.results) == len(self.calls)


@dataclass(kw_only=True)
class AttemptState:
    """Values only, so that it pickles with the rollout: a copy goes on where this one is. What changes it is in the
    trajectory log, too, from which `resuming.forward` makes it again.

    Attributes:
        since: When `stage` began, on this machine's monotonic clock, as is `started`.
        sandbox_id: The agent's sandbox, as long as it lives.
        shell: Where the agent's shell stood, between two turns.
        said: Text of the model call that the next turn belongs to.
        pending: Model calls that no turn belongs to yet, of `completions`.
        decided: What the policy wants done and was not yet begun.
        is_last, ended_by: Of the last turn's step: no further one is wanted, and how the policy's part ended.
        turn: The one that is under way.
        asked_again: Times that a policy may have been asked a second time for the same turn, since its answer was lost.
        answered: Steps that were given by the log, as it went on.
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
    pending: int = 0
    decided: Decided | None = None
    is_last: bool = False
    ended_by: Cause | None = None
    turn: Turn | None = None
    asked_again: int = 0
    answered: int = 0
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

    def go_on(self, unix_s: float) -> None:
        """Count from now, on this machine's clock, what another process has begun; what lay between was nobody's time.

        Args:
            unix_s: The wall clock's now.
        """
        self.since = time.monotonic()
        self.started = self.since - max(0.0, unix_s - self.started_unix_s)

    def enter(self, stage: Stage) -> None:
        """Go on to a stage; the time since the last one is that one's."""
        now = time.monotonic()
        self.spent_s[self.stage] += now - self.since
        self.stage, self.since = stage, now

    def seen(self, schemas: tuple[dict[str, Any], ...], results: tuple[ToolResult, ...] = ()) -> Observation:
        """What a policy knows before its next turn.

        Args:
            schemas: Of its tools.
            results: Of its last turn.
        """
        return Observation(
            messages=tuple(self.messages),
            tools=schemas,
            left=self.meter.left,
            turn=self.meter.turns,
            results=results,
            over=self.over,
        )

    @property
    def asides(self) -> tuple[Evidence, ...]:
        """What went on beside the attempt, for its verdict's evidence."""
        if not self.asked_again:
            return self.sandboxes.notes
        return (*self.sandboxes.notes, Evidence(source="resume", fact="steps asked for again", value=self.asked_again))

    # what happens in an attempt, as it happens and as a log tells it

    def sampled(self, completion: Completion) -> None:
        self.completions.append(completion)
        self.meter.tokens += completion.completion_tokens
        self.said = completion.text
        self.pending += 1

    def begin_turn(self, turn: Turn) -> None:
        """Say what is wanted; from now on the calls are carried out."""
        message: Message = {"role": "assistant", "content": self.said}
        if turn.calls:
            message["tool_calls"] = [call.as_message for call in turn.calls]
        self.messages.append(message)
        if self.decided is not None:
            self.is_last, self.ended_by = self.decided.is_last, self.decided.cause
        self.said, self.pending, self.decided, self.turn = "", 0, None, turn

    def take(self, turn: Turn, done: Done) -> None:
        """One call's result."""
        turn.results.append(done.result)
        if done.counts_as is not None:
            self.calls[done.counts_as] += 1
            self.malformed += done.result.status == "malformed"
        self.meter.agent_s += done.agent_s
        self.over = self.over or done.over

    def end_turn(self, turn: Turn) -> Message | None:
        """All calls are carried out; returns what a policy that made none is told."""
        self.turn = None
        self.meter.turns += 1
        self.over = self.over or self.meter.reached
        for result in turn.results:
            self.messages.append({"role": "tool", "tool_call_id": result.call_id, "content": result.content})
        if turn.results or self.over is not None:
            return None
        self.messages.append({"role": "user", "content": NO_CALL})
        return self.messages[-1]


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
    agent = [sandbox_id for sandbox_id in state.sandboxes.ids["agent"] if sandbox_id]
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
        agent_sandbox_id=agent[-1] if agent else None,
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
