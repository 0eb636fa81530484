"""Which waiting sandboxes go down which tier, and when. Pure: facts and the clock's readings in, moves out.

A tier is worth its price when memory freed x time it is expected to stay free, valued at what memory is worth now, is
more than the seconds that going down and coming back take. How long a wait will last is learned from the waits seen
before in the same run.
"""

import math
from collections.abc import Iterable

from msgspec import Struct

from barchan.core.density import Step
from barchan.model.tiers import Tier, Waiting

PAUSE_AFTER_S = 1.0  # with nothing to do, a freeze costs less than one more request
QUIET_S = 30.0  # programs that nobody waits for, and that use no processor for so long, may be stopped
GIB = float(1 << 30)
MIB = 1 << 20
PAGED_SHARE = 0.75  # of a stopped program's memory, that a page-out frees
KEPT_BYTES = 256 << 10  # of a hibernated one: its row and what the node remembers
# What a GiB that is free for a second is worth, in seconds of somebody's waiting.
WORTH: dict[Step, float] = {"none": 0.0005, "tiers": 0.05, "refuse": 0.5, "evict": 50.0}

_BUCKETS = 28
_BUCKET_FIRST_S = 0.125
_COUNT_MAX = 1024.0
_PRIOR = 4.0  # observations that the rule of thumb weighs as much as


class Waits:
    """How long sandboxes of one run have waited: counts in buckets of doubling seconds. Old ones fade."""

    __slots__ = ("_counts", "_sums", "_total")

    def __init__(self) -> None:
        self._counts = [0.0] * _BUCKETS
        self._sums = [0.0] * _BUCKETS
        self._total = 0.0

    @property
    def count(self) -> float:
        """Waits seen, the faded ones less than whole."""
        return self._total

    def observe(self, wait_s: float) -> None:
        """One wait has ended after so long."""
        at = 0 if wait_s < _BUCKET_FIRST_S else int(math.log2(wait_s / _BUCKET_FIRST_S)) + 1
        at = min(at, _BUCKETS - 1)
        self._counts[at] += 1.0
        self._sums[at] += max(0.0, wait_s)
        self._total += 1.0
        if self._total > _COUNT_MAX:
            self._counts = [count / 2 for count in self._counts]
            self._sums = [total / 2 for total in self._sums]
            self._total /= 2

    def remaining_s(self, waited_s: float) -> float:
        """How much longer a wait is expected to last, that has lasted for `waited_s`.

        With nothing seen: as long again. Waits that lasted longer than this one has so far count for what they had
        left then; few of those, and the rule of thumb counts more.
        """
        longer, left_s = 0.0, 0.0
        for count, total in zip(self._counts, self._sums, strict=True):
            if count and total / count > waited_s:
                longer += count
                left_s += total - count * waited_s
        return (left_s + _PRIOR * waited_s) / (longer + _PRIOR)


class Facts(Struct, frozen=True, kw_only=True):
    """One sandbox as the policy sees it.

    Attributes:
        is_busy: A request is served, or its programs are at work for somebody.
        has_programs: Anything runs in it at all.
        waited_s: Since the last request.
        memory_bytes: That it takes now.
        remaining_s: How much longer its wait is expected to last.
        can_hibernate: Its backend can, and nothing in it has refused to be stored since it was last awake.
    """

    sandbox_id: str
    tier: Tier
    waiting: Waiting
    is_busy: bool
    has_programs: bool
    waited_s: float
    memory_bytes: int
    remaining_s: float
    can_hibernate: bool


class Host(Struct, frozen=True, kw_only=True):
    """What the host has. `step`: how short it is of memory, as `core.density` says."""

    step: Step
    has_swap: bool
    has_disk: bool


class Costs(Struct, frozen=True, kw_only=True):
    """Seconds that a move down and the way back take, and how many more for each GiB."""

    page_out_s: float = 0.02
    page_out_s_per_gib: float = 2.0
    hibernate_s: float = 0.25
    hibernate_s_per_gib: float = 5.0


class Move(Struct, frozen=True):
    """Bring one sandbox to a tier. `worth`: what that gains, in seconds; the best come first."""

    sandbox_id: str
    tier: Tier
    worth: float


def decide(facts: Iterable[Facts], host: Host, costs: Costs = Costs()) -> list[Move]:  # noqa: B008 - frozen
    """Every move that is worth it now. Asking again after they were made gives none of them again."""
    moves = [move for one in facts if (move := _decide(one, host, costs)) is not None]
    return sorted(moves, key=lambda move: (-move.worth, move.sandbox_id))


def may_pause(one: Facts, step: Step) -> bool:
    """Whether it has waited for long enough to be stopped at all. An empty one gains nothing by it, until memory is
    short.
    """
    waiting = one.waiting
    if one.is_busy or one.waited_s < (waiting.after_s or PAUSE_AFTER_S):
        return False
    return waiting.pause and (one.has_programs or waiting.after_s is not None or step != "none")


def is_still_out(now_bytes: int, left_bytes: int, out_bytes: int) -> bool:
    """Whether a page-out is not worth another one: most of what the last has freed was not needed since.

    What a program touches at each of its turns would be packed and unpacked again each time, for little memory.

    Args:
        now_bytes: That it takes now.
        left_bytes: That it took after the last page-out.
        out_bytes: That were out then.
    """
    return now_bytes - left_bytes < (1.0 - PAGED_SHARE) * out_bytes


def _decide(one: Facts, host: Host, costs: Costs) -> Move | None:
    if one.is_busy or one.tier == "hibernated":
        return None
    if one.tier == "running" and not may_pause(one, host.step):
        return None
    deeper = _deeper(one, host)
    if one.waiting.after_s is not None:  # its run has decided
        due = one.waited_s >= one.waiting.after_s
        return Move(one.sandbox_id, deeper[-1], math.inf) if due and deeper else None
    best = Move(one.sandbox_id, "paused", 0.0) if one.tier == "running" else None
    for tier in deeper:
        worth = _worth(one, tier, WORTH[host.step], costs)
        if worth > (0.0 if best is None else best.worth):
            best = Move(one.sandbox_id, tier, worth)
    return best


def _deeper(one: Facts, host: Host) -> list[Tier]:
    """The tiers below its own that are open to it, the deepest last."""
    open_: list[Tier] = []
    if one.tier == "running" and one.waiting.pause:
        open_.append("paused")
    if one.tier in ("running", "paused") and one.waiting.page_out and host.has_swap:
        open_.append("paged_out")
    if one.waiting.hibernate and one.can_hibernate and host.has_disk:
        open_.append("hibernated")
    return open_


def _worth(one: Facts, tier: Tier, gib_s_worth: float, costs: Costs) -> float:
    gib = one.memory_bytes / GIB
    if tier == "paused":
        return 0.0
    if tier == "paged_out":
        freed, price = PAGED_SHARE * gib, costs.page_out_s + costs.page_out_s_per_gib * gib
    else:
        freed = max(0, one.memory_bytes - KEPT_BYTES) / GIB
        price = costs.hibernate_s + costs.hibernate_s_per_gib * gib
    return gib_s_worth * freed * one.remaining_s - price
