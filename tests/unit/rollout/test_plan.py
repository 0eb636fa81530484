"""Who is started, who is surplus, who is tried again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.model.verdict import Verdict
from barchan.rollout.plan import Member, Plan, Sampling, Settled
from barchan.rollout.verdict import cancelled, scored, void

pytestmark = pytest.mark.timeout(60)

ONE = scored(1.0, "completed", False, ())
LOST = void("platform", "sandbox_lost", ())


def plan(groups: int = 1, **sampling: int) -> Plan:
    made = Plan(groups, Sampling(**sampling))
    for group_index in range(groups):
        made.ready(group_index)
    return made


def started(made: Plan) -> list[Member]:
    members = []
    while (member := made.start()) is not None:
        members.append(member)
    return members


def test_members_come_group_by_group() -> None:
    """In order, each once, and then none."""
    made = plan(2, group=2)
    assert started(made) == [Member(0, 0), Member(0, 1), Member(1, 0), Member(1, 1)]
    assert (made.start(), made.unfinished) == (None, 4)


def test_a_group_waits_until_it_is_ready() -> None:
    """Others go on meanwhile; one that never gets ready is given up whole."""
    made = Plan(3, Sampling(group=2))
    made.ready(1)
    assert started(made) == [Member(1, 0), Member(1, 1)]
    assert made.drop(0) == [Member(0, 0), Member(0, 1)]
    made.ready(2)
    assert started(made) == [Member(2, 0), Member(2, 1)]
    assert made.unfinished == 4


def test_a_full_group_needs_no_more() -> None:
    """With the last score that is wanted, those that run are surplus, and those that wait are spare."""
    made = plan(group=2, over_sample=2)
    first, second, third = (made.start() for _ in range(3))
    assert first and second and third
    assert made.settle(first, ONE) == Settled()
    assert made.settle(second, ONE) == Settled(surplus=(third,), spare=(Member(0, 3),))
    assert (made.unfinished, made.start()) == (0, None)
    assert made.settle(third, ONE) == Settled(counts=False)
    assert made.settle(third, cancelled("exec")) == Settled()
    assert made.unfinished == 0


def test_a_void_member_is_tried_again_as_the_next_attempt() -> None:
    """As often as allowed for its group, then no more."""
    made = plan(group=1, refill=2)
    first = made.start()
    assert first is not None
    assert made.settle(first, LOST).retry == Member(0, 0, 1)
    second = made.start()
    assert second is not None
    assert made.settle(second, LOST).retry == Member(0, 0, 2)
    third = made.start()
    assert third is not None
    assert made.settle(third, LOST) == Settled()
    assert (made.unfinished, made.start()) == (0, None)


def test_a_spare_sibling_stands_in_before_a_void_one_is_tried_again() -> None:
    """Where enough members are left to fill the group, nothing is tried again."""
    made = plan(group=1, over_sample=1, refill=1)
    first, second = started(made)
    assert made.settle(first, LOST) == Settled()
    assert made.settle(second, LOST).retry == Member(0, 1, 1)


def test_an_image_that_could_not_be_had_in_time_is_tried_again() -> None:
    """A store's outage must not void for good what was under way."""
    made = plan(group=1, refill=1)
    member = made.start()
    assert member is not None
    assert made.settle(member, void("platform", "image_unavailable", ())).retry == Member(0, 0, 1)


@pytest.mark.parametrize(
    "verdict",
    [
        void("caller", "policy_error", ()),
        void("task", "task_invalid", ()),
        void("platform", "image", ()),
        cancelled("exec"),
    ],
)
def test_what_would_only_come_again_is_not_tried_again(verdict: Verdict) -> None:
    """Faults of the caller, the task and the image, and what was cancelled."""
    made = plan(group=1, refill=5)
    member = made.start()
    assert member is not None
    assert made.settle(member, verdict) == Settled()


def test_a_resumed_group_starts_what_is_not_scored() -> None:
    """At the attempts that are free; a group that is full starts nothing."""
    firsts = {(0, 0): None, (0, 1): 2, (0, 2): 0, (1, 0): None, (1, 1): None, (1, 2): 1}
    made = Plan(2, Sampling(group=2, over_sample=1), lambda group, sample: firsts[group, sample])
    assert (made.waits(0), made.waits(1)) == (True, False)
    made.ready(0)
    made.ready(1)
    one, two = started(made)
    assert [one, two] == [Member(0, 1, 2), Member(0, 2, 0)]
    assert made.settle(two, ONE).surplus == (one,)


def test_a_group_that_cannot_be_of_use_is_given_up() -> None:
    """Once half of it, or two, can't be scored any more, and nothing may be tried again: what was not started need not
    be. A single attempt is no group.
    """
    made = plan(group=6, refill=1)
    members = [made.start() for _ in range(5)]
    left = [made.settle(member, LOST) for member in members if member is not None]
    assert left[0].retry == Member(0, 0, 1)
    assert [one.given_up for one in left[:4]] == [()] * 4
    assert left[4].given_up == (Member(0, 0, 1), Member(0, 5))
    assert (made.unfinished, made.start()) == (0, None)
    assert [Sampling(group=count).min_valid for count in (1, 2, 3, 4, 5, 16)] == [1, 2, 2, 2, 3, 8]


def test_a_stopped_run_starts_nothing_more() -> None:
    """What goes on may end; a void one is not tried again."""
    made = plan(2, group=2, refill=2)
    member = made.start()
    assert member is not None and made.stop() == 3
    assert (made.start(), made.unfinished) == (None, 1)
    assert made.settle(member, LOST).retry is None
    assert made.unfinished == 0


def test_an_abandoned_member_comes_again_only_where_it_is_wanted() -> None:
    """Whatever the refills say; but in no run that was stopped, and in no group that is full."""
    made = plan(group=1)
    (member,) = started(made)
    assert made.settle(member, LOST, again=True).retry == Member(0, 0, 1)
    (member,) = started(made)
    made.stop()
    assert (made.settle(member, LOST, again=True).retry, made.unfinished) == (None, 0)
    full = plan(group=1, over_sample=1)
    first, second = started(full)
    full.settle(first, ONE)
    assert (full.settle(second, LOST, again=True).retry, full.unfinished) == (None, 0)


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(0, 1 << 30),
)
def test_any_run_ends_with_its_bounds_kept(
    groups: int, group: int, over_sample: int, refill: int, at_once: int, seed: int
) -> None:
    """Whatever becomes of the attempts: at most `group` scores count, at most `refill` are tried again, nothing is
    started twice, and a group ends short only when nothing of it was left to try, or nothing worth it.
    """
    dice = random.Random(seed)
    made = plan(groups, group=group, over_sample=over_sample, refill=refill)
    live: list[Member] = []
    seen: set[Member] = set()
    counted, retried, least = [0] * groups, [0] * groups, Sampling(group=group).min_valid
    while True:
        while len(live) < at_once and (member := made.start()) is not None:
            assert member not in seen
            seen.add(member)
            live.append(member)
        if not live:
            break
        member = live.pop(dice.randrange(len(live)))
        verdict = ONE if dice.random() < 0.5 else LOST
        settled = made.settle(member, verdict)
        live = [other for other in live if other not in settled.surplus]
        assert not set(settled.spare) & seen
        assert not set(settled.given_up) & seen
        counted[member.group_index] += verdict is ONE and settled.counts
        retried[member.group_index] += settled.retry is not None
    assert made.unfinished == 0
    assert max(counted) <= group and max(retried) <= refill
    for index in range(groups):
        tried = sum(member.group_index == index for member in seen)
        assert counted[index] == group or tried == group + over_sample + refill or counted[index] < least
