"""What a run amounts to, kept up to date rollout by rollout."""

from collections import Counter, defaultdict

from msgspec import Struct

from barchan.rollout.bias import Bias, Places
from barchan.rollout.percentiles import Percentiles, percentiles
from barchan.rollout.record import STAGES, RolloutRecord
from barchan.rollout.table import TaskRow, TaskTally


class GroupMix(Struct, frozen=True, kw_only=True):
    """Groups by what their members give a trainer; only `mixed` ones carry a signal when the baseline is the group's
    mean.

    `void`: nothing in it was scored.
    """

    all_one: int = 0
    mixed: int = 0
    all_zero: int = 0
    void: int = 0


class Waits(Struct, frozen=True, kw_only=True):
    """What the opening of rollouts waited for, in seconds of the whole run.

    Attributes:
        slot_s: For an agent's sandbox to end.
        graders_s: For the queue of the graders to shrink.
        environments_s: For the environment of the next tasks, with nothing else to start.
    """

    slot_s: float = 0.0
    graders_s: float = 0.0
    environments_s: float = 0.0


class Summary(Struct, frozen=True, kw_only=True):
    """A run in numbers.

    Attributes:
        rollouts: Attempts that were begun; one that was tried again counts once, by its last try.
        retried: Tries before the last one. They are in the results, and in the times and tokens here.
        surplus: Cancelled because their group was full.
        reward_mean: Over scored rollouts; None when there is none.
        reward_mean_by_task: The mean of the tasks' means, so that a task with voided members weighs as much as any
            other.
        reward_mean_low, reward_mean_high: What the mean would be if every void rollout had been 0, or 1: how far
            voiding can have moved it.
        resumed: Rollouts that this process went on with where their logs had left them.
        answered: Steps and operations of theirs that the logs have given, and that were not done again.
        stopped: What the circuit breaker said when it stopped the run; empty: it did not.
        not_started: Rollouts that a cancelled run never began.
        bias: What voiding and cancelling did, surplus apart.
        truncated_share: Of scored rollouts.
        void_example: Per cause, what the first of them says.
        turns, tool_calls, malformed_calls, prompt_tokens, completion_tokens: Of scored and void rollouts together.
        wall_s: Of this process; `rollouts_per_s` counts every try that it has begun itself.
    """

    run_id: str
    task_set: str
    policy: str
    rollouts: int
    scored: int
    void: int
    cancelled: int
    surplus: int
    retried: int
    resumed: int
    answered: int
    stopped: str
    not_started: int
    reward_mean: float | None
    reward_mean_by_task: float | None
    reward_mean_low: float | None
    reward_mean_high: float | None
    bias: Bias
    truncated: int
    truncated_share: float | None
    void_by_cause: dict[str, int]
    void_example: dict[str, str]
    scored_by_cause: dict[str, int]
    groups: GroupMix
    wall_s: float
    rollouts_per_s: float
    waits: Waits
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
        self.retried = 0
        self._reward_sum = 0.0
        self._statuses: Counter[str] = Counter()
        self._causes: dict[str, Counter[str]] = {"scored": Counter(), "void": Counter(), "cancelled": Counter()}
        self._void_example: dict[str, str] = {}
        self._truncated = 0
        self._groups: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        self._tasks: dict[str, TaskTally] = {}
        self._places = Places()
        self._unscored: dict[tuple[int, str, int], tuple[str, str]] = {}
        self._times: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "ttfi")}
        self._prompt_tokens = self._completion_tokens = self._turns = self._malformed = 0
        self._tool_calls: Counter[str] = Counter()

    @property
    def scored(self) -> int:
        return self._statuses["scored"]

    @property
    def void(self) -> int:
        return self._statuses["void"]

    @property
    def cancelled(self) -> int:
        return self._statuses["cancelled"]

    @property
    def rollouts(self) -> int:
        return self.scored + self.void + self.cancelled

    @property
    def reward_mean(self) -> float | None:
        return self._reward_sum / self.scored if self.scored else None

    @property
    def surplus(self) -> int:
        return self._causes["cancelled"]["cancelled_surplus"]

    @property
    def rows(self) -> list[TaskRow]:
        """The tasks, in the order of their set."""
        return [task.row for task in sorted(self._tasks.values(), key=lambda task: task.group_index)]

    def add(self, record: RolloutRecord) -> None:
        verdict = record.verdict
        task = self._tasks.setdefault(record.task_id, TaskTally(record.task_id, record.group_index))
        place = (record.group_index, record.task_id, record.sample_index)
        if record.attempt:
            self._take_back(place, task)
        self._places.add(record)
        self._statuses[verdict.status] += 1
        self._causes[verdict.status][verdict.cause] += 1
        if verdict.status != "scored":
            self._unscored[place] = (verdict.status, verdict.cause)
        task.add(record)
        if verdict.status == "cancelled":
            return
        rewards = self._groups[record.group_index, record.task_id]
        for stage, times in self._times.items():
            spent = getattr(record.timings, f"{stage}_ms")
            if spent is not None:
                times.append(spent)
        self._prompt_tokens += record.prompt_tokens
        self._completion_tokens += record.completion_tokens
        self._turns += record.turns
        self._tool_calls.update(record.tool_calls)
        self._malformed += record.malformed_calls
        if verdict.status == "void" and verdict.evidence:
            fact = verdict.evidence[0]
            self._void_example.setdefault(verdict.cause, f"{record.task_id}: {fact.source}: {fact.value}")
        if verdict.reward is not None:
            self._truncated += verdict.truncated
            self._reward_sum += verdict.reward
            rewards.append(verdict.reward)

    def _take_back(self, place: tuple[int, str, int], task: TaskTally) -> None:
        """A try that was followed by another one counts no more."""
        if place not in self._unscored:
            return
        status, cause = self._unscored.pop(place)
        self._statuses[status] -= 1
        self._causes[status][cause] -= 1
        task.counts[status] -= 1
        self.retried += 1

    def summary(
        self,
        *,
        run_id: str,
        task_set: str,
        policy: str,
        wanted: int,
        wall_s: float,
        out: str,
        waits: Waits = Waits(),  # noqa: B008 (frozen)
        begun: int | None = None,
        resumed: int = 0,
        answered: int = 0,
        stopped: str = "",
    ) -> Summary:
        """The run so far.

        Args:
            wanted: Attempts that were to be begun.
            begun: How many tries were begun in `wall_s`; None: as many as are counted here.
        """
        judged = self.scored + self.void
        means = [mean for task in self._tasks.values() if (mean := task.reward_mean) is not None]
        return Summary(
            run_id=run_id,
            task_set=task_set,
            policy=policy,
            rollouts=self.rollouts,
            scored=self.scored,
            void=self.void,
            cancelled=self.cancelled,
            surplus=self.surplus,
            retried=self.retried,
            resumed=resumed,
            answered=answered,
            stopped=stopped,
            not_started=wanted - self.rollouts,
            reward_mean=self.reward_mean,
            reward_mean_by_task=sum(means) / len(means) if means else None,
            reward_mean_low=self._reward_sum / judged if judged else None,
            reward_mean_high=(self._reward_sum + self.void) / judged if judged else None,
            bias=self._places.bias,
            truncated=self._truncated,
            truncated_share=self._truncated / self.scored if self.scored else None,
            void_by_cause=_most_first(self._causes["void"]),
            void_example=self._void_example,
            scored_by_cause=_most_first(self._causes["scored"]),
            groups=self._mix(),
            wall_s=round(wall_s, 3),
            rollouts_per_s=round((self.rollouts if begun is None else begun) / wall_s, 3) if wall_s > 0 else 0.0,
            waits=waits,
            ttfi_ms=percentiles(self._times["ttfi"]),
            stage_ms={stage: percentiles(self._times[stage]) for stage in STAGES},
            turns=self._turns,
            tool_calls=_most_first(self._tool_calls),
            malformed_calls=self._malformed,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            out=out,
        )

    def _mix(self) -> GroupMix:
        kinds = Counter(
            "void"
            if not rewards
            else "all_one"
            if min(rewards) == 1.0
            else "all_zero"
            if max(rewards) == 0.0
            else "mixed"
            for rewards in self._groups.values()
        )
        return GroupMix(**kinds)


def _most_first(counts: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in counts.most_common() if count}
