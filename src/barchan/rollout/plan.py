"""Which attempt comes next, which one is surplus, which one is tried again, which group is given up. Pure: no sandbox,
no clock.
"""

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

from barchan.model.verdict import Verdict
from barchan.rollout.rules.causes import RULES
from barchan.rollout.rules.control import quarantined

# A void by one of these says nothing about the next try, unless its cause would come again (`RULES`). The task's own
# faults and the caller's would.
TRIED_AGAIN = ("platform", "model")


class Member(NamedTuple):
    """One try at one place of a group."""

    group_index: int
    sample_index: int
    attempt: int = 0


class Sampling(NamedTuple):
    """How many attempts a group gets.

    Attributes:
        group: Scored members that are wanted.
        over_sample: Members more than that are started; what is not among the first `group` scored is cancelled.
        refill: Times that a void member is tried again, in each group together, where the group would else fall short.
    """

    group: int = 1
    over_sample: int = 0
    refill: int = 0

    @property
    def started(self) -> int:
        return self.group + self.over_sample

    @property
    def min_valid(self) -> int:
        """Scored members below which a group is of no use: half of those wanted, and at least 2. A single attempt is no
        group.
        """
        return min(self.group, max(2, math.ceil(self.group / 2)))


class Settled(NamedTuple):
    """What follows from an attempt's end.

    Attributes:
        counts: False for a score that came after the group was full.
        surplus: Started members of the group that nobody needs any more.
        spare: Those that were not started yet.
        retry: The void member's next try.
        given_up: Those that were not started, and are not worth it: too few of the group can still be scored.
    """

    counts: bool = True
    surplus: tuple[Member, ...] = ()
    spare: tuple[Member, ...] = ()
    retry: Member | None = None
    given_up: tuple[Member, ...] = ()


class _Group:
    def __init__(self, waiting: set[Member], scored: int, refill: int) -> None:
        self.waiting = waiting
        self.live: set[Member] = set()
        self.scored = scored
        self.refills_left = refill


class Plan:
    """The groups of a run. A group's members come up once it is `ready`, in the order of the groups, so that a run cut
    short has whole groups.

    Args:
        first_attempt: The attempt that each (group, sample) starts with; None: it is scored already.
    """

    def __init__(
        self, groups: int, sampling: Sampling, first_attempt: Callable[[int, int], int | None] = lambda group, sample: 0
    ) -> None:
        self._wanted = sampling.group
        self._min_valid = sampling.min_valid
        self._groups: list[_Group] = []
        self._heap: list[Member] = []
        self._is_stopped = False
        self.unfinished = 0
        for group_index in range(groups):
            firsts = {sample: first_attempt(group_index, sample) for sample in range(sampling.started)}
            members = {Member(group_index, sample, first) for sample, first in firsts.items() if first is not None}
            scored = len(firsts) - len(members)
            waiting = members if scored < sampling.group else set()
            self._groups.append(_Group(waiting, scored, sampling.refill))
            self.unfinished += len(waiting)

    def waits(self, group_index: int) -> bool:
        """Whether the group still has members to start."""
        return bool(self._groups[group_index].waiting)

    def ready(self, group_index: int) -> None:
        """From now on the group's members may start."""
        for member in self._groups[group_index].waiting:
            heapq.heappush(self._heap, member)

    def drop(self, group_index: int) -> list[Member]:
        """Give a group up that can't become ready; returns its members."""
        group = self._groups[group_index]
        dropped, group.waiting = sorted(group.waiting), set()
        self.unfinished -= len(dropped)
        return dropped

    def start(self) -> Member | None:
        """The next member to start; None while none may."""
        while self._heap:
            member = heapq.heappop(self._heap)
            group = self._groups[member.group_index]
            if member in group.waiting:  # else it became surplus
                group.waiting.remove(member)
                group.live.add(member)
                return member
        return None

    def settle(self, member: Member, verdict: Verdict, *, again: bool = False) -> Settled:
        """Take note of a started member's end.

        Args:
            again: It was no attempt at all, since nobody could go on with it: another one takes its place, beside those
                that refills allow.
        """
        group = self._groups[member.group_index]
        if member in group.live:
            group.live.remove(member)
            self.unfinished -= 1
        if verdict.status == "scored":
            return self._settle_scored(group)
        is_wanted = not self._is_stopped and group.scored < self._wanted
        if is_wanted and (again or self._is_tried_again(group, verdict)):
            group.refills_left -= not again
            retry = member._replace(attempt=member.attempt + 1)
            group.waiting.add(retry)
            heapq.heappush(self._heap, retry)
            self.unfinished += 1
            return Settled(retry=retry)
        return Settled(given_up=self._given_up(member.group_index))

    def _given_up(self, group_index: int) -> tuple[Member, ...]:
        """What need not be started of a group that has lost too many."""
        group = self._groups[group_index]
        if group.scored + len(group.live) + len(group.waiting) >= self._min_valid:
            return ()
        return tuple(self.drop(group_index))

    def stop(self) -> int:
        """Start nothing any more; returns how many that leaves out."""
        self._is_stopped = True
        return sum(len(self.drop(group_index)) for group_index in range(len(self._groups)))

    def _settle_scored(self, group: _Group) -> Settled:
        if group.scored >= self._wanted:
            return Settled(counts=False)
        group.scored += 1
        if group.scored < self._wanted:
            return Settled()
        settled = Settled(surplus=tuple(sorted(group.live)), spare=tuple(sorted(group.waiting)))
        self.unfinished -= len(group.live) + len(group.waiting)
        group.live, group.waiting = set(), set()
        return settled

    def _is_tried_again(self, group: _Group, verdict: Verdict) -> bool:
        if verdict.fault not in TRIED_AGAIN or RULES[verdict.cause].retry in ("never", "stop") or quarantined(verdict):
            return False
        falls_short = group.scored + len(group.live) + len(group.waiting) < self._wanted
        return falls_short and group.refills_left > 0
