"""Advantages are relative to the group's scored members, and to nothing else."""

import itertools
import math
import statistics
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.errors import InvalidSpec
from barchan.model.verdict import Verdict
from barchan.rollout.advantages import advantages
from barchan.rollout.record import RolloutRecord, Timings
from barchan.rollout.verdict import scored, void

pytestmark = pytest.mark.timeout(60)

Normalize = Literal["std", "none"]
SURPLUS = Verdict(status="cancelled", reward=None, fault="none", cause="cancelled_surplus")
STALE = Verdict(status="cancelled", reward=None, fault="none", cause="cancelled_stale")
LOST = void("platform", "sandbox_lost", ())


def record(sample_index: int, outcome: float | Verdict, *, group_index: int = 0, attempt: int = 0) -> RolloutRecord:
    return RolloutRecord(
        run_id="run",
        rollout_id=f"run-{group_index}-{sample_index}-{attempt}",
        task_id=f"task{group_index}",
        group_index=group_index,
        sample_index=sample_index,
        attempt=attempt,
        policy="p",
        verdict=outcome if isinstance(outcome, Verdict) else scored(outcome, "completed", False, ()),
        timings=Timings(),
        started_unix_s=0.0,
    )


def group(*outcomes: float | Verdict, group_index: int = 0) -> list[RolloutRecord]:
    return [record(place, outcome, group_index=group_index) for place, outcome in enumerate(outcomes)]


def test_a_masked_member_has_no_vote_in_the_baseline() -> None:
    """Of the rewards 1, 1, 0, 0 with the second void, the baseline is 1/3: the void one neither counts nor pulls."""
    found = advantages(group(1.0, LOST, 0.0, 0.0), normalize="none")
    assert found.advantages == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3])
    assert found.mask == [True, False, True, True]
    assert math.isnan(found.rewards[1]) and found.rewards[0] == 1.0
    assert found.rollout_ids == ["run-0-0-0", "run-0-1-0", "run-0-2-0", "run-0-3-0"]


def test_each_group_stands_alone() -> None:
    """Records in any order; a group's own mean is what its members are measured by."""
    one, other = group(1.0, 0.0), group(10.0, 20.0, group_index=1)
    found = advantages([one[0], other[0], one[1], other[1]], normalize="none")
    assert found.advantages == [0.5, -5.0, -0.5, 5.0]
    assert found.groups[0] == found.groups[2] != found.groups[1] == found.groups[3]


def test_divided_by_the_samples_deviation() -> None:
    """As the usual trainers do: n - 1 under the root."""
    rewards = [0.0, 0.5, 1.0, 1.0]
    found = advantages(group(*rewards))
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    assert found.advantages == pytest.approx([(reward - mean) / deviation for reward in rewards])


def test_leaving_one_out_measures_by_the_others() -> None:
    """The baseline of each is the mean of the others."""
    found = advantages(group(1.0, 0.0, 0.0, 0.5), normalize="none", leave_one_out=True)
    assert found.advantages == pytest.approx([1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3])


def test_equal_rewards_tell_nothing() -> None:
    """All advantages are 0, the members stay unmasked, and it is said; so it is where only the arithmetic differs."""
    for rewards in ((1.0, 1.0, 1.0), (0.0, 0.0), (0.1 + 0.2, 0.3), (-1.0, -1.0)):
        found = advantages(group(*rewards))
        assert (set(found.advantages), set(found.mask), set(found.informative)) == ({0.0}, {True}, {False})


def test_a_group_with_too_few_scores_is_masked_whole() -> None:
    """Half of its members, at least two, or as asked; surplus members and earlier tries are no members."""
    few = group(1.0, LOST, LOST, STALE, 0.0)
    assert set(advantages(few).mask) == {False}
    assert set(advantages(few).advantages) == {0.0}
    assert advantages(few, min_valid=2).mask == [True, False, False, False, True]
    assert advantages(group(1.0, SURPLUS, SURPLUS, SURPLUS, 0.0)).mask == [True, False, False, False, True]
    again = [record(0, LOST), record(0, LOST, attempt=1), record(0, 1.0, attempt=2), record(1, 0.0)]
    assert advantages(again).mask == [False, False, True, True]
    assert advantages(group(1.0)).mask == [False]


def test_a_bound_that_makes_no_sense_is_refused() -> None:
    """One alone has no baseline but its own; none at all has none."""
    for least, alone in ((0, False), (1, True)):
        with pytest.raises(InvalidSpec, match="min_valid"):
            advantages([], min_valid=least, leave_one_out=alone)


outcomes = st.one_of(st.floats(-100, 100), st.sampled_from([LOST, STALE, SURPLUS]))


@given(st.lists(outcomes, max_size=12), st.sampled_from(["std", "none"]), st.booleans())
def test_what_is_not_scored_changes_nothing(
    members: list[float | Verdict], normalize: Normalize, leave_one_out: bool
) -> None:
    """The scored ones have the advantages they would have without the others; those have none."""
    alone = advantages(
        group(*(item for item in members if isinstance(item, float))),
        normalize=normalize,
        leave_one_out=leave_one_out,
        min_valid=2,
    )
    found = advantages(group(*members), normalize=normalize, leave_one_out=leave_one_out, min_valid=2)
    kept = [value for value, item in zip(found.advantages, members, strict=True) if isinstance(item, float)]
    assert kept == alone.advantages
    for value, valid, item in zip(found.advantages, found.mask, members, strict=True):
        assert isinstance(item, float) or (value == 0.0 and not valid)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.sampled_from(["std", "none"]), st.booleans())
def test_advantages_sum_to_nothing_and_keep_the_order(
    rewards: list[float], normalize: Normalize, leave_one_out: bool
) -> None:
    """Each group's sum is 0, and better rewards have no lower advantages."""
    found = advantages(group(*rewards), normalize=normalize, leave_one_out=leave_one_out)
    assert sum(found.advantages) == pytest.approx(0.0, abs=1e-6)
    pairs = sorted(zip(rewards, found.advantages, strict=True))
    assert all(low[1] <= high[1] for low, high in itertools.pairwise(pairs))


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=12), st.integers(1, 8), st.integers(-8, 8))
def test_normalized_advantages_know_no_scale(rewards: list[int], factor: int, shift: int) -> None:
    """Rewards in other units give the same advantages."""
    found = advantages(group(*map(float, rewards)))
    other = advantages(group(*(float(factor * reward + shift) for reward in rewards)))
    assert other.advantages == pytest.approx(found.advantages)
    assert other.informative == found.informative
