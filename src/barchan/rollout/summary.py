"""What a run amounts to, kept up to date rollout by rollout."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from msgspec import Struct

from barchan.rollout.record import STAGES, RolloutRecord


class Percentiles(Struct, frozen=True, kw_only=True):
    """Nearest-rank percentiles; None when nothing was measured."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class GroupMix(Struct, frozen=True, kw_only=True):
    """Groups by what their members give a trainer; only `mixed` ones carry a signal when the baseline is the group's
    mean.

    `void`: nothing in it was scored.
    """

    all_one: int = 0
    mixed: int = 0
    all_zero: int = 0
    void: int = 0


class Summary(Struct, frozen=True, kw_only=True):
    """A run in numbers.

    Attributes:
        reward_mean: Over scored rollouts; None when there is none.
        reward_mean_by_task: The mean of the tasks' means, so that a task with voided members weighs as much as any
            other.
        reward_mean_low, reward_mean_high: What the mean would be if every void rollout had been 0, or 1: how far
            voiding can have moved it.
        not_started: Rollouts that a cancelled run never began.
        turns, tool_calls, malformed_calls, prompt_tokens, completion_tokens: Of scored and void rollouts together.
    """

    run_id: str
    task_set: str
    policy: str
    rollouts: int
    scored: int
    void: int
    cancelled: int
    not_started: int
    reward_mean: float | None
    reward_mean_by_task: float | None
    reward_mean_low: float | None
    reward_mean_high: float | None
    truncated: int
    void_by_cause: dict[str, int]
    scored_by_cause: dict[str, int]
    groups: GroupMix
    wall_s: float
    rollouts_per_s: float
    ttfi_ms: Percentiles
    stage_ms: dict[str, Percentiles]
    turns: int
    tool_calls: dict[str, int]
    malformed_calls: int
    prompt_tokens: int
    completion_tokens: int
    out: str


class Tally:
    """Counts records as they come; `summary` can be asked at any time."""

    def __init__(self) -> None:
        self.scored = self.void = self.cancelled = self.truncated = 0
        self.reward_sum = 0.0
        self._void_causes: Counter[str] = Counter()
        self._scored_causes: Counter[str] = Counter()
        self._rewards: defaultdict[str, list[float]] = defaultdict(list)
        self._tasks: set[str] = set()
        self._times: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "ttfi")}
        self._prompt_tokens = self._completion_tokens = self._turns = self._malformed = 0
        self._tool_calls: Counter[str] = Counter()

    @property
    def rollouts(self) -> int:
        return self.scored + self.void + self.cancelled

    @property
    def reward_mean(self) -> float | None:
        return self.reward_sum / self.scored if self.scored else None

    def add(self, record: RolloutRecord) -> None:
        verdict = record.verdict
        if verdict.status == "cancelled":
            self.cancelled += 1
            return
        self._tasks.add(record.task_id)
        for stage, times in self._times.items():
            spent = getattr(record.timings, f"{stage}_ms")
            if spent is not None:
                times.append(spent)
        self._prompt_tokens += record.prompt_tokens
        self._completion_tokens += record.completion_tokens
        self._turns += record.turns
        self._tool_calls.update(record.tool_calls)
        self._malformed += record.malformed_calls
        if verdict.reward is None:
            self.void += 1
            self._void_causes[verdict.cause] += 1
            return
        self.scored += 1
        self.truncated += verdict.truncated
        self.reward_sum += verdict.reward
        self._scored_causes[verdict.cause] += 1
        self._rewards[record.task_id].append(verdict.reward)

    def summary(self, *, run_id: str, task_set: str, policy: str, not_started: int, wall_s: float, out: str) -> Summary:
        judged = self.scored + self.void
        by_task = [sum(rewards) / len(rewards) for rewards in self._rewards.values()]
        return Summary(
            run_id=run_id,
            task_set=task_set,
            policy=policy,
            rollouts=self.rollouts,
            scored=self.scored,
            void=self.void,
            cancelled=self.cancelled,
            not_started=not_started,
            reward_mean=self.reward_mean,
            reward_mean_by_task=sum(by_task) / len(by_task) if by_task else None,
            reward_mean_low=self.reward_sum / judged if judged else None,
            reward_mean_high=(self.reward_sum + self.void) / judged if judged else None,
            truncated=self.truncated,
            void_by_cause=dict(self._void_causes.most_common()),
            scored_by_cause=dict(self._scored_causes.most_common()),
            groups=self._groups(),
            wall_s=round(wall_s, 3),
            rollouts_per_s=round(self.rollouts / wall_s, 3) if wall_s > 0 else 0.0,
            ttfi_ms=percentiles(self._times["ttfi"]),
            stage_ms={stage: percentiles(self._times[stage]) for stage in STAGES},
            turns=self._turns,
            tool_calls=dict(self._tool_calls.most_common()),
            malformed_calls=self._malformed,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            out=out,
        )

    def _groups(self) -> GroupMix:
        kinds = Counter(
            "all_one" if min(rewards) == 1.0 else "all_zero" if max(rewards) == 0.0 else "mixed"
            for rewards in self._rewards.values()
        )
        return GroupMix(**kinds, void=len(self._tasks) - len(self._rewards))


def percentiles(values: Sequence[float]) -> Percentiles:
    if not values:
        return Percentiles()
    ordered = sorted(values)
    p50, p95, p99 = (round(ordered[math.ceil(len(ordered) * share) - 1], 3) for share in (0.50, 0.95, 0.99))
    return Percentiles(p50=p50, p95=p95, p99=p99)
