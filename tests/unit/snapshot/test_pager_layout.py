"""News of an address space in another order than it happened: the record is right all the same."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.snapshot.form import ZEROS
from barchan.snapshot.pagemap import PAGE_BYTES
from barchan.snapshot.pager import uffd
from barchan.snapshot.pager.layout import Layout
from barchan.snapshot.pager.regions import Part, Regions

AREAS, AREA_PAGES, PLACES = 5, 4, 9
LENGTH = AREA_PAGES * PAGE_BYTES


class Step(NamedTuple):
    """What a thread did, as the kernel tells it."""

    thread: int
    event: uffd.Event


def place(number: int) -> int:
    return (number + 1) * LENGTH


def layout() -> Layout:
    """Areas at the first places, with every other page missing."""
    areas = Regions(Part(place(n), place(n) + LENGTH, ZEROS, 0) for n in range(AREAS))
    missing = [
        Part(place(n) + page * PAGE_BYTES, place(n) + (page + 1) * PAGE_BYTES, 0, 100 * n + 7 * page)
        for n in range(AREAS)
        for page in range(0, AREA_PAGES, 2)
    ]
    return Layout(areas, Regions(missing))


def happen(source: random.Random, steps: int, threads: int) -> tuple[list[Step], dict[int, int]]:
    """Threads that move and unmap areas: what they did in order, and where each area is at the end."""
    at = {n: n for n in range(AREAS)}
    dropped: set[int] = set()
    done = []
    for number in range(steps):
        area = source.choice(sorted(at))
        start = place(at[area])
        match source.choice(["move", "move", "move", "drop", "unmap"]):
            case "move":
                target = source.choice(sorted(set(range(PLACES)) - set(at.values())))
                event = uffd.Event(uffd.REMAP, start, place(target), LENGTH)
                at[area] = target
            case "drop":
                event = uffd.Event(uffd.REMOVE, start, start + LENGTH, 0)
                dropped.add(area)
            case _ if len(at) > 2:
                event = uffd.Event(uffd.UNMAP, start, start + LENGTH, 0)
                del at[area]
            case _:
                continue
        done.append(Step(number % threads, event))
    return done, {area: at[area] for area in at if area not in dropped}


def told(source: random.Random, steps: list[Step]) -> list[uffd.Event]:
    """In an order in which the kernel might tell.

    A thread's news may come behind those of one step of another, on another area; that the place of a move was left,
    behind any number of them, but before the thread goes on.
    """
    order, index = list(steps), 0
    while index + 1 < len(order):
        one, other = order[index], order[index + 1]
        is_related = one.event.a == other.event.a or (one.event.kind == uffd.REMAP and one.event.b == other.event.a)
        if one.thread != other.thread and source.random() < 0.5 and not is_related:
            order[index], order[index + 1] = other, one
            index += 1
        index += 1
    events: list[uffd.Event] = []
    second: dict[int, uffd.Event] = {}
    for step in order:
        for thread in sorted(second):
            if thread == step.thread or source.random() < 0.5:
                events.append(second.pop(thread))
        events.append(step.event)
        if step.event.kind == uffd.REMAP:
            start, _, length = step.event[1:]
            second[step.thread] = uffd.Event(uffd.UNMAP, start, start + length, 0)
    return events + list(second.values())


def pages_of(regions: Regions) -> dict[int, int]:
    return {
        address: part.slot_at(address) for part in regions.parts for address in range(part.start, part.end, PAGE_BYTES)
    }


@given(st.integers(0, 1 << 32))
def test_areas_are_followed_whatever_the_order(seed: int) -> None:
    """Two threads that move, drop and unmap areas, each to where the other's may just have been."""
    source = random.Random(seed)
    steps, left = happen(source, 12, 2)
    record = layout()
    for event in told(source, steps):
        record.take(event)
    assert record.settle() == []
    expected = {
        place(now) + page * PAGE_BYTES: 100 * area + 7 * page
        for area, now in left.items()
        for page in range(0, AREA_PAGES, 2)
    }
    assert pages_of(record.missing) == expected


@pytest.mark.parametrize("is_told_first", [False, True])
def test_a_child_of_a_fork_during_a_move_has_it_in_both_places(is_told_first: bool) -> None:
    """Which of them is right can't be known; there is no area of the child at the other."""
    record = layout()
    news = [uffd.Event(uffd.REMAP, place(0), place(7), LENGTH), uffd.Event(uffd.FORK, 9, 0, 0)]
    for event in news if is_told_first else reversed(news):
        record.take(event)
    was_certain = record.is_certain
    ((fd, child),) = record.settle()
    assert (was_certain, record.is_certain) == (False, True)
    assert fd == 9
    before, after = pages_of(layout().missing), pages_of(record.missing)
    assert pages_of(child.missing) == before | after
    assert place(7) in after
    assert place(0) not in after


def test_a_child_keeps_what_its_parent_drops_later() -> None:
    """And what was moved long before is not taken for a move at the time of the fork."""
    record = layout()
    record.take(uffd.Event(uffd.REMAP, place(0), place(7), LENGTH))
    record.settle()
    record.take(uffd.Event(uffd.FORK, 9, 0, 0))
    then = pages_of(record.missing)
    record.take(uffd.Event(uffd.UNMAP, place(1), place(1) + LENGTH, 0))
    ((_, child),) = record.settle()
    assert pages_of(child.missing) == then
    assert pages_of(record.missing) != then
