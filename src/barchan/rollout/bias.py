"""What voiding and cancelling did to a batch: who was lost, and what the mean reward would be under other treatments.

Excluding void rows is what is done here. The other figures say how far the treatment matters: where they agree, it does
not. A loss that grows with difficulty or length shows in the rates.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from barchan.model.verdict import Status
from barchan.rollout.record import RolloutRecord

LENGTH_BINS = 3
EASY, HARD = 2 / 3, 1 / 3


class BiasRow(NamedTuple):
    """One place of a group, by its last attempt.

    Attributes:
        length: Completion tokens, or turns where there are none. Of a rollout that was cut off: as far as it came.
        is_surplus: Cancelled because its group was full.
    """

    group: str
    task_id: str
    length: float
    status: Status
    reward: float | None
    is_surplus: bool = False


class Share(Struct, frozen=True, kw_only=True):
    """What became of a part of the batch, which is not empty; rates are of its rollouts."""

    name: str
    rollouts: int
    void: int
    cancelled: int
    void_rate: float
    cancelled_rate: float


class Bias(Struct, frozen=True, kw_only=True):
    """A batch, and what was lost of it.

    Attributes:
        rollouts: Without surplus ones, whose loss is the sampling's own; `surplus` counts those.
        reward_mean: Of the scored ones; the figures after it are the same batch, treated otherwise.
        reward_if_zero: Had every void one counted as 0.
        reward_if_dropped: Of the groups without a void or cancelled member. `groups_dropped` had one.
        reward_by_task: The mean of the tasks' means.
        by_difficulty: By the mean of the task's scored rollouts: `hard` below 1/3, `easy` from 2/3, `middle`, and
            `unscored`.
        by_length: In thirds of the batch's lengths.
    """

    rollouts: int
    void: int
    cancelled: int
    surplus: int
    reward_mean: float | None
    reward_if_zero: float | None
    reward_if_dropped: float | None
    reward_by_task: float | None
    groups: int
    groups_dropped: int
    by_difficulty: tuple[Share, ...]
    by_length: tuple[Share, ...]


def row_of(record: RolloutRecord) -> BiasRow:
    """A record as one row of a batch."""
    verdict = record.verdict
    return BiasRow(
        group=f"{record.run_id}/{record.group_index}/{record.task_id}",
        task_id=record.task_id,
        length=float(record.completion_tokens or record.turns),
        status=verdict.status,
        reward=verdict.reward,
        is_surplus=verdict.cause == "cancelled_surplus",
    )


class Places:
    """The rows of a batch: of several attempts at one place, the last."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[int, BiasRow]] = {}

    def add(self, record: RolloutRecord) -> None:
        row = row_of(record)
        place = row.group, record.sample_index
        if place not in self._last or record.attempt >= self._last[place][0]:
            self._last[place] = record.attempt, row

    @property
    def bias(self) -> Bias:
        return bias_of([row for _, row in self._last.values()])


def bias_of_records(records: Iterable[RolloutRecord]) -> Bias:
    """The bias of a batch of records."""
    places = Places()
    for record in records:
        places.add(record)
    return places.bias


def bias_of(given: Sequence[BiasRow]) -> Bias:
    """The bias of a batch, from a row for each place of its groups."""
    rows = [row for row in given if not row.is_surplus]
    rewards = [row.reward for row in rows if row.reward is not None]
    void = sum(row.status == "void" for row in rows)
    by_group: defaultdict[str, list[BiasRow]] = defaultdict(list)
    by_task: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row)
        if row.reward is not None:
            by_task[row.task_id].append(row.reward)
    whole = [members for members in by_group.values() if all(row.status == "scored" for row in members)]
    means = {task_id: sum(given) / len(given) for task_id, given in by_task.items()}
    return Bias(
        rollouts=len(rows),
        void=void,
        cancelled=sum(row.status == "cancelled" for row in rows),
        surplus=len(given) - len(rows),
        reward_mean=_mean(rewards),
        reward_if_zero=_mean([*rewards, *[0.0] * void]),
        reward_if_dropped=_mean([row.reward for members in whole for row in members if row.reward is not None]),
        reward_by_task=_mean(list(means.values())),
        groups=len(by_group),
        groups_dropped=len(by_group) - len(whole),
        by_difficulty=_by_difficulty(rows, means),
        by_length=_by_length(rows),
    )


def _by_difficulty(rows: Sequence[BiasRow], means: dict[str, float]) -> tuple[Share, ...]:
    parts: dict[str, list[BiasRow]] = {"hard": [], "middle": [], "easy": [], "unscored": []}
    for row in rows:
        mean = means.get(row.task_id)
        name = "unscored" if mean is None else "hard" if mean < HARD else "middle" if mean < EASY else "easy"
        parts[name].append(row)
    return tuple(_share(name, part) for name, part in parts.items() if part)


def _by_length(rows: Sequence[BiasRow]) -> tuple[Share, ...]:
    """Rows of one length are in one part, so that a batch of equal lengths has one."""
    lengths = sorted(row.length for row in rows)
    parts: defaultdict[float, list[BiasRow]] = defaultdict(list)
    thirds = range(1, LENGTH_BINS + 1) if rows else ()
    edges = sorted({lengths[max(0, third * len(lengths) // LENGTH_BINS - 1)] for third in thirds})
    for row in rows:
        parts[next(edge for edge in edges if row.length <= edge)].append(row)
    return tuple(_share(f"up to {edge:g}", parts[edge]) for edge in edges if parts[edge])


def _share(name: str, rows: Sequence[BiasRow]) -> Share:
    void = sum(row.status == "void" for row in rows)
    cancelled = sum(row.status == "cancelled" for row in rows)
    count = len(rows)
    return Share(
        name=name,
        rollouts=count,
        void=void,
        cancelled=cancelled,
        void_rate=round(void / count, 6),
        cancelled_rate=round(cancelled / count, 6),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
