"""Which waiting sandboxes go down which tier: what is never done, what more need never undoes, and what is learned."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as some

from barchan.core.density import Step
from barchan.core.hibernation import PAUSE_AFTER_S, Facts, Host, Move, Waits, decide, is_still_out, may_pause
from barchan.model.tiers import Tier, Waiting

DEPTH: dict[Tier, int] = {"running": 0, "paused": 1, "paged_out": 2, "hibernated": 3}
STEPS: tuple[Step, ...] = get_args(Step)
EASE = Host(step="none", has_swap=True, has_disk=True)
MIB = 1 << 20

waitings = some.builds(
    Waiting,
    pause=some.booleans(),
    page_out=some.booleans(),
    hibernate=some.booleans(),
    after_s=some.none() | some.floats(0.1, 3600),
)
sandboxes = some.builds(
    Facts,
    sandbox_id=some.sampled_from(["sb_1", "sb_2", "sb_3"]),
    tier=some.sampled_from(get_args(Tier)),
    waiting=waitings,
    is_busy=some.booleans(),
    has_programs=some.booleans(),
    waited_s=some.floats(0, 1e5),
    memory_bytes=some.integers(0, 1 << 36),
    remaining_s=some.floats(0, 1e6),
    can_hibernate=some.booleans(),
)
hosts = some.builds(Host, step=some.sampled_from(STEPS), has_swap=some.booleans(), has_disk=some.booleans())


def waiting_one(**changes: object) -> Facts:
    """A paused sandbox of 300 MiB that has waited for a minute, but for what is given."""
    fields: dict[str, object] = {
        "sandbox_id": "sb_1",
        "tier": "paused",
        "waiting": Waiting(),
        "is_busy": False,
        "has_programs": True,
        "waited_s": 60.0,
        "memory_bytes": 300 * MIB,
        "remaining_s": 60.0,
        "can_hibernate": True,
    }
    return Facts(**{**fields, **changes})  # type: ignore[arg-type]


def freed(one: Facts, moves: list[Move]) -> int:
    """How deep it is after the moves."""
    return max([DEPTH[one.tier], *(DEPTH[move.tier] for move in moves)])


@given(sandboxes, hosts)
def test_what_is_never_done(one: Facts, host: Host) -> None:
    """Nothing busy moves, nothing goes where its run or the host forbids it, and nothing goes up."""
    for move in decide([one], host):
        assert not one.is_busy
        assert DEPTH[move.tier] > DEPTH[one.tier]
        assert one.waiting.pause or one.tier != "running"
        assert move.tier != "paged_out" or (one.waiting.page_out and host.has_swap)
        assert move.tier != "hibernated" or (one.waiting.hibernate and one.can_hibernate and host.has_disk)


@given(sandboxes, hosts)
def test_a_move_that_was_made_is_not_asked_for_again(one: Facts, host: Host) -> None:
    """With the same facts but for the tier, only a deeper one can follow, and it comes to an end."""
    for _ in range(len(DEPTH)):
        moves = decide([one], host)
        if not moves:
            return
        one = Facts(**{name: getattr(one, name) for name in one.__struct_fields__} | {"tier": moves[0].tier})
    assert decide([one], host) == []


@given(sandboxes, some.booleans(), some.booleans())
def test_more_need_never_frees_less(one: Facts, has_swap: bool, has_disk: bool) -> None:
    """The shorter memory is, the deeper each goes, or as deep."""
    depths = [freed(one, decide([one], Host(step=step, has_swap=has_swap, has_disk=has_disk))) for step in STEPS]
    assert depths == sorted(depths)


@given(sandboxes, hosts, some.floats(1, 1e6))
def test_longer_waits_never_free_less(one: Facts, host: Host, more_s: float) -> None:
    """Expected to wait longer, it goes as deep, or deeper."""
    longer = Facts(
        **{name: getattr(one, name) for name in one.__struct_fields__} | {"remaining_s": one.remaining_s + more_s}
    )
    assert freed(longer, decide([longer], host)) >= freed(one, decide([one], host))


@given(some.lists(sandboxes, max_size=6), hosts)
def test_the_worthiest_come_first(found: list[Facts], host: Host) -> None:
    """So that whoever carries out only the first few gains the most."""
    moves = decide(found, host)
    assert [move.worth for move in moves] == sorted((move.worth for move in moves), reverse=True)


@pytest.mark.parametrize(
    ("step", "changes", "expected"),
    [
        ("none", {}, None),  # a minute more is not worth it while there is memory
        ("none", {"remaining_s": 86_400.0}, "hibernated"),
        ("tiers", {}, "paged_out"),
        ("tiers", {"remaining_s": 600.0}, "hibernated"),
        ("tiers", {"remaining_s": 600.0, "can_hibernate": False}, "paged_out"),
        ("refuse", {}, "hibernated"),
        ("refuse", {"remaining_s": 5.0}, None),
        ("evict", {"remaining_s": 5.0}, "hibernated"),
        ("evict", {"memory_bytes": 1 << 10}, None),
        ("none", {"tier": "running", "waited_s": PAUSE_AFTER_S}, "paused"),
        ("none", {"tier": "running", "waited_s": PAUSE_AFTER_S / 2}, None),
        ("none", {"tier": "running", "has_programs": False}, None),
        ("none", {"waiting": Waiting(after_s=60)}, "hibernated"),
        ("none", {"waiting": Waiting(after_s=61)}, None),
        ("none", {"waiting": Waiting(after_s=60, hibernate=False)}, "paged_out"),
        ("evict", {"waiting": Waiting(hibernate=False, page_out=False)}, None),
    ],
)
def test_what_it_comes_to(step: Step, changes: dict[str, object], expected: Tier | None) -> None:
    """The cost model, in cases that people think of."""
    moves = decide([waiting_one(**changes)], Host(step=step, has_swap=True, has_disk=True))
    assert [move.tier for move in moves] == ([] if expected is None else [expected])


def test_an_empty_one_is_stopped_only_for_memory() -> None:
    """Stopping nothing saves nothing; before it can go to disk it must be stopped, though."""
    empty = waiting_one(tier="running", has_programs=False)
    assert not may_pause(empty, "none")
    assert may_pause(empty, "tiers")


class TestWaits:
    """The estimate of what is left of a wait."""

    def test_nothing_seen(self) -> None:
        """As long again as it has been."""
        assert Waits().remaining_s(10.0) == pytest.approx(10.0)

    def test_regular_waits_are_learned(self) -> None:
        """Of waits of two seconds, one that has lasted for half of one has one and a half left."""
        waits = Waits()
        for _ in range(500):
            waits.observe(2.0)
        assert waits.remaining_s(0.5) == pytest.approx(1.5, abs=0.05)

    def test_longer_than_all_seen(self) -> None:
        """Then nobody knows: as long again."""
        waits = Waits()
        for _ in range(500):
            waits.observe(2.0)
        assert waits.remaining_s(100.0) == pytest.approx(100.0)

    def test_old_ones_fade(self) -> None:
        """A run whose model has become faster is believed after a while."""
        waits = Waits()
        for wait_s in [600.0] * 2000 + [2.0] * 8000:
            waits.observe(wait_s)
        assert waits.remaining_s(0.0) < 10

    @given(some.lists(some.floats(0, 1e7), max_size=50), some.floats(0, 1e7))
    def test_it_is_a_time(self, seen: list[float], waited_s: float) -> None:
        """Never negative, whatever was seen."""
        waits = Waits()
        for wait_s in seen:
            waits.observe(wait_s)
        assert waits.remaining_s(waited_s) >= 0
        assert waits.count <= 2000


@pytest.mark.parametrize(
    ("now_mib", "left_mib", "out_mib", "expected"),
    [(30, 0, 0, False), (10, 5, 25, True), (12, 5, 25, False), (3, 5, 25, True), (5, 5, 0, False)],
)
def test_a_page_out_is_not_repeated_for_little(now_mib: int, left_mib: int, out_mib: int, expected: bool) -> None:
    """Where less than a quarter of what was out came back. One that has freed nothing so far is not done with."""
    assert is_still_out(now_mib * MIB, left_mib * MIB, out_mib * MIB) is expected
