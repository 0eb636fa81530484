"""Admission: start, queue or refuse, from counts alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.core.admission import Limits, Load, decide
from barchan.errors import CapacityError

LIMITS = Limits(starting_max=4, queued_max=10, running_max=100)
IDLE = {
    "starting": 0,
    "queued": 0,
    "running": 0,
    "memory_available_mib": 8192,
    "disk_available_mib": 50_000,
    "start_ms_p50": 5.0,
}


def load(**changes: float) -> Load:
    return Load(**{**IDLE, **changes})


def test_an_idle_node_starts_at_once() -> None:
    """Nothing in the way."""
    assert decide(LIMITS, load()) == "start"


def test_a_busy_node_queues() -> None:
    """As many as allowed are being started: the next waits its turn."""
    assert decide(LIMITS, load(starting=4)) == "queue"


@pytest.mark.parametrize(
    "changes",
    [
        {"running": 100},
        {"running": 90, "starting": 4, "queued": 6},
        {"memory_available_mib": 100},
        {"disk_available_mib": 100},
    ],
    ids=["running", "running with those on their way", "memory", "disk"],
)
def test_a_full_node_refuses_with_a_retry_time(changes: dict[str, float]) -> None:
    """Each bound refuses, and says when to ask again."""
    with pytest.raises(CapacityError) as caught:
        decide(LIMITS, load(**changes))
    assert int(caught.value.details["retry_after_ms"]) > 0


def test_a_full_queue_refuses_for_as_long_as_the_queue_takes() -> None:
    """10 waiting, 4 at a time, 400 ms each: a second."""
    with pytest.raises(CapacityError) as caught:
        decide(LIMITS, load(starting=4, queued=10, start_ms_p50=400.0))
    assert caught.value.details["retry_after_ms"] == 1000


@given(st.integers(0, 8), st.integers(0, 20), st.integers(0, 120))
def test_the_bounds_are_never_passed(starting: int, queued: int, running: int) -> None:
    """Whatever the load, an admitted sandbox keeps every bound."""
    try:
        decision = decide(LIMITS, load(starting=starting, queued=queued, running=running))
    except CapacityError:
        return
    assert running + starting + queued < LIMITS.running_max
    assert decision == ("start" if starting < LIMITS.starting_max else "queue")
    assert decision == "start" or queued < LIMITS.queued_max
