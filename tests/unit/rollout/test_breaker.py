"""When a run is stopped, and what it says then: never for one bad task, and never late for a bad node."""

import random
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from barchan.errors import RunStopped
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.breaker import Breaker, BreakerTerms, Factor, Outcome, Running, Trip
from barchan.rollout.rules.causes import RULES
from barchan.rollout.verdict import cancelled, scored, void

ONE = scored(1.0, "completed", False, ())
TERMS = BreakerTerms()


def lost(cause: Cause = "sandbox_lost") -> Verdict:
    return void(RULES[cause].fault, cause, (Evidence(source="exec: SandboxLost", fact="message", value="it is gone"),))


def ended(number: int, task: int, verdict: Verdict, took_s: float = 1.0, **factors: str) -> Outcome:
    found: Mapping[Factor, str] = {"image": "debian", "endpoint": "http://m", "node": "node_1", **factors}  # type: ignore[dict-item]
    return Outcome(f"r-{number}", f"t{task}", verdict, found, took_s)


def test_a_bad_node_stops_the_run() -> None:
    """As soon as there are enough of them, and it says where to look."""
    breaker = Breaker()
    trips = [breaker.add(ended(number, number % 4, lost())) for number in range(TERMS.voids_min)]
    assert trips[:-1] == [None] * (TERMS.voids_min - 1)
    trip = trips[-1]
    assert trip is not None
    assert (trip.task_id, trip.factor, trip.value, trip.voids, trip.of) == (None, "node", "node_1", 12, 12)
    assert trip.message == (
        "12 of the last 12 rollouts are void, with node node_1 in common, 12 of them by sandbox_lost: the run is "
        "stopped. One of them, r-11, says: exec: SandboxLost: it is gone (try: look at the node (barchan doctor; "
        "node.log in its state directory); then --resume goes on, in code attach=True; a breaker of 0 never stops)"
    )
    assert isinstance(trip.error, RunStopped)
    assert (trip.error.details["factor"], trip.error.details["voids"]) == ("node", 12)


def test_a_bad_endpoint_is_named() -> None:
    """By what its causes are about: all rollouts have the node in common, too."""
    breaker = Breaker()
    trips = [breaker.add(ended(number, number % 3, lost("model_timeout"))) for number in range(12)]
    assert trips[-1] is not None and (trips[-1].factor, trips[-1].value) == ("endpoint", "http://m")


def test_a_bad_image_is_named_among_good_ones() -> None:
    """Though fewer than half of all rollouts are void, and though each of its tasks has only a few."""
    breaker, trip = Breaker(), None
    for number in range(200):
        bad = number % 4 == 0
        image = "broken" if bad else "debian"
        outcome = ended(number, number % 40, lost("boot_failure") if bad else ONE, image=image)
        trip = breaker.add(outcome)
        if trip is not None and trip.task_id is None:
            break
    assert trip is not None
    assert (trip.factor, trip.value, trip.cause) == ("image", "broken", "boot_failure")


def test_one_bad_task_is_given_up_alone() -> None:
    """Early where others do well, later where nobody knows; the run goes on, also with what it has under way."""
    breaker = Breaker()
    for number in range(8):
        assert breaker.add(ended(number, 1, ONE)) is None
    trips = [breaker.add(ended(number, 0, lost())) for number in range(8, 40)]
    assert [trip.task_id for trip in trips if trip is not None] == ["t0"]
    assert trips[3] is not None and "of task t0" in trips[3].message and "no further one" in trips[3].message
    alone = Breaker()
    trips = [alone.add(ended(number, 0, lost())) for number in range(40)]
    assert [number for number, trip in enumerate(trips) if trip is not None] == [TERMS.voids_min - 1]


def test_what_fails_at_once_is_not_taken_for_all() -> None:
    """Of a hundred that go on, two per cent fail at their start: the others have outlived that."""
    going = [Running(f"t{number % 10}", {"node": "node_1"}, 60.0) for number in range(100)]
    breaker = Breaker()
    trips = [breaker.add(ended(number, number % 10, lost(), took_s=0.5), lambda: going) for number in range(30)]
    assert trips == [None] * 30
    young = [Running(f"t{number % 10}", {"node": "node_1"}, 0.1) for number in range(100)]
    breaker = Breaker()
    trips = [breaker.add(ended(number, number % 10, lost(), took_s=0.5), lambda: young) for number in range(12)]
    assert trips[-1] is not None


def test_what_stops_by_itself_stops_at_once() -> None:
    """A budget that is used up is the end of all others, too; what was cancelled, or given up, says nothing."""
    breaker = Breaker()
    for number in range(50):
        assert breaker.add(ended(number, number, cancelled("exec"))) is None
        assert breaker.add(ended(number, number, void("task", "task_quarantined", ()))) is None
    trip = breaker.add(ended(50, 1, void("caller", "budget_spent", ())))
    assert trip is not None and (trip.cause, trip.task_id) == ("budget_spent", None)
    assert trip.message.startswith("the run's budget was used up")


def test_it_can_be_switched_off() -> None:
    """With a share of 0 nothing ever stops."""
    breaker = Breaker(BreakerTerms(share=0.0))
    assert [breaker.add(ended(number, number, lost())) for number in range(100)] == [None] * 100
    assert breaker.add(ended(100, 1, void("caller", "budget_spent", ()))) is not None, "nothing else can come of it"


def played(seed: int, tasks: int, hazard: float, bad: int | None, rollouts: int = 300) -> list[Trip]:
    dice, breaker = random.Random(seed), Breaker()
    trips = []
    for number in range(rollouts):
        task = dice.randrange(tasks)
        is_void = task == bad or dice.random() < hazard
        trip = breaker.add(ended(number, task, lost() if is_void else ONE))
        if trip is not None:
            trips.append(trip)
            if trip.task_id is None:
                break
    return trips


@given(st.integers(0, 1 << 30), st.integers(3, 30))
def test_a_bad_task_never_stops_a_run(seed: int, tasks: int) -> None:
    """Whatever the order: only it is given up, once at most."""
    assert [trip.task_id for trip in played(seed, tasks, 0.0, 0)] in ([], ["t0"])


@given(st.integers(0, 1 << 30), st.integers(2, 30))
def test_a_total_outage_always_stops_a_run(seed: int, tasks: int) -> None:
    """Within as many rollouts as are looked at, though single tasks are given up before."""
    trips = played(seed, tasks, 1.0, None, rollouts=3 * TERMS.window)
    assert trips and (trips[-1].task_id is None or tasks <= 3)
    if trips[-1].task_id is None:
        assert trips[-1].factor == "node"


@given(st.lists(st.booleans(), max_size=300))
def test_below_the_share_nothing_stops(voids: list[bool]) -> None:
    """A void is followed by two scores at least: no window has a share of one half in more than two."""
    breaker, number = Breaker(), 0
    for is_void in voids:
        for verdict in (lost(), ONE, ONE) if is_void else (ONE,):
            trip = breaker.add(ended(number, number // 3 % 100, verdict))
            assert trip is None or trip.task_id is not None
            number += 1
