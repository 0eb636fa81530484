"""What was injected against what the verdicts say."""

from barchan.model.verdict import Cause, Verdict
from barchan.rollout.record import RolloutRecord, Timings
from barchan.rollout.rules.causes import RULES
from barchan.rollout.verdict import scored, void
from barchan.testing.faults.events import FaultEvent
from barchan.testing.faults.judge import FaultTable, judge
from barchan.testing.faults.policies import always_right, half_right, is_right, truth_of, unknown


def record(number: int, verdict: Verdict, began: float, took_s: float = 1.0) -> RolloutRecord:
    return RolloutRecord(
        run_id="run",
        rollout_id=f"run-{number}",
        task_id="t",
        sample_index=number,
        policy="oracle",
        verdict=verdict,
        timings=Timings(total_ms=took_s * 1e3),
        started_unix_s=began,
    )


def lost(cause: Cause = "sandbox_lost") -> Verdict:
    return void(RULES[cause].fault, cause, ())


def good(reward: float = 1.0) -> Verdict:
    return scored(reward, "completed", False, ())


def table(records: list[RolloutRecord], events: list[FaultEvent]) -> FaultTable:
    return judge(records, events, always_right, seed=1, resumed=0, wall_s=1.0)


def test_a_reward_that_is_not_the_true_one_is_false_valid() -> None:
    """Whether or not a fault hit it; then it is told by which."""
    event = FaultEvent(index=0, kind="node-kill", began_unix_s=10.5, ended_unix_s=11.0)
    found = table([record(0, good(), 10.0), record(1, good(0.0), 10.0), record(2, good(0.0), 50.0)], [event])
    assert not found.ok
    assert [(wrong.rollout_id, wrong.faults) for wrong in found.false_valid] == [
        ("run-1", ("node-kill",)),
        ("run-2", ()),
    ]
    assert [(row.kind, row.injected, row.hit, row.right, row.wrong) for row in found.rows] == [
        ("node-kill", 1, 2, 1, 1),
        ("none", 0, 1, 0, 1),
    ]


def test_a_void_that_nothing_hit_is_false_void() -> None:
    """A fault counts for those that went on beside it, or just after; one that names its rollouts for those alone."""
    events = [
        FaultEvent(index=0, kind="oom-host", began_unix_s=10.5, ended_unix_s=11.0),
        FaultEvent(index=1, kind="init-kill", began_unix_s=20.0, ended_unix_s=20.1, rollouts=("run-2",)),
    ]
    records = [
        record(0, lost("oom_host"), 10.0),
        record(1, lost(), 11.5),
        record(2, lost(), 19.5),
        record(3, lost(), 19.5),
    ]
    found = table(records, events)
    assert found.ok
    assert [wrong.rollout_id for wrong in found.false_void] == ["run-3"]
    assert [row.void for row in found.rows] == [
        {"sandbox_lost": 1},
        {"oom_host": 1, "sandbox_lost": 1},
        {"sandbox_lost": 1},
    ]


def test_without_a_truth_nothing_is_right_or_wrong() -> None:
    """What nobody knows is told as such."""
    found = judge([record(0, good(), 0.0)], [], unknown, seed=0, resumed=0, wall_s=1.0)
    assert (found.rows[-1].untold, found.right, found.false_valid) == (1, 0, ())


def test_half_of_the_attempts_are_right() -> None:
    """About half of each task's, and the true rewards say which."""
    for task_id in ("HumanEval/0", "HumanEval/1", "HumanEval/2"):
        assert 5 <= sum(is_right(task_id, sample_index) for sample_index in range(16)) <= 11
    assert {half_right("HumanEval/0", index) for index in range(16)} == {0.0, 1.0}
    assert truth_of("oracle") is always_right
    assert truth_of("barchan.testing.faults.policies:HalfRight") is half_right
    assert truth_of("chat") is unknown
