"""What was injected against what the verdicts say. Pure.

A rollout is *hit* by a fault that was done to it by name, or that was under way, or just over, while it went on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from barchan.rollout.record import RolloutRecord
from barchan.testing.faults.events import FaultEvent
from barchan.testing.faults.plan import AFTERMATH_S, KINDS, Kind

# True reward of an attempt; None: nobody knows.
Truth = Callable[[str, int], float | None]
SAME_REWARD = 1e-9


class FaultRow(Struct, frozen=True, kw_only=True):
    """One kind of fault, and the records of the rollouts that it hit. A rollout that several hit is in the row of each.

    Attributes:
        injected: How often it was done to something.
        right, wrong: Scored with the true reward, and with another one: a false-valid.
        untold: Scored, and nobody knows the true reward.
        void: By cause.
    """

    kind: str
    injected: int
    hit: int
    right: int
    wrong: int
    untold: int
    void: dict[str, int]
    cancelled: int


class Wrong(Struct, frozen=True, kw_only=True):
    """A record that should not be so."""

    rollout_id: str
    task_id: str
    status: str
    cause: str
    reward: float | None
    truth: float | None
    faults: tuple[str, ...]


class FaultTable(Struct, frozen=True, kw_only=True):
    """A run with faults, judged.

    Attributes:
        rows: By kind, then `none`: the rollouts that nothing hit.
        false_valid: Scored with a reward that is not the true one. Must be empty.
        false_void: Void though no fault hit them.
        retried: Records of places that were tried again.
        resumed: How often another client took the run up.
        left: What remained on the host when the node had ended.
    """

    seed: int
    rollouts: int
    scored: int
    right: int
    void: int
    false_valid: tuple[Wrong, ...]
    false_void: tuple[Wrong, ...]
    retried: int
    resumed: int
    wall_s: float
    rows: tuple[FaultRow, ...]
    left: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.false_valid and not self.left


def judge(
    records: Sequence[RolloutRecord],
    events: Sequence[FaultEvent],
    truth: Truth,
    *,
    seed: int,
    resumed: int,
    wall_s: float,
    left: Sequence[str] = (),
) -> FaultTable:
    """The table of a run that is over."""
    hits = {record.rollout_id: kinds_of(record, events) for record in records}
    wrong = [record for record in records if is_wrong(record, truth)]
    untouched_void = [record for record in records if record.verdict.status == "void" and not hits[record.rollout_id]]
    counts = Counter(event.kind for event in events if event.reached)
    tried = {event.kind for event in events}
    kinds: list[Kind] = [kind for kind in KINDS if kind in tried]
    rows = [
        _row(kind, counts[kind], [record for record in records if kind in hits[record.rollout_id]], truth)
        for kind in kinds
    ]
    rows.append(_row("none", 0, [record for record in records if not hits[record.rollout_id]], truth))
    scored = [record for record in records if record.verdict.status == "scored"]
    return FaultTable(
        seed=seed,
        rollouts=len(records),
        scored=len(scored),
        right=sum(is_right(record, truth) for record in scored),
        void=sum(record.verdict.status == "void" for record in records),
        false_valid=_told(wrong, truth, hits),
        false_void=_told(untouched_void, truth, hits),
        retried=sum(record.attempt > 0 for record in records),
        resumed=resumed,
        wall_s=round(wall_s, 3),
        rows=tuple(rows),
        left=tuple(left),
    )


def kinds_of(record: RolloutRecord, events: Iterable[FaultEvent]) -> tuple[Kind, ...]:
    """The faults that hit a rollout, as far as that is known from outside."""
    began = record.started_unix_s
    ended = began + (record.timings.total_ms or 0.0) / 1e3

    def is_hit(event: FaultEvent) -> bool:
        if event.rollouts:
            return record.rollout_id in event.rollouts
        return event.began_unix_s <= ended and began <= event.ended_unix_s + AFTERMATH_S

    return tuple(dict.fromkeys(event.kind for event in events if is_hit(event)))


def is_right(record: RolloutRecord, truth: Truth) -> bool:
    """Scored with the true reward."""
    reward, true = record.verdict.reward, truth(record.task_id, record.sample_index)
    return reward is not None and true is not None and abs(reward - true) <= SAME_REWARD


def is_wrong(record: RolloutRecord, truth: Truth) -> bool:
    """Scored with another reward than the true one."""
    is_known = truth(record.task_id, record.sample_index) is not None
    return record.verdict.status == "scored" and is_known and not is_right(record, truth)


def _row(kind: str, injected: int, records: Sequence[RolloutRecord], truth: Truth) -> FaultRow:
    statuses = Counter(record.verdict.status for record in records)
    right = sum(is_right(record, truth) for record in records)
    wrong = sum(is_wrong(record, truth) for record in records)
    return FaultRow(
        kind=kind,
        injected=injected,
        hit=len(records),
        right=right,
        wrong=wrong,
        untold=statuses["scored"] - right - wrong,
        void=dict(Counter(record.verdict.cause for record in records if record.verdict.status == "void").most_common()),
        cancelled=statuses["cancelled"],
    )


def _told(records: Iterable[RolloutRecord], truth: Truth, hits: dict[str, tuple[Kind, ...]]) -> tuple[Wrong, ...]:
    return tuple(
        Wrong(
            rollout_id=record.rollout_id,
            task_id=record.task_id,
            status=record.verdict.status,
            cause=record.verdict.cause,
            reward=record.verdict.reward,
            truth=truth(record.task_id, record.sample_index),
            faults=hits[record.rollout_id],
        )
        for record in records
    )
