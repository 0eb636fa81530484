"""What voiding and cancelling did to a batch."""

import pytest

from barchan.cli.rollout_report import print_summary
from barchan.rollout.bias import BiasRow, bias_of, bias_of_records
from barchan.rollout.summary import Tally
from barchan.rollout.verdict import cancelled, scored, void
from tests.unit.rollout.test_summary import record

pytestmark = pytest.mark.timeout(30)

ONE, ZERO, VOID = (
    scored(1.0, "completed", False, ()),
    scored(0.0, "completed", False, ()),
    void("platform", "oom_host", ()),
)


def test_other_treatments_are_told() -> None:
    """Voids as zeros, groups with a void dropped, tasks with the same weight, beside the mean of what was scored."""
    found = bias_of_records(
        [
            record(ONE, "a", sample_index=0),
            record(ONE, "a", sample_index=1),
            record(ONE, "b", sample_index=0),
            record(ZERO, "b", sample_index=1),
            record(ZERO, "c", sample_index=0),
            record(VOID, "c", sample_index=1),
            record(cancelled("exec", "surplus"), "a", sample_index=2),
        ]
    )
    assert (found.rollouts, found.void, found.cancelled, found.surplus) == (6, 1, 0, 1)
    assert found.reward_mean == pytest.approx(3 / 5)
    assert found.reward_if_zero == pytest.approx(3 / 6)
    assert (found.reward_if_dropped, found.groups, found.groups_dropped) == (pytest.approx(3 / 4), 3, 1)
    assert found.reward_by_task == pytest.approx((1 + 0.5 + 0) / 3)
    assert {share.name: (share.rollouts, share.void_rate) for share in found.by_difficulty} == {
        "hard": (2, 0.5),
        "middle": (2, 0.0),
        "easy": (2, 0.0),
    }


def test_long_ones_are_lost_more_often() -> None:
    """Lengths are cut in thirds, each with its rates; equal lengths stay together."""
    rows = [
        BiasRow("g", "t", float(length), "void" if length > 6 else "scored", None if length > 6 else 1.0)
        for length in range(1, 10)
    ]
    found = bias_of(rows)
    assert [(share.name, share.rollouts, share.void_rate) for share in found.by_length] == [
        ("up to 3", 3, 0.0),
        ("up to 6", 3, 0.0),
        ("up to 9", 3, 1.0),
    ]
    (only,) = bias_of([BiasRow("g", "t", 1.0, "cancelled", None)] * 4).by_length
    assert (only.rollouts, only.cancelled_rate) == (4, 1.0)


def test_the_last_attempt_counts() -> None:
    """A place that was tried again is told once; nothing at all has no means."""
    found = bias_of_records([record(VOID, attempt=0), record(ONE, attempt=1)])
    assert (found.rollouts, found.void, found.reward_mean) == (1, 0, 1.0)
    empty = bias_of([])
    assert (empty.rollouts, empty.reward_mean, empty.by_length, empty.by_difficulty) == (0, None, (), ())


def test_a_person_sees_what_was_lost(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The report names the other treatments and whom the loss hit; a run that lost nothing has no such lines."""
    monkeypatch.setenv("COLUMNS", "200")
    told = {}
    for name, lost in (("lost", VOID), ("whole", ZERO)):
        tally = Tally()
        for item in (record(ONE, "a"), record(ZERO, "b"), record(lost, "b", sample_index=1)):
            tally.add(item)
        print_summary(tally.summary(run_id="r", task_set="s", policy="p", wanted=3, wall_s=1.0, out="o"), [])
        told[name] = " ".join(capsys.readouterr().out.split())
    assert "0.3333 with voids as 0" in told["lost"]
    assert "1 of 2 groups" in told["lost"]
    assert "hard 50.0% void, easy 0.0% void" in told["lost"]
    assert "voids as 0" not in told["whole"]
