"""Treatments of void rollouts, where the truth is known: the effects that a run's report has to show."""

import pytest

from bench.bias import Treatment, bias_report, groups_of, lengths_of, treatments

pytestmark = pytest.mark.timeout(60)

GROUPS = 12_000
# treatment -> reported pass rate, successes pushed down, mean advantage of what is trained on, rows with a signal,
# their tasks' true pass rate; with failures from 2 to 27 %, more where a task is harder.
RISING = {
    "truth": (0.400, 0.0, 0.0, 0.82, 0.400),
    "score as 0": (0.346, 0.117, 0.0, 0.80, 0.400),
    "mask the loss only": (0.346, 0.0, 0.104, 0.68, 0.419),
    "exclude": (0.419, 0.0, 0.0, 0.66, 0.419),
    "drop the group": (0.545, 0.0, 0.0, 0.22, 0.545),
}


def by_name(rows: list[Treatment]) -> dict[str, Treatment]:
    return {row.name: row for row in rows}


def test_each_treatment_has_its_bias() -> None:
    """Zeros lower the mean and punish successes, masking alone pushes all up, dropping groups keeps easy ones."""
    found = by_name(treatments(groups_of(GROUPS, seed=7)))
    assert set(found) == set(RISING)
    for name, (reported, pushed_down, advantage, informative, true_p) in RISING.items():
        row = found[name]
        assert row.reported == pytest.approx(reported, abs=0.012), name
        assert row.pushed_down == pytest.approx(pushed_down, abs=0.008), name
        assert row.advantage == pytest.approx(advantage, abs=0.008), name
        assert row.informative == pytest.approx(informative, abs=0.015), name
        assert row.true_p == pytest.approx(true_p, abs=0.012), name


def test_failures_that_hit_all_alike_cost_signal_only() -> None:
    """With 5 % everywhere excluding is unbiased; zeros still lower the mean; dropping groups loses a third of it."""
    found = by_name(treatments(groups_of(GROUPS, seed=7, flat=0.05)))
    truth = found["truth"].reported
    assert found["exclude"].reported == pytest.approx(truth, abs=0.004)
    assert found["score as 0"].reported == pytest.approx(truth * 0.95, abs=0.004)
    assert found["score as 0"].pushed_down == pytest.approx(0.048, abs=0.006)
    assert found["drop the group"].informative == pytest.approx(0.55, abs=0.015)
    assert found["exclude"].informative == pytest.approx(0.77, abs=0.015)


def test_the_report_of_a_run_shows_it() -> None:
    """It has the same figures; the mean by task is the truth again; harder tasks lose more."""
    made = groups_of(GROUPS, seed=7)
    found, report = by_name(treatments(made)), bias_report(made)
    assert report.reward_mean == pytest.approx(found["exclude"].reported)
    assert report.reward_if_zero == pytest.approx(found["score as 0"].reported)
    assert report.reward_if_dropped == pytest.approx(found["drop the group"].reported)
    assert report.reward_by_task == pytest.approx(found["truth"].reported, abs=0.006)
    rates = {share.name: share.void_rate for share in report.by_difficulty}
    assert rates["hard"] > rates["middle"] > rates["easy"]


def test_only_resuming_keeps_the_lengths() -> None:
    """What interruptions cut off is long: dropping and trying again leave shorter, and less successful, rollouts."""
    found = {row.name: row for row in lengths_of(40_000, seed=7)}
    assert found["resume"].reported == found["truth"].reported == pytest.approx(0.401, abs=0.008)
    for name in ("drop", "from scratch"):
        assert found[name].reported == pytest.approx(0.378, abs=0.008)
        assert found[name].length == pytest.approx(25.8, abs=0.5)
    assert found["truth"].length == pytest.approx(29.7, abs=0.5)
