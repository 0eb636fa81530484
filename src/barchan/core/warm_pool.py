"""How many slots to keep ready. Pure: creates seen and bounds in, a number out."""

from collections import deque
from math import ceil

from msgspec import Struct

from barchan.core.density import Step
from barchan.errors import InvalidSpec

BURST_S = 0.5  # creates closer together than this can't wait for slots to be made between them
REMEMBERED_S = 60.0
SPARE = 1.25  # of the largest burst seen
MOST_FACTOR = 8  # times the least, where creates come in bursts


class Bounds(Struct, frozen=True):
    """Slots: at least, and at most."""

    least: int
    most: int

    @classmethod
    def around(cls, least: int) -> "Bounds":
        """With room for bursts above `least`; 0: none at all.

        Raises:
            InvalidSpec: Less than none.
        """
        if least < 0:
            raise InvalidSpec(f"a warm pool of {least} slots: give 0 or more")
        return cls(least, least * MOST_FACTOR)


class Demand:
    """The creates of the last minute that a slot could have served, by the bursts they came in."""

    def __init__(self) -> None:
        self._bursts: deque[tuple[float, int]] = deque()  # when each began, and how many there were

    def seen(self, now_s: float) -> None:
        """One more, at this time of a clock that never goes back."""
        if self._bursts and now_s - self._bursts[-1][0] < BURST_S:
            began_s, count = self._bursts[-1]
            self._bursts[-1] = (began_s, count + 1)
        else:
            self._bursts.append((now_s, 1))
            self._forget(now_s)

    def burst(self, now_s: float) -> int:
        """The most that came at once within the time remembered."""
        self._forget(now_s)
        return max((count for _, count in self._bursts), default=0)

    def _forget(self, now_s: float) -> None:
        while self._bursts and now_s - self._bursts[0][0] > REMEMBERED_S:
            self._bursts.popleft()


def wanted(bounds: Bounds, burst: int, step: Step) -> int:
    """Slots to keep: the least, more after bursts, the least where memory is short, none where it is very short."""
    if step in ("refuse", "evict"):
        return 0
    if step == "tiers":
        return bounds.least
    return max(bounds.least, min(bounds.most, ceil(burst * SPARE)))
