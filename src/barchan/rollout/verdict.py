"""From facts to a verdict. Pure: no sandbox, no clock, no policy.

Two rules hold everything together. Only what the policy can have caused is scored, and then on the kernel's or the
checker's evidence. What nobody can explain is void. A policy must gain nothing by breaking the place where it is
graded, so a grading that ended without an answer is repeated with a known-good solution, the *control*: where that
passes, the candidate was the cause.
"""

import signal
import traceback
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import (
    BarchanError,
    BlobCorrupt,
    BlobUnavailable,
    BootFailed,
    CapacityError,
    ExecTimeout,
    Fault,
    GuestError,
    GuestOutOfMemory,
    GuestWrecked,
    ModelError,
    NotFound,
    OutputLimitExceeded,
    ProtocolError,
    RequirementMissing,
    SandboxExpired,
    SandboxLost,
    TaskError,
    TransportError,
)
from barchan.model.sandbox import ExecResult
from barchan.model.verdict import Cause, Evidence, Verdict

Outcome = Literal["passed", "failed", "raised", "garbled", "gone", "slow", "absent"]
Stage = Literal["setup", "create", "policy", "exec", "cleanup", "grade"]

# A grading ended without an answer, be it by the artifact's doing or not: a control decides.
UNDECIDED: frozenset[Cause] = frozenset({"grader_timeout", "grader_crash", "reward_missing", "reward_malformed"})
# A limit of the task's cut the attempt short; it is graded as far as it came.
TRUNCATING: frozenset[Cause] = frozenset({"turn_limit", "context_limit", "output_limit", "agent_timeout"})
MODEL_CAUSES: tuple[Cause, ...] = ("model_unreachable", "model_refused", "model_timeout", "model_garbage")
TASK_CAUSES: tuple[Cause, ...] = ("service_not_ready", "task_invalid")

# The first class that matches gives the cause. A guest's own doing, raised by `ExecResult.check()`, is the policy's:
# scored 0.
_GUEST_CAUSES: tuple[tuple[type[GuestError], Cause], ...] = (
    (ExecTimeout, "exec_timeout"),
    (OutputLimitExceeded, "output_limit"),
    (GuestOutOfMemory, "oom_within_limit"),
    (GuestWrecked, "guest_wrecked"),
    (GuestError, "completed"),
)
_VOID_CAUSES: tuple[tuple[type[BarchanError], Cause], ...] = (
    (CapacityError, "capacity"),
    (BootFailed, "boot_failure"),
    (BlobUnavailable, "image_unavailable"),
    (SandboxLost, "sandbox_lost"),
    (RequirementMissing, "image"),
    (BlobCorrupt, "image"),
    (TransportError, "transport"),
    (ProtocolError, "platform_bug"),
)


class CheckReport(Struct, frozen=True):
    """The checker's own account: how its checks ended, how many of them held, how often it called the candidate."""

    outcome: Outcome
    passed: int
    calls: int
    detail: str


class Checked(Struct, frozen=True, kw_only=True):
    """All that is known of one run of a function's checks.

    Attributes:
        report: None when the checker gave none.
        report_malformed: The checker wrote something else. The candidate cannot write there.
        checker: How the checker ended; None when it was not waited for.
        candidate: How the candidate's process ended; None when it had not, soon after the checker.
        cpu_s_max: The candidate's CPU limit, held by the kernel.
    """

    report: CheckReport | None
    report_malformed: bool = False
    checker: ExecResult
    candidate: ExecResult | None
    checks_total: int
    cpu_s_max: int


def judge(checked: Checked) -> Verdict:
    """The verdict of a function's checks, as if the attempt had been completed; undecided where only a control can
    tell the candidate's doing from the platform's.
    """
    evidence = _evidence(checked)
    report = checked.report
    if report is None and checked.report_malformed:
        return void("platform", "reward_malformed", evidence)
    if checked.checker.timed_out or (report is not None and report.outcome == "slow"):
        return void("platform", "grader_timeout", evidence)
    if report is None:
        return void("platform", "reward_missing", evidence)
    if report.outcome == "absent":
        return void("platform", "grader_start", evidence)
    if report.outcome == "passed":
        if report.passed != checked.checks_total or report.calls == 0:
            return void("task", "task_invalid", evidence)
        return scored(1.0, "completed", False, evidence)
    if report.outcome == "gone":
        cause = _end_of_candidate(checked)
        return void("platform", "grader_crash", evidence) if cause is None else scored(0.0, cause, False, evidence)
    return scored(0.0, "completed", False, evidence)


def _end_of_candidate(checked: Checked) -> Cause | None:
    """Why the candidate's process ended in the middle of its checks; None when it may not have been its own doing."""
    end = checked.candidate
    if end is None:
        return None
    if end.oom_killed:
        return "oom_within_limit"
    if end.signal == signal.SIGXCPU:
        return "exec_timeout"
    if end.signal == signal.SIGKILL:
        used_s = end.usage.user_s + end.usage.system_s
        return "exec_timeout" if used_s >= checked.cpu_s_max else None
    return "guest_wrecked"


def _evidence(checked: Checked) -> tuple[Evidence, ...]:
    facts: list[Evidence] = []
    report = checked.report
    if report is not None:
        facts.append(Evidence(source="checker", fact="outcome", value=report.outcome))
        facts.append(Evidence(source="checker", fact="checks_passed", value=report.passed))
        if report.detail:
            facts.append(Evidence(source="checker", fact="detail", value=report.detail))
    for source, end in (("checker process", checked.checker), ("candidate process", checked.candidate)):
        if end is None:
            facts.append(Evidence(source=source, fact="still running", value=True))
            continue
        if end.exit_code or end.timed_out:
            facts.append(Evidence(source=source, fact="exit_code", value=end.exit_code))
        if end.oom_killed:
            facts.append(Evidence(source=f"{source}, kernel's memory counter", fact="oom_killed", value=True))
        if end.timed_out:
            facts.append(Evidence(source=source, fact="timed_out", value=True))
    if report is None and checked.checker.stderr:
        facts.append(Evidence(source="checker process", fact="stderr", value=checked.checker.error_text[-400:]))
    if checked.candidate is not None:
        used_s = checked.candidate.usage.user_s + checked.candidate.usage.system_s
        facts.append(Evidence(source="candidate process, wait status", fact="cpu_s", value=round(used_s, 4)))
    return tuple(facts)


class Control(Struct, frozen=True, kw_only=True):
    """A known-good artifact of a task, graded as submissions are. `none`: the task has nothing to make one from."""

    outcome: Literal["good", "wrong", "undecided", "none"]
    verdict: Verdict | None = None


def control_of(verdict: Verdict) -> Control:
    """What a known-good artifact's verdict shows. Rewards above 1 are a task's own scale."""
    if verdict.reward is None:
        return Control(outcome="undecided", verdict=verdict)
    return Control(outcome="good" if verdict.reward >= 1.0 else "wrong", verdict=verdict)


def decided(first: Verdict, control: Control, second: Verdict | None = None) -> Verdict:
    """The verdict on a submission whose grading was undecided.

    Where the known-good artifact is graded as good, the submission is the cause: it is looked at once more, so that a
    moment's stall of the host becomes no zero, and without an answer again it scores 0. Where it is not, nobody knows.

    Args:
        second: The submission's second grading, after a good control.
    """
    told = control.verdict.evidence if control.outcome in ("wrong", "undecided") and control.verdict else ()
    facts = (Evidence(source="control", fact="known-good artifact", value=control.outcome), *told)
    if control.outcome == "none" or second is None:
        fault: Fault = {"wrong": "task", "undecided": "platform"}.get(control.outcome, first.fault)  # type: ignore[assignment]
        crashes = (first, control.verdict)  # a task's own function that fails for the known-good artifact, too
        if all(one is not None and (one.fault, one.cause) == ("task", "grader_crash") for one in crashes):
            fault = "task"
        return replace(first, fault=fault, evidence=first.evidence + facts)
    if not is_undecided(second):
        return replace(second, evidence=second.evidence + facts)
    is_oom = any(item.fact == "oom_killed" and item.value is True for item in first.evidence + second.evidence)
    cause: Cause = "exec_timeout" if second.cause == "grader_timeout" else "guest_wrecked"
    zero = scored(0.0, "oom_within_limit" if is_oom else cause, False, second.evidence + facts)
    return replace(zero, exposed=second.exposed)


def is_undecided(verdict: Verdict) -> bool:
    return verdict.status == "void" and verdict.cause in UNDECIDED


def ended_as(verdict: Verdict, ended: Cause) -> Verdict:
    """The verdict on an attempt whose own part ended so. A grading that found a cause of its own keeps it."""
    if verdict.status != "scored":
        return verdict
    cause = ended if verdict.cause == "completed" else verdict.cause
    return replace(verdict, cause=cause, fault=_fault_of(cause), truncated=verdict.truncated or ended in TRUNCATING)


def verdict_of_error(error: BaseException, stage: str) -> Verdict:
    """The verdict of a rollout that ended in an exception during `stage`. Anything unforeseen is void.

    While the policy is asked, whatever is raised is the doing of the model or of who wrote the policy, and no zero.
    """
    evidence: tuple[Evidence, ...] = (
        Evidence(source=f"{stage}: {type(error).__name__}", fact="message", value=str(error)[:400]),
    )
    if isinstance(error, ModelError):
        told = error.details.get("cause")
        return void("model", next((cause for cause in MODEL_CAUSES if cause == told), "model_garbage"), evidence)
    if isinstance(error, TaskError):
        told = error.details.get("cause")
        if "output" in error.details:
            evidence += (Evidence(source="task", fact="output", value=error.details["output"]),)
        return void("task", next((cause for cause in TASK_CAUSES if cause == told), "task_invalid"), evidence)
    if stage == "policy":
        place = traceback.extract_tb(error.__traceback__)[-1:]
        told_at = tuple(Evidence(source="policy", fact="at", value=f"{at.filename}:{at.lineno}") for at in place)
        return void("caller", "policy_error", evidence + told_at)
    if isinstance(error, GuestError):
        if stage in ("setup", "create", "grade"):  # nothing of the policy's was running
            return void("task", "grader_crash" if stage == "grade" else "task_invalid", evidence)
        return scored(0.0, next(cause for cls, cause in _GUEST_CAUSES if isinstance(error, cls)), False, evidence)
    if isinstance(error, SandboxExpired):
        return void("platform", "sandbox_expired", evidence)  # no rollout ends its sandbox before it is over
    if isinstance(error, NotFound) and "sandbox_id" in error.details:
        return void("platform", "sandbox_lost", evidence)
    if isinstance(error, BarchanError):
        found = next((cause for cls, cause in _VOID_CAUSES if isinstance(error, cls)), None)
        if isinstance(error, NotFound) and stage in ("setup", "create"):
            found = "image"
        if not {"layer", "layers"}.isdisjoint(error.details):
            found = "image"
        return void(error.fault, found or "unknown", evidence)
    return void("platform", "unknown", evidence)


def cancelled(stage: str, reason: Literal["user", "stale", "surplus"] = "user") -> Verdict:
    """The rollout was given up by whoever ran it."""
    causes: dict[str, Cause] = {"stale": "cancelled_stale", "surplus": "cancelled_surplus"}
    evidence = (Evidence(source="runner", fact="stage", value=stage),)
    return Verdict(
        status="cancelled", reward=None, fault="none", cause=causes.get(reason, "cancelled_user"), evidence=evidence
    )


def void(fault: Fault, cause: Cause, evidence: tuple[Evidence, ...]) -> Verdict:
    return Verdict(status="void", reward=None, fault=fault, cause=cause, evidence=evidence)


def scored(reward: float, cause: Cause, truncated: bool, evidence: tuple[Evidence, ...]) -> Verdict:
    fault = _fault_of(cause)
    return Verdict(status="scored", reward=reward, fault=fault, cause=cause, truncated=truncated, evidence=evidence)


def _fault_of(cause: Cause) -> Fault:
    return "none" if cause == "completed" else "policy"
