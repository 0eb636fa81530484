"""Admission: start, queue or refuse, from counts alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.core.admission import Limits, Load, check_budget, decide, spent_in_s
from barchan.core.density import Pressure
from barchan.errors import CapacityError, QuotaExceeded
from barchan.model.node import Budget, LeaseUse

LIMITS = Limits(starting_max=4, queued_max=10, running_max=100)
IDLE: dict[str, Any] = {
    "starting": 0,
    "queued": 0,
    "running": 0,
    "requested_mib": 512,
    "pressure": Pressure(memory_total_mib=16_384, memory_available_mib=8192),
    "disk_available_mib": 50_000,
    "start_ms_p50": 5.0,
}


def load(**changes: Any) -> Load:
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
        {"pressure": Pressure(memory_total_mib=16_384, memory_available_mib=100)},
        {"pressure": Pressure(memory_total_mib=16_384, memory_available_mib=8192, memory_stalled_full=0.5)},
        {"requested_mib": 16 * 16_384 + 1},
        {"disk_available_mib": 100},
    ],
    ids=["running", "running with those on their way", "memory", "waits for memory", "memory asked for", "disk"],
)
def test_a_full_node_refuses_with_a_retry_time(changes: dict[str, Any]) -> None:
    """Each bound refuses, and says when to ask again."""
    with pytest.raises(CapacityError) as caught:
        decide(LIMITS, load(**changes))
    assert int(caught.value.details["retry_after_ms"]) > 0


def test_what_sandboxes_may_take_may_be_more_than_there_is() -> None:
    """Up to the limit of the overcommit: most never use all of theirs."""
    assert decide(LIMITS, load(requested_mib=16 * 16_384)) == "start"


def test_a_host_short_of_memory_still_starts_while_tiers_help() -> None:
    """Moving waiting sandboxes down comes before refusing new ones."""
    assert decide(LIMITS, load(pressure=Pressure(memory_total_mib=16_384, memory_available_mib=1000))) == "start"


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


@pytest.mark.parametrize(
    ("used", "error", "bound"),
    [
        (LeaseUse(sandboxes=2, memory_mib=128), CapacityError, "sandboxes_max"),
        (LeaseUse(sandboxes=1, memory_mib=300), CapacityError, "memory_mib_max"),
        (LeaseUse(sandbox_s=60.0), QuotaExceeded, "sandbox_s_max"),
        (LeaseUse(sandboxes=2, memory_mib=300, sandbox_s=61.0), QuotaExceeded, "sandbox_s_max"),
    ],
    ids=["sandboxes", "memory", "seconds", "all of them"],
)
def test_a_budget_names_what_is_used_up(used: LeaseUse, error: type[Exception], bound: str) -> None:
    """What comes back says when to ask again; what never does is another error, and is said first."""
    budget = Budget(sandboxes_max=2, memory_mib_max=400, sandbox_s_max=60.0)
    with pytest.raises(error) as caught:
        check_budget(budget, used, 128)
    details = getattr(caught.value, "details", {})
    assert details["budget"] == bound
    assert ("retry_after_ms" in details) == (error is CapacityError)


def test_a_sandbox_larger_than_the_whole_budget_never_fits() -> None:
    """Told at once, not to be tried again."""
    with pytest.raises(QuotaExceeded, match="whole budget"):
        check_budget(Budget(memory_mib_max=400), LeaseUse(), 401)


@given(
    st.builds(
        Budget,
        sandboxes_max=st.none() | st.integers(1, 5),
        memory_mib_max=st.none() | st.integers(1, 500),
        sandbox_s_max=st.none() | st.floats(0.1, 100.0),
    ),
    st.builds(LeaseUse, sandboxes=st.integers(0, 6), memory_mib=st.integers(0, 600), sandbox_s=st.floats(0.0, 120.0)),
    st.integers(1, 600),
)
def test_a_budget_is_never_passed(budget: Budget, used: LeaseUse, memory_mib: int) -> None:
    """Whatever is used already, what is let in keeps every bound."""
    try:
        check_budget(budget, used, memory_mib)
    except (CapacityError, QuotaExceeded):
        return
    assert budget.sandboxes_max is None or used.sandboxes + 1 <= budget.sandboxes_max
    assert budget.memory_mib_max is None or used.memory_mib + memory_mib <= budget.memory_mib_max
    assert budget.sandbox_s_max is None or used.sandbox_s < budget.sandbox_s_max


@pytest.mark.parametrize(
    ("limit_s", "used_s", "running", "expected"),
    [(60.0, 20.0, 4, 10.0), (60.0, 70.0, 1, 0.0), (60.0, 20.0, 0, None), (None, 20.0, 4, None)],
)
def test_seconds_are_used_up_by_all_together(
    limit_s: float | None, used_s: float, running: int, expected: float | None
) -> None:
    """Four sandboxes use up what is left in a quarter of the time; nothing running uses nothing."""
    assert spent_in_s(Budget(sandbox_s_max=limit_s), LeaseUse(sandbox_s=used_s), running) == expected
