"""When a run should stop, rather than void thousands: voids that pile up, and what they have in common. Pure.

One bad task is no reason: it is quarantined, and the others go on. So a run is stopped only by voids that are as many
without the task that has most of them.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import RunStopped
from barchan.model.verdict import Cause, Verdict
from barchan.rollout.rules.causes import RULES

# What rollouts may have in common, the most telling first; where nothing tells them apart, the fault does.
Factor = Literal["image", "endpoint", "node", "cause"]
FACTORS: tuple[Factor, ...] = ("image", "endpoint", "node")
CONTRAST = 0.25  # a factor is named if voids are so much more frequent with it than without
OTHERS_MIN = 4  # rollouts of other tasks, without which nobody knows
# Told of a task, or of the run itself, already.
NOT_COUNTED: frozenset[Cause] = frozenset({"task_quarantined", "budget_spent"})
_BY_FAULT: dict[str, Factor] = {"model": "endpoint", "platform": "node"}
_OF_IMAGES: frozenset[Cause] = frozenset({"image", "image_unavailable"})
_ADVICE: dict[Factor, str] = {
    "image": "look at the image (barchan image verify) and at the store it comes from",
    "endpoint": "look whether the model's server is up and takes such requests",
    "node": "look at the node (barchan doctor; node.log in its state directory)",
    "cause": "look at the evidence of one of them",
}


class BreakerTerms(Struct, frozen=True, kw_only=True):
    """When a run is stopped.

    Attributes:
        share: Of the latest rollouts that are void; 0: never, but for causes that come to all (`stop` in the rules).
        voids_min: So many have to be, at least.
        window: How many of the latest rollouts are looked at.
    """

    share: float = 0.5
    voids_min: int = 12
    window: int = 64


class Outcome(NamedTuple):
    """One rollout that has ended.

    Attributes:
        factors: What it has in common with others, by name.
        took_s: From its start to its end.
    """

    rollout_id: str
    task_id: str
    verdict: Verdict
    factors: Mapping[Factor, str]
    took_s: float


class Running(NamedTuple):
    """One that goes on."""

    task_id: str
    factors: Mapping[Factor, str]
    age_s: float


class Trip(Struct, frozen=True, kw_only=True):
    """Voids have piled up.

    Attributes:
        task_id: Of the one task that has them; None: the run's.
        factor, value: What they have in common.
        voids, of: So many void ones among so many.
        cause: The most frequent one, of `same_cause` among them.
        example: The evidence of one of them.
    """

    task_id: str | None
    factor: Factor
    value: str
    voids: int
    of: int
    cause: Cause
    same_cause: int
    rollout_id: str
    example: str

    @property
    def message(self) -> str:
        """What happened, why, and what to do next."""
        if RULES[self.cause].retry == "stop":
            return (
                f"{RULES[self.cause].meaning}: the run is stopped. {self.rollout_id} says: {self.example} "
                "(try: --resume goes on, with a budget that begins anew)"
            )
        where = f" of task {self.task_id}" if self.task_id is not None else ""
        shared = f", with {self.factor} {self.value} in common" if self.factor != "cause" else ""
        stopped = "no further one is begun" if self.task_id is not None else "the run is stopped"
        return (
            f"{self.voids} of the last {self.of} rollouts{where} are void{shared}, {self.same_cause} of them by "
            f"{self.cause}: {stopped}. One of them, {self.rollout_id}, says: {self.example} "
            f"(try: {_ADVICE[self.factor]}; then --resume goes on, in code attach=True; a breaker of 0 never stops)"
        )

    @property
    def error(self) -> RunStopped:
        return RunStopped(self.message, factor=self.factor, value=self.value, cause=self.cause, voids=self.voids)


class Breaker:
    """Hears of every rollout that has ended."""

    def __init__(self, terms: BreakerTerms = BreakerTerms()) -> None:  # noqa: B008 (frozen)
        self.terms = terms
        self._latest: deque[Outcome] = deque(maxlen=terms.window)
        self._told: set[str] = set()  # tasks that are given up

    def add(self, ended: Outcome, running: Callable[[], Iterable[Running]] = tuple) -> Trip | None:
        """What has to stop now, if anything.

        Args:
            running: Those that go on. One that is older than voids become counts as one that is not void: what fails at
                once is heard of before all that takes its time.
        """
        verdict = ended.verdict
        if verdict.status == "void" and RULES[verdict.cause].retry == "stop":
            return self._trip([ended], 1, None, "cause", verdict.cause)
        if not self.terms.share or verdict.status == "cancelled":
            return None
        if verdict.cause in NOT_COUNTED or ended.task_id in self._told:
            return None
        self._latest.append(ended)
        voids = [one for one in self._latest if _is_void(one)]
        if verdict.status != "void" or len(voids) < OTHERS_MIN:
            return None
        ages = sorted(one.took_s for one in voids)
        outlived = [one for one in running() if one.age_s > ages[len(ages) // 2]]
        return self._of_run(outlived) or self._of_task(ended.task_id, outlived)

    def _of_run(self, outlived: Sequence[Running]) -> Trip | None:
        named: list[tuple[float, int, Trip]] = []
        for order, factor in enumerate(FACTORS):
            values = {one.factors[factor] for one in self._latest if _is_void(one) and one.factors.get(factor)}
            for value in values:
                rows = [one for one in self._latest if one.factors.get(factor) == value]
                beside = [one for one in outlived if one.factors.get(factor) == value]
                without = [one for one in self._latest if one.factors.get(factor, value) != value]
                contrast = _share(rows) - _share(without) if len(without) >= OTHERS_MIN else 0.0
                if contrast >= CONTRAST and self._is_too_much(rows, beside):
                    named.append((contrast, -order, self._trip(rows, len(rows) + len(beside), None, factor, value)))
        if named:
            return max(named, key=lambda one: one[:2])[2]
        rows = list(self._latest)
        if not self._is_too_much(rows, outlived):
            return None
        return self._by_cause(self._trip(rows, len(rows) + len(outlived), None, "cause", ""))

    def _is_too_much(self, rows: Sequence[Outcome], beside: Sequence[Running]) -> bool:
        """Whether they are void too often, and would be without the one task that is worst."""
        voids = Counter(one.task_id for one in rows if _is_void(one))
        if voids.total() < self.terms.voids_min or not self._reaches(voids.total(), len(rows) + len(beside)):
            return False
        worst, count = voids.most_common(1)[0]
        others = [one for one in rows if one.task_id != worst]
        going = sum(one.task_id != worst for one in beside)
        left = voids.total() - count
        return left >= max(1, math.ceil(self.terms.voids_min / 3)) and self._reaches(left, len(others) + going)

    def _of_task(self, task_id: str, outlived: Sequence[Running]) -> Trip | None:
        rows = [one for one in self._latest if one.task_id == task_id]
        others = [one for one in self._latest if one.task_id != task_id]
        going = sum(one.task_id == task_id for one in outlived)
        voids = sum(map(_is_void, rows))
        is_known = len(others) >= OTHERS_MIN and _share(others) < self.terms.share / 2
        enough = math.ceil(self.terms.voids_min / 3) if is_known else self.terms.voids_min
        if voids < max(OTHERS_MIN, enough) or not self._reaches(voids, len(rows) + going):
            return None
        self._told.add(task_id)
        self._latest = deque(others, maxlen=self.terms.window)
        return self._by_cause(self._trip(rows, len(rows) + going, task_id, "cause", ""))

    def _reaches(self, voids: int, of: int) -> bool:
        return of > 0 and voids / of >= self.terms.share

    def _trip(self, rows: Sequence[Outcome], of: int, task_id: str | None, factor: Factor, value: str) -> Trip:
        voids = [one for one in rows if _is_void(one)]
        cause, count = Counter(one.verdict.cause for one in voids).most_common(1)[0]
        last = next(one for one in reversed(voids) if one.verdict.cause == cause)
        return Trip(
            task_id=task_id,
            factor=factor,
            value=value,
            voids=len(voids),
            of=of,
            cause=cause,
            same_cause=count,
            rollout_id=last.rollout_id,
            example=_example(last.verdict),
        )

    def _by_cause(self, trip: Trip) -> Trip:
        """Nothing tells the voids from the others: what they have in common is what their cause is about."""
        last = next((one for one in reversed(self._latest) if one.rollout_id == trip.rollout_id), None)
        factor: Factor = "image" if trip.cause in _OF_IMAGES else _BY_FAULT.get(RULES[trip.cause].fault, "cause")
        value = last.factors.get(factor, "") if last is not None and trip.task_id is None else ""
        return replace(trip, factor=factor, value=value) if value else replace(trip, factor="cause", value=trip.cause)


def _is_void(one: Outcome) -> bool:
    return one.verdict.status == "void"


def _share(rows: Sequence[Outcome]) -> float:
    return sum(map(_is_void, rows)) / len(rows) if rows else 0.0


def _example(verdict: Verdict) -> str:
    first = next(iter(verdict.evidence), None)
    return f"{first.source}: {first.value}"[:300] if first is not None else verdict.cause
