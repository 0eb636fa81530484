"""How many slots a node keeps, from the creates it has seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.core.density import Step
from barchan.core.warm_pool import Bounds, Demand, wanted
from barchan.errors import InvalidSpec


def _demand(*times_s: float) -> Demand:
    demand = Demand()
    for at_s in times_s:
        demand.seen(at_s)
    return demand


@pytest.mark.parametrize(
    ("burst", "step", "expected"),
    [
        (0, "none", 8),
        (4, "none", 8),
        (16, "none", 20),
        (1000, "none", 64),
        (1000, "tiers", 8),
        (1000, "refuse", 0),
        (0, "evict", 0),
    ],
)
def test_bursts_ask_for_more_and_shortage_for_less(burst: int, step: Step, expected: int) -> None:
    """Between the bounds, a quarter more than the largest burst; only the least, or none, where memory is short."""
    assert wanted(Bounds.around(8), burst, step) == expected


def test_none_means_none() -> None:
    """Whatever the demand."""
    assert wanted(Bounds.around(0), 1000, "none") == 0


def test_less_than_none_is_refused() -> None:
    """With the number in the message."""
    with pytest.raises(InvalidSpec, match="-1"):
        Bounds.around(-1)


def test_a_burst_is_what_comes_at_once() -> None:
    """Creates one after the other are served by slots that are filled between them."""
    assert _demand(0, 1, 2, 3).burst(3) == 1
    assert _demand(0, 0.1, 0.2, 3, 3.1).burst(4) == 3


def test_old_bursts_are_forgotten() -> None:
    """After a minute."""
    demand = _demand(0, 0.1, 0.2, 10)
    assert demand.burst(59) == 3
    assert demand.burst(61) == 1
    assert demand.burst(71) == 0


@given(st.lists(st.floats(min_value=0, max_value=0.01), max_size=200))
def test_it_never_counts_more_than_came(gaps_s: list[float]) -> None:
    """A burst is at most all creates, and at least one if there were any."""
    demand, now_s = Demand(), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        demand.seen(now_s)
    assert min(1, len(gaps_s)) <= demand.burst(now_s) <= len(gaps_s)
