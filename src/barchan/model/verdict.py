"""What became of a rollout, and whose doing it was."""

from typing import Any, Literal

from msgspec import Struct

from barchan.errors import Fault

Status = Literal["scored", "void", "cancelled"]
Cause = Literal[
    # the policy's doing or nobody's: scored
    "completed",
    "agent_timeout",
    "turn_limit",
    "context_limit",
    "output_limit",
    "exec_timeout",
    "oom_within_limit",
    "guest_wrecked",
    "integrity_violation",
    "refusal",
    # the platform's: void
    "image",
    "image_unavailable",
    "capacity",
    "boot_failure",
    "sandbox_lost",
    "sandbox_expired",
    "oom_host",
    "transport",
    "platform_bug",
    # the model endpoint's: void
    "model_unreachable",
    "model_refused",
    "model_timeout",
    "model_garbage",
    # the task's or grader's: void
    "task_invalid",
    "task_quarantined",
    "grader_start",
    "grader_timeout",
    "grader_crash",
    "reward_missing",
    "reward_malformed",
    "grader_nondeterministic",
    "service_not_ready",
    "judge_unreachable",
    # whoever drives the rollout: void
    "policy_error",
    "abandoned",
    "budget_spent",
    # nobody's: cancelled
    "cancelled_user",
    "cancelled_stale",
    "cancelled_surplus",
    "cancelled_group",
    # nobody knows: void
    "unknown",
]


class Evidence(Struct, frozen=True, kw_only=True):
    """One fact behind a verdict; `source` says which kernel counter, status or platform error it was read from."""

    source: str
    fact: str
    value: str | int | float | bool | None = None


class Verdict(Struct, frozen=True, kw_only=True):
    """The judgement of one rollout: `reward` is None unless `status` is `scored`, checked on construction.

    `exposed`: the task's format lets what the agent has written reach the grader's programs.
    """

    status: Status
    reward: float | None
    fault: Fault
    cause: Cause
    truncated: bool = False
    exposed: bool = False
    metrics: dict[str, float] = {}
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        if (self.status == "scored") != (self.reward is not None):
            raise ValueError(f"a verdict is scored exactly when it has a reward: {self.status}, {self.reward}")
        if self.reward is not None and self.reward != self.reward:
            raise ValueError("a reward is a number")

    def with_metrics(self, metrics: dict[str, float]) -> "Verdict":
        """The same verdict with `metrics` added."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
        return Verdict(**{**fields, "metrics": {**self.metrics, **metrics}})
