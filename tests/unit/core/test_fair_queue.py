"""Turns of those who queue."""

import pytest

from barchan.core.fair_queue import FairQueue


def test_owners_take_turns_and_keep_their_order() -> None:
    """Who has much waiting holds up nobody; of one owner's, the first goes first."""
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.push(item[0], item)
    assert len(queue) == 6
    assert [queue.pop() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    with pytest.raises(IndexError):
        queue.pop()


def test_what_is_dropped_or_cleared_is_gone() -> None:
    """And what was not there is said to be so."""
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "b1"):
        queue.push(item[0], item)
    assert queue.drop("a", "a1") and not queue.drop("a", "a1") and not queue.drop("c", "c1")
    assert len(queue) == 2
    assert sorted(queue.clear()) == ["a2", "b1"]
    assert not queue


def test_whoever_is_held_is_passed_over() -> None:
    """Until that ends, and then in the old order; and one owner's can all be taken out."""
    held = {"a"}
    queue: FairQueue[str] = FairQueue(held)
    for item in ("a1", "a2", "b1"):
        queue.push(item[0], item)
    assert queue.is_ready and queue.pop() == "b1"
    assert not queue.is_ready and len(queue) == 2
    with pytest.raises(IndexError):
        queue.pop()
    held.clear()
    assert queue.pop() == "a1"
    assert queue.drop_owner("a") == ["a2"] and queue.drop_owner("a") == []
    assert not queue and not queue.is_ready
