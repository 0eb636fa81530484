"""What the platform can find out about a rollout's end, in the order in which it counts: the first that is there gives
the cause. Closed: what is none of these is `unknown`, and void.

The order is

1. the rollout was given up: nothing else is judged;
2. a doing of the policy's that explains the sandbox's loss, by evidence that is not the guest's word;
3. what platform, model, task and driver failed to do: it outweighs whatever else the policy did;
4. proven tampering, and what the policy did to its own sandbox within its limits;
5. gradings without an answer, which a control decides;
6. how the attempt's own part ended.

So a platform's fault that is found beside anything of 4 to 6 makes the rollout void, and nothing that is found beside a
void makes it scored, but a loss of the sandbox that its own guest is shown to have caused.
"""

import math
from collections.abc import Iterable
from typing import Literal, get_args

from msgspec import Struct

from barchan.errors import Fault
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.rules.causes import RULES, fault_of

Finding = Literal[
    "given_up",
    "given_up_stale",
    "given_up_surplus",
    "given_up_group",
    "budget_used_up",
    "task_is_quarantined",
    "guest_ended_itself",
    "image_unusable",
    "image_withheld",
    "node_full",
    "boot_failed",
    "host_out_of_memory",
    "loss_unexplained",
    "killed_from_outside",
    "sandbox_ended",
    "node_unreachable",
    "protocol_broken",
    "model_away",
    "model_refuses",
    "model_silent",
    "model_talks_garbage",
    "judge_away",
    "task_contradicts_itself",
    "service_silent",
    "policy_raised",
    "driver_gone",
    "grader_not_started",
    "gradings_disagree",
    "unforeseen",
    "tampering_proven",
    "memory_limit_reached",
    "cpu_limit_reached",
    "files_no_layer",
    "guest_broke_off",
    "artifact_too_large",
    "report_malformed",
    "grading_out_of_time",
    "grading_broke",
    "report_missing",
    "program_failed",
    "time_used_up",
    "tokens_used_up",
    "turns_used_up",
    "answer_cut",
    "model_declined",
    "handed_in",
]
# kernel: the host's kernel or the hypervisor, by counters and statuses that no guest writes.
Origin = Literal["driver", "node", "store", "kernel", "endpoint", "task", "grader", "platform"]


class FindingRule(Struct, frozen=True):
    """One finding.

    Attributes:
        is_policys: The policy can bring it about. Such a finding scores, or has a control decide; never void by itself.
        origin: Who found it. A guest's own word is no finding.
    """

    cause: Cause
    origin: Origin
    is_policys: bool
    meaning: str


# In order of precedence.
FINDINGS: dict[Finding, FindingRule] = {
    "given_up": FindingRule("cancelled_user", "driver", False, "`cancel`, or the run was stopped"),
    "given_up_stale": FindingRule("cancelled_stale", "driver", False, "`cancel('stale')`"),
    "given_up_surplus": FindingRule("cancelled_surplus", "driver", False, "its group was full"),
    "given_up_group": FindingRule(
        "cancelled_group", "driver", False, "voids left its group fewer members than advantages take"
    ),
    "budget_used_up": FindingRule(
        "budget_spent", "node", False, "seconds or tokens of the lease; no fault of the attempt"
    ),
    "task_is_quarantined": FindingRule(
        "task_quarantined", "task", False, "an earlier grading of the task had no control"
    ),
    "guest_ended_itself": FindingRule(
        "guest_wrecked", "kernel", True, "the hypervisor saw the guest power off, restart or panic"
    ),
    "image_unusable": FindingRule("image", "store", False, "an image is missing or its bytes are wrong"),
    "image_withheld": FindingRule(
        "image_unavailable", "store", False, "programs waited for bytes of an image for too long"
    ),
    "node_full": FindingRule("capacity", "node", False, "creates were refused for `capacity_wait_s`"),
    "boot_failed": FindingRule("boot_failure", "node", False, "the sandbox did not start"),
    "host_out_of_memory": FindingRule("oom_host", "kernel", False, "killed without having reached its own limit"),
    "loss_unexplained": FindingRule("sandbox_lost", "node", False, "the sandbox, its init or its node is gone"),
    "killed_from_outside": FindingRule(
        "sandbox_lost",
        "kernel",
        False,
        "checker or candidate got a SIGKILL that nothing in the sandbox can send, and no limit asked for",
    ),
    "sandbox_ended": FindingRule("sandbox_expired", "node", False, "a lease, a ttl or a person ended the sandbox"),
    "node_unreachable": FindingRule("transport", "node", False, "a connection failed, was cut, or stayed silent"),
    "protocol_broken": FindingRule("platform_bug", "platform", False, "a message that can't be"),
    "model_away": FindingRule("model_unreachable", "endpoint", False, "no connection, or HTTP 429 and 5xx to the end"),
    "model_refuses": FindingRule("model_refused", "endpoint", False, "another HTTP status"),
    "model_silent": FindingRule("model_timeout", "endpoint", False, "no answer in time"),
    "model_talks_garbage": FindingRule("model_garbage", "endpoint", False, "no completion"),
    "judge_away": FindingRule("judge_unreachable", "endpoint", False, "the judge's server"),
    "task_contradicts_itself": FindingRule("task_invalid", "task", False, "its own set-up, files or checks fail"),
    "service_silent": FindingRule("service_not_ready", "task", False, "before the policy acted"),
    "policy_raised": FindingRule("policy_error", "driver", False, "an exception while the policy was asked"),
    "driver_gone": FindingRule("abandoned", "driver", False, "killed in the middle of a call, its sandbox ended since"),
    "grader_not_started": FindingRule("grader_start", "grader", False, "the checker never called the candidate"),
    "gradings_disagree": FindingRule(
        "grader_nondeterministic", "grader", False, "of one artifact, and of the known-good one, too"
    ),
    "unforeseen": FindingRule("unknown", "platform", False, "any other exception"),
    "tampering_proven": FindingRule("integrity_violation", "platform", True, "see the evidence"),
    "memory_limit_reached": FindingRule(
        "oom_within_limit", "kernel", True, "the counter of the sandbox's own memory group"
    ),
    "cpu_limit_reached": FindingRule(
        "exec_timeout", "kernel", True, "SIGXCPU, or SIGKILL with the time used; a deadline of runnable time"
    ),
    "files_no_layer": FindingRule("guest_wrecked", "node", True, "its files can't be an image"),
    "guest_broke_off": FindingRule(
        "guest_wrecked",
        "kernel",
        True,
        "its program ended in the middle of its checks; a good control beside no answer",
    ),
    "artifact_too_large": FindingRule("output_limit", "node", True, "more bytes than may leave"),
    "report_malformed": FindingRule("reward_malformed", "grader", True, "something else than a reward"),
    "grading_out_of_time": FindingRule("grader_timeout", "grader", True, "no end in time"),
    "grading_broke": FindingRule(
        "grader_crash", "grader", True, "the grader, or its sandbox under the artifact, failed"
    ),
    "report_missing": FindingRule("reward_missing", "grader", True, "nothing was left"),
    "program_failed": FindingRule(
        "completed", "kernel", True, "a program of the policy's failed where it had to succeed"
    ),
    "time_used_up": FindingRule("agent_timeout", "node", True, "`Limits.agent_s_max`"),
    "tokens_used_up": FindingRule(
        "context_limit", "endpoint", True, "`Limits.tokens_max`, or an endpoint's HTTP 400 about length"
    ),
    "turns_used_up": FindingRule("turn_limit", "driver", True, "`Limits.turns_max`"),
    "answer_cut": FindingRule("output_limit", "endpoint", True, "an answer that was cut off"),
    "model_declined": FindingRule("refusal", "endpoint", True, "a refusal"),
    "handed_in": FindingRule("completed", "driver", True, "`submit`, or `finish`"),
}
assert set(FINDINGS) == set(get_args(Finding)), set(FINDINGS) ^ set(get_args(Finding))


def cause_of(findings: Iterable[Finding]) -> Cause:
    """The cause that counts among all that was found."""
    found = set(findings)
    return next((rule.cause for name, rule in FINDINGS.items() if name in found), "unknown")


def verdict_of(
    findings: Iterable[Finding],
    evidence: tuple[Evidence, ...] = (),
    *,
    reward: float | None = None,
    fault: Fault | None = None,
) -> Verdict:
    """The verdict on all that was found. Total: whatever is passed, there is one.

    Args:
        reward: What a grader gave; None: nothing did.
        fault: Whose doing it is, where something knows better than the table, and the table allows it.
    """
    cause = cause_of(findings)
    rule = RULES[cause]
    if rule.reward == "graded":
        if reward is None:
            cause = "unknown"
        elif not math.isfinite(reward):
            cause = "reward_malformed"
        rule = RULES[cause]
    given = {"graded": reward, "zero": 0.0, "none": None}[rule.reward]
    return Verdict(
        status=rule.status,
        reward=given,
        fault=fault_of(cause, fault),
        cause=cause,
        truncated=rule.truncated,
        evidence=evidence,
    )
