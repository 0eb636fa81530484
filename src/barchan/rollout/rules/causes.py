"""Cause -> what it means for the verdict. One row per cause, and nothing is decided anywhere else.

`python -m barchan.rollout.rules.page` writes the table in docs/verdicts.md from here.
"""

from typing import Literal, get_args

from msgspec import Struct

from barchan.errors import Fault
from barchan.model.verdict import Cause, Status

# graded: what the grader gave; zero: 0 whatever a grader says; none: there is no reward.
Reward = Literal["graded", "zero", "none"]
# resume: the attempt itself may go on; replace: another attempt in its place may do better; never: it would come again;
# stop: it would come to all the others, too.
Retry = Literal["resume", "replace", "never", "stop"]


class Rule(Struct, frozen=True, kw_only=True):
    """What a cause means.

    Attributes:
        fault: Whose doing it is, unless something says more; then it may be one of `or_faults`.
        truncated: A limit of the task's cut the attempt short.
        meaning: In words, for the docs.
    """

    status: Status
    fault: Fault
    reward: Reward
    truncated: bool
    retry: Retry
    meaning: str
    or_faults: tuple[Fault, ...] = ()


def _graded(meaning: str, *, truncated: bool = False, fault: Fault = "policy") -> Rule:
    return Rule(status="scored", fault=fault, reward="graded", truncated=truncated, retry="never", meaning=meaning)


def _zero(meaning: str) -> Rule:
    return Rule(status="scored", fault="policy", reward="zero", truncated=False, retry="never", meaning=meaning)


def _void(fault: Fault, retry: Retry, meaning: str, *or_faults: Fault) -> Rule:
    return Rule(
        status="void",
        fault=fault,
        reward="none",
        truncated=False,
        retry=retry,
        meaning=meaning,
        or_faults=or_faults,
    )


def _cancelled(meaning: str) -> Rule:
    return Rule(status="cancelled", fault="none", reward="none", truncated=False, retry="never", meaning=meaning)


RULES: dict[Cause, Rule] = {
    "completed": _graded("the attempt was handed in", fault="none"),
    "refusal": _graded("the model refused; what is there is graded"),
    "agent_timeout": _graded(
        "the agent's programs used up their time, counted only while they could run", truncated=True
    ),
    "turn_limit": _graded("the attempt used up its turns", truncated=True),
    "context_limit": _graded("tokens used up, or a conversation that the model can't take", truncated=True),
    "output_limit": _graded("an answer or artifact larger than allowed", truncated=True),
    "exec_timeout": _zero("what was handed in used up its time while it was graded"),
    "oom_within_limit": _zero("out of memory at the sandbox's own limit, by the kernel's counter"),
    "guest_wrecked": _zero("the policy broke what it was to be judged by: powered off, panicked, ended the grader"),
    "integrity_violation": _zero("tampering was proven"),
    "image": _void("platform", "never", "an image is missing or damaged", "caller"),
    "image_unavailable": _void("platform", "replace", "bytes of an image could not be had in time"),
    "capacity": _void("platform", "replace", "no room on the node for longer than a rollout waits"),
    "boot_failure": _void("platform", "replace", "the sandbox did not start"),
    "sandbox_lost": _void("platform", "resume", "the sandbox is gone, by the platform's doing or nobody knows whose"),
    "sandbox_expired": _void("platform", "replace", "the sandbox was ended before the rollout was over"),
    "oom_host": _void("platform", "replace", "the host was out of memory, and its kernel killed what it liked"),
    "transport": _void("platform", "resume", "the connection to the node was cut, or it did not answer"),
    "platform_bug": _void("platform", "replace", "the platform did not keep to its own protocol"),
    "model_unreachable": _void("model", "replace", "the model's server is down or overloaded"),
    "model_refused": _void("model", "replace", "the model's server refuses the request"),
    "model_timeout": _void("model", "replace", "the model's server did not answer in time"),
    "model_garbage": _void("model", "replace", "the model's server answered with what is no completion"),
    "judge_unreachable": _void("model", "replace", "the judge's server is down, overloaded, or refuses"),
    "task_invalid": _void("task", "never", "the task contradicts itself"),
    "task_quarantined": _void("task", "never", "not begun: nothing can tell this task's gradings from their failure"),
    "service_not_ready": _void("task", "never", "a service of the task's did not come up"),
    "grader_start": _void("platform", "replace", "the grader did not start", "task"),
    "grader_timeout": _void(
        "platform", "replace", "no answer of the grader in time, and the control decided nothing", "task"
    ),
    "grader_crash": _void("platform", "replace", "the grader broke, and the control decided nothing", "task"),
    "grader_nondeterministic": _void(
        "task", "never", "gradings disagree, those of the known-good artifact too", "platform"
    ),
    "reward_missing": _void(
        "platform", "replace", "the grader left no reward, and the control decided nothing", "task"
    ),
    "reward_malformed": _void(
        "platform", "replace", "what the grader left is no reward, and the control decided nothing", "task"
    ),
    "policy_error": _void("caller", "never", "the policy's own code raised"),
    "abandoned": _void("caller", "resume", "whoever drove the rollout left it in the middle of a step"),
    "budget_spent": _void("caller", "stop", "the run's budget was used up, by whichever rollouts were faster"),
    "cancelled_user": _cancelled("given up by whoever ran it"),
    "cancelled_stale": _cancelled("given up because the policy had moved on"),
    "cancelled_surplus": _cancelled("given up because its group was full"),
    "cancelled_group": _cancelled("not begun because too few of its group can still be scored"),
    "unknown": _void("platform", "replace", "nothing explains it", "caller", "task", "model"),
}
assert set(RULES) == set(get_args(Cause)), set(RULES) ^ set(get_args(Cause))

# A limit of the task's cut the attempt short; it is graded as far as it came.
TRUNCATING = frozenset(cause for cause, rule in RULES.items() if rule.truncated)
# How an attempt's own part can end, so that what it left is graded.
ENDINGS = frozenset(cause for cause, rule in RULES.items() if rule.reward == "graded")


def fault_of(cause: Cause, told: Fault | None = None) -> Fault:
    """Whose doing a cause is: as told, where the table allows that."""
    rule = RULES[cause]
    return told if told is not None and told in rule.or_faults else rule.fault
