"""From facts to a verdict. Pure: no sandbox, no clock, no policy.

Two rules hold everything together. Only what the policy can have caused is scored, and then on the kernel's or the
checker's evidence. What nobody can explain is void. A policy must gain nothing by breaking the place where it is
graded, so a grading that ended without an answer is repeated with a known-good solution, the *control*: where that
passes, the candidate was the cause.
"""

import signal
from typing import Literal

from msgspec import Struct

from barchan.errors import (
    BarchanError,
    BlobCorrupt,
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
Control = Literal["not_run", "passed", "failed"]

# A limit of the task's cut the attempt short; it is graded as far as it came.
TRUNCATING: frozenset[Cause] = frozenset({"turn_limit", "context_limit", "output_limit", "agent_timeout"})
MODEL_CAUSES: tuple[Cause, ...] = ("model_unreachable", "model_refused", "model_timeout", "model_garbage")

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


class Grading(Struct, frozen=True, kw_only=True):
    """All that is known of one grading.

    Attributes:
        report: None when the checker gave none.
        report_malformed: The checker wrote something else. The candidate cannot write there.
        checker: How the checker ended; None when it was not waited for.
        candidate: How the candidate's process ended; None when it had not, soon after the checker.
        cpu_s_max: The candidate's CPU limit, held by the kernel.
        control: The known-good solution graded after this one.
    """

    report: CheckReport | None
    report_malformed: bool = False
    checker: ExecResult
    candidate: ExecResult | None
    checks_total: int
    cpu_s_max: int
    control: Control = "not_run"


def needs_control(grading: Grading) -> bool:
    """Whether only a control can tell the candidate's doing from the platform's."""
    if grading.report is None:
        return not grading.report_malformed
    if grading.report.outcome == "gone":
        return _end_of_candidate(grading) is None
    return grading.report.outcome == "slow"


def judge(grading: Grading, *, cause: Cause = "completed", truncated: bool = False) -> Verdict:
    """The verdict of a grading. `cause` and `truncated` say how the policy's own part ended."""
    evidence = _evidence(grading)
    report = grading.report
    if report is None or needs_control(grading):
        return _judge_by_control(grading, evidence, truncated)
    if report.outcome == "absent":
        return void("platform", "grader_start", evidence)
    if report.outcome == "passed":
        if report.passed != grading.checks_total or report.calls == 0:
            return void("task", "task_invalid", evidence)
        return scored(1.0, cause, truncated, evidence)
    if report.outcome == "gone":
        return scored(0.0, _end_of_candidate(grading) or "guest_wrecked", truncated, evidence)
    return scored(0.0, cause, truncated, evidence)


def _judge_by_control(grading: Grading, evidence: tuple[Evidence, ...], truncated: bool) -> Verdict:
    report, ends = grading.report, [end for end in (grading.checker, grading.candidate) if end is not None]
    if grading.report_malformed:
        return void("platform", "reward_malformed", evidence)
    slow = grading.checker.timed_out or (report is not None and report.outcome == "slow")
    if grading.control == "failed":
        return void("platform", "grader_timeout" if slow else "grader_crash", evidence)
    if grading.control == "not_run":
        return void("platform", "grader_timeout" if slow else "reward_missing", evidence)
    if any(end.oom_killed for end in ends):
        return scored(0.0, "oom_within_limit", truncated, evidence)
    return scored(0.0, "exec_timeout" if slow else "guest_wrecked", truncated, evidence)


def _end_of_candidate(grading: Grading) -> Cause | None:
    """Why the candidate's process ended in the middle of its checks; None when it may not have been its own doing."""
    end = grading.candidate
    if end is None:
        return None
    if end.oom_killed:
        return "oom_within_limit"
    if end.signal == signal.SIGXCPU:
        return "exec_timeout"
    if end.signal == signal.SIGKILL:
        used_s = end.usage.user_s + end.usage.system_s
        return "exec_timeout" if used_s >= grading.cpu_s_max else None
    return "guest_wrecked"


def _evidence(grading: Grading) -> tuple[Evidence, ...]:
    facts: list[Evidence] = []
    report = grading.report
    if report is not None:
        facts.append(Evidence(source="checker", fact="outcome", value=report.outcome))
        facts.append(Evidence(source="checker", fact="checks_passed", value=report.passed))
        if report.detail:
            facts.append(Evidence(source="checker", fact="detail", value=report.detail))
    for source, end in (("checker process", grading.checker), ("candidate process", grading.candidate)):
        if end is None:
            facts.append(Evidence(source=source, fact="still running", value=True))
            continue
        if end.exit_code or end.timed_out:
            facts.append(Evidence(source=source, fact="exit_code", value=end.exit_code))
        if end.oom_killed:
            facts.append(Evidence(source=f"{source}, kernel's memory counter", fact="oom_killed", value=True))
        if end.timed_out:
            facts.append(Evidence(source=source, fact="timed_out", value=True))
    if report is None and grading.checker.stderr:
        facts.append(Evidence(source="checker process", fact="stderr", value=grading.checker.error_text[-400:]))
    if grading.candidate is not None:
        used_s = grading.candidate.usage.user_s + grading.candidate.usage.system_s
        facts.append(Evidence(source="candidate process, wait status", fact="cpu_s", value=round(used_s, 4)))
    if grading.control != "not_run":
        facts.append(Evidence(source="control", fact="known-good solution", value=grading.control))
    return tuple(facts)


def verdict_of_error(error: BaseException, stage: str) -> Verdict:
    """The verdict of a rollout that ended in an exception during `stage`. Anything unforeseen is void.

    While the policy is asked, whatever is raised is the doing of the model or of who wrote the policy, and no zero.
    """
    evidence = (Evidence(source=f"{stage}: {type(error).__name__}", fact="message", value=str(error)[:400]),)
    if isinstance(error, ModelError):
        told = error.details.get("cause")
        return void("model", next((cause for cause in MODEL_CAUSES if cause == told), "model_garbage"), evidence)
    if isinstance(error, TaskError):
        return void("task", "task_invalid", evidence)
    if stage == "policy":
        return void("caller", "unknown", evidence)
    if isinstance(error, GuestError):
        return scored(0.0, next(cause for cls, cause in _GUEST_CAUSES if isinstance(error, cls)), False, evidence)
    if isinstance(error, SandboxExpired):
        return void("platform", "sandbox_expired", evidence)  # no rollout ends its sandbox before it is over
    if isinstance(error, NotFound) and "sandbox_id" in error.details:
        return void("platform", "sandbox_lost", evidence)
    if isinstance(error, BarchanError):
        found = next((cause for cls, cause in _VOID_CAUSES if isinstance(error, cls)), None)
        if isinstance(error, NotFound) and stage == "create":
            found = "image"
        return void(error.fault, found or "unknown", evidence)
    return void("platform", "unknown", evidence)


def cancelled(stage: str, reason: Literal["user", "stale"] = "user") -> Verdict:
    """The rollout was given up by whoever ran it."""
    cause: Cause = "cancelled_stale" if reason == "stale" else "cancelled_user"
    evidence = (Evidence(source="runner", fact="stage", value=stage),)
    return Verdict(status="cancelled", reward=None, fault="none", cause=cause, evidence=evidence)


def void(fault: Fault, cause: Cause, evidence: tuple[Evidence, ...]) -> Verdict:
    return Verdict(status="void", reward=None, fault=fault, cause=cause, evidence=evidence)


def scored(reward: float, cause: Cause, truncated: bool, evidence: tuple[Evidence, ...]) -> Verdict:
    fault: Fault = "none" if cause == "completed" else "policy"
    return Verdict(status="scored", reward=reward, fault=fault, cause=cause, truncated=truncated, evidence=evidence)
