"""A run by its tasks."""

from collections.abc import Iterable

from msgspec import Struct

from barchan.rollout.percentiles import percentile
from barchan.rollout.record import RolloutRecord


class TaskRow(Struct, frozen=True, kw_only=True):
    """What became of one task.

    Attributes:
        n: Attempts; of one that was tried again, the last try.
        turns_mean, completion_tokens_mean: Of scored and void attempts.
        agent_s_p50, agent_s_p95: Time in the agent's own programs, likewise.
    """

    task_id: str
    n: int
    scored: int
    void: int
    cancelled: int
    reward_mean: float | None
    truncated: int
    turns_mean: float | None
    completion_tokens_mean: float | None
    agent_s_p50: float | None
    agent_s_p95: float | None


class TaskTally:
    """Counts the attempts at one task. `group_index`: of its first group, which is its place in the set."""

    def __init__(self, task_id: str, group_index: int) -> None:
        self.task_id = task_id
        self.group_index = group_index
        self.counts = {"scored": 0, "void": 0, "cancelled": 0}
        self.rewards: list[float] = []
        self._truncated = 0
        self._turns: list[int] = []
        self._tokens: list[int] = []
        self._agent_s: list[float] = []

    def add(self, record: RolloutRecord) -> None:
        verdict = record.verdict
        self.counts[verdict.status] += 1
        if verdict.status == "cancelled":
            return
        self._turns.append(record.turns)
        self._tokens.append(record.completion_tokens)
        self._agent_s.append(record.agent_s)
        if verdict.reward is not None:
            self.rewards.append(verdict.reward)
            self._truncated += verdict.truncated

    @property
    def reward_mean(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def row(self) -> TaskRow:
        return TaskRow(
            task_id=self.task_id,
            n=sum(self.counts.values()),
            **self.counts,
            reward_mean=self.reward_mean,
            truncated=self._truncated,
            turns_mean=_mean(self._turns),
            completion_tokens_mean=_mean(self._tokens),
            agent_s_p50=percentile(self._agent_s, 0.50),
            agent_s_p95=percentile(self._agent_s, 0.95),
        )


def worst_first(rows: Iterable[TaskRow]) -> list[TaskRow]:
    """Tasks without any score, then by the mean reward; among equals those with more void attempts first."""
    return sorted(rows, key=lambda row: (row.reward_mean is not None, row.reward_mean or 0.0, -row.void, row.task_id))


def _mean(values: list[int]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None
