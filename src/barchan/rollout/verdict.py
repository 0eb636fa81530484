"""From what happened to a verdict: exceptions are made findings here, and `rules` says what those mean.

Two rules hold everything together. Only what the policy can have caused is scored, and then on the kernel's or the
checker's evidence. What nobody can explain is void. `docs/verdicts.md` has the tables.
"""

import re
import traceback
from typing import Literal

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
    QuotaExceeded,
    RequirementMissing,
    SandboxExpired,
    SandboxLost,
    TaskError,
    TransportError,
)
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.rules.causes import ENDINGS, RULES, TRUNCATING, fault_of
from barchan.rollout.rules.checks import Checked, CheckReport, Outcome, judge
from barchan.rollout.rules.control import UNDECIDED, Control, control_of, decided, is_undecided
from barchan.rollout.rules.findings import Finding, verdict_of

# What whoever runs and grades attempts needs of the rules.
__all__ = [
    "ENDINGS",
    "TRUNCATING",
    "UNDECIDED",
    "CheckReport",
    "Checked",
    "Control",
    "Outcome",
    "Stage",
    "cancelled",
    "control_of",
    "decided",
    "ended_as",
    "finding_of",
    "is_undecided",
    "judge",
    "scored",
    "verdict_of_error",
    "void",
]

Stage = Literal["setup", "create", "policy", "exec", "cleanup", "grade"]

_OF_MODEL: dict[str, Finding] = {
    "model_unreachable": "model_away",
    "model_refused": "model_refuses",
    "model_timeout": "model_silent",
    "model_garbage": "model_talks_garbage",
}
_OF_TASK: dict[str, Finding] = {
    "service_not_ready": "service_silent",
    "task_invalid": "task_contradicts_itself",
    "task_quarantined": "task_is_quarantined",
}
# The first class that matches gives the finding. A guest's own doing, raised by `ExecResult.check()`, is the policy's.
_OF_GUEST: tuple[tuple[type[GuestError], Finding], ...] = (
    (ExecTimeout, "cpu_limit_reached"),
    (OutputLimitExceeded, "artifact_too_large"),
    (GuestOutOfMemory, "memory_limit_reached"),
    (GuestWrecked, "files_no_layer"),
    (GuestError, "program_failed"),
)
_OF_PLATFORM: tuple[tuple[type[BarchanError], Finding], ...] = (
    (CapacityError, "node_full"),
    (BootFailed, "boot_failed"),
    (BlobUnavailable, "image_withheld"),
    (SandboxLost, "loss_unexplained"),
    (RequirementMissing, "image_unusable"),
    (BlobCorrupt, "image_unusable"),
    (TransportError, "node_unreachable"),
    (ProtocolError, "protocol_broken"),
)
# What a node says of a machine whose guest ended by its own act: the hypervisor's words, before any of the guest's.
_GUEST_ENDED = re.compile(
    r"init_died: wait status 0(?:, \d+ out-of-memory kills)?: "
    r"(?:it was shut down from inside|its kernel panicked|its kernel restarted or panicked"
    r"|its guest ended: (?:shutdown|guest-panicked))(?::|$)"
)
# And of one whose kernel of user space did not outlive that the host's kernel killed at the sandbox's own limit.
_GUEST_FULL = re.compile(
    r"init_died: wait status \d+, \d+ out-of-memory kills: its kernel ran out of memory at the sandbox's limit(?::|$)"
)
_HOST_FULL = re.compile(r"(?:evicted: )?the host was out of memory")


def ended_as(verdict: Verdict, ended: Cause) -> Verdict:
    """The verdict on an attempt whose own part ended so. A grading that found a cause of its own keeps it."""
    if verdict.status != "scored":
        return verdict
    cause = ended if verdict.cause == "completed" else verdict.cause
    return replace(verdict, cause=cause, fault=fault_of(cause), truncated=verdict.truncated or ended in TRUNCATING)


def verdict_of_error(error: BaseException, stage: str) -> Verdict:
    """The verdict of a rollout that ended in an exception during `stage`. Anything unforeseen is void."""
    evidence: tuple[Evidence, ...] = (
        Evidence(source=f"{stage}: {type(error).__name__}", fact="message", value=str(error)[:400]),
    )
    if isinstance(error, TaskError) and "output" in error.details:
        evidence += (Evidence(source="task", fact="output", value=error.details["output"]),)
    finding = finding_of(error, stage)
    if finding == "policy_raised":
        place = traceback.extract_tb(error.__traceback__)[-1:]
        evidence += tuple(Evidence(source="policy", fact="at", value=f"{at.filename}:{at.lineno}") for at in place)
    fault: Fault | None = error.fault if isinstance(error, BarchanError) else None
    if finding == "grading_broke":
        fault = "task"
    return verdict_of((finding,), evidence, reward=0.0 if isinstance(error, GuestError) else None, fault=fault)


def finding_of(error: BaseException, stage: str) -> Finding:
    """What an exception shows that was raised during `stage`.

    While the policy is asked, whatever is raised is the doing of the model or of who wrote the policy, and no zero.
    """
    if isinstance(error, ModelError):
        return _OF_MODEL.get(str(error.details.get("cause")), "model_talks_garbage")
    if isinstance(error, TaskError):
        return _OF_TASK.get(str(error.details.get("cause")), "task_contradicts_itself")
    if stage == "policy":
        return "policy_raised"
    if isinstance(error, GuestError):
        if stage in ("setup", "create"):  # nothing of the policy's was running
            return "task_contradicts_itself"
        if stage == "grade":
            return "grading_broke"
        return next(finding for cls, finding in _OF_GUEST if isinstance(error, cls))
    if not isinstance(error, BarchanError):
        return "unforeseen"
    if isinstance(error, QuotaExceeded) and "budget" in error.details:
        # What is more than the whole budget at once is asked for by this task, and the others go on.
        is_used_up = error.details["budget"] in ("sandbox_s_max", "tokens_max")
        return "budget_used_up" if is_used_up else "task_contradicts_itself"
    if isinstance(error, SandboxExpired) and error.details.get("cause") == "budget":
        return "budget_used_up"
    if isinstance(error, SandboxExpired) or (isinstance(error, NotFound) and "lease_id" in error.details):
        return "sandbox_ended"  # no rollout ends its sandbox, or its lease, before it is over
    if isinstance(error, NotFound) and "sandbox_id" in error.details:
        return "loss_unexplained"
    if not {"layer", "layers"}.isdisjoint(error.details) or (
        isinstance(error, NotFound) and "template" in error.details  # a grader's, say
    ):
        return "image_unusable"
    if isinstance(error, NotFound):
        return "image_unusable" if stage in ("setup", "create") else "unforeseen"
    if isinstance(error, SandboxLost):
        return _of_loss(error, stage)
    return next((finding for cls, finding in _OF_PLATFORM if isinstance(error, cls)), "unforeseen")


def _of_loss(error: SandboxLost, stage: str) -> Finding:
    """A sandbox that is gone: by its guest's own act, for the host's want of memory, or nobody knows why."""
    told = str(error.details.get("cause", ""))
    if stage in ("exec", "cleanup", "grade") and _GUEST_ENDED.match(told):
        return "grading_broke" if stage == "grade" else "guest_ended_itself"
    if stage in ("exec", "cleanup", "grade") and _GUEST_FULL.match(told):
        return "grading_broke" if stage == "grade" else "memory_limit_reached"
    if _HOST_FULL.match(told or str(error)):
        return "host_out_of_memory"
    return next((finding for cls, finding in _OF_PLATFORM if isinstance(error, cls)), "loss_unexplained")


def cancelled(stage: str, reason: Literal["user", "stale", "surplus", "group"] = "user") -> Verdict:
    """The rollout was given up by whoever ran it."""
    findings: dict[str, Finding] = {
        "stale": "given_up_stale",
        "surplus": "given_up_surplus",
        "group": "given_up_group",
    }
    return verdict_of((findings.get(reason, "given_up"),), (Evidence(source="runner", fact="stage", value=stage),))


def void(fault: Fault, cause: Cause, evidence: tuple[Evidence, ...]) -> Verdict:
    """A verdict without a reward.

    Raises:
        ValueError: The cause has one.
    """
    if RULES[cause].status != "void":
        raise ValueError(f"{cause} is {RULES[cause].status}, not void")
    return Verdict(status="void", reward=None, fault=fault_of(cause, fault), cause=cause, evidence=evidence)


def scored(reward: float, cause: Cause, truncated: bool, evidence: tuple[Evidence, ...]) -> Verdict:
    """A verdict with the reward that a grader gave.

    Raises:
        ValueError: The cause has none, or is worth 0 and no more.
    """
    rule = RULES[cause]
    if rule.status != "scored" or (rule.reward == "zero" and reward != 0.0):
        raise ValueError(f"{cause} is {rule.status}, and gives no reward of {reward}")
    fault = fault_of(cause)
    return Verdict(status="scored", reward=reward, fault=fault, cause=cause, truncated=truncated, evidence=evidence)
