"""A run in numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.model.verdict import Verdict
from barchan.rollout.percentiles import percentiles
from barchan.rollout.record import Completion, RolloutRecord, Timings
from barchan.rollout.summary import GroupMix, Summary, Tally
from barchan.rollout.table import worst_first
from barchan.rollout.verdict import cancelled, scored, void

pytestmark = pytest.mark.timeout(30)


def record(
    verdict: Verdict, task_id: str = "a", ttfi_ms: float | None = 1.0, sample_index: int = 0, attempt: int = 0
) -> RolloutRecord:
    completion = Completion(model="m", text="t", finish_reason="stop", prompt_tokens=10, completion_tokens=5)
    return RolloutRecord(
        run_id="run",
        rollout_id=f"run-{task_id}-{sample_index}-{attempt}",
        task_id=task_id,
        sample_index=sample_index,
        attempt=attempt,
        policy="p",
        verdict=verdict,
        timings=Timings(create_ms=2.0, ttfi_ms=ttfi_ms, total_ms=9.0),
        started_unix_s=1.0,
        turns=2,
        tool_calls={"bash": 1, "submit": 1},
        malformed_calls=1,
        agent_s=0.5,
        prompt_tokens=10,
        completion_tokens=5,
        completions=(completion,),
    )


ONE, ZERO = scored(1.0, "completed", False, ()), scored(0.0, "exec_timeout", True, ())
VOID = void("platform", "boot_failure", ())


def summary_of(*records: RolloutRecord) -> Summary:
    tally = Tally()
    for item in records:
        tally.add(item)
    return tally.summary(run_id="run", task_set="s", policy="p", wanted=6, wall_s=2.0, out="o")


def test_void_rollouts_stay_out_of_the_mean() -> None:
    """The mean is over scored rollouts; two bounds tell what voiding can have moved; cancelled ones count nowhere."""
    summary = summary_of(record(ONE), record(ZERO), record(VOID), record(VOID), record(cancelled("exec")))
    assert (summary.rollouts, summary.scored, summary.void, summary.cancelled) == (5, 2, 2, 1)
    assert (summary.reward_mean, summary.reward_mean_low, summary.reward_mean_high) == (0.5, 0.25, 0.75)
    assert summary.void_by_cause == {"boot_failure": 2}
    assert summary.scored_by_cause == {"completed": 1, "exec_timeout": 1}
    assert (summary.truncated, summary.rollouts_per_s) == (1, 2.5)


def test_a_task_with_voids_weighs_as_much_as_another() -> None:
    """The mean by task is the mean of the tasks' means."""
    summary = summary_of(record(ONE, "a"), record(ONE, "a"), record(ONE, "a"), record(ZERO, "b"), record(VOID, "b"))
    assert (summary.reward_mean, summary.reward_mean_by_task) == (0.75, 0.5)


def test_what_was_lost_is_told_with_the_mean() -> None:
    """What other treatments would report, of each place's last attempt."""
    bias = summary_of(record(ONE, "a"), record(ZERO, "b"), record(VOID, "b", sample_index=1), record(VOID, "c")).bias
    assert (bias.rollouts, bias.void, bias.reward_mean, bias.reward_if_zero) == (4, 2, 0.5, 0.25)
    assert (bias.reward_if_dropped, bias.groups_dropped, bias.groups) == (1.0, 2, 3)


def test_groups_are_told_by_their_signal() -> None:
    """All one, mixed, all zero, or nothing scored."""
    summary = summary_of(
        record(ONE, "a"), record(ONE, "b"), record(ZERO, "b"), record(ZERO, "c"), record(VOID, "c"), record(VOID, "d")
    )
    assert summary.groups == GroupMix(all_one=1, mixed=1, all_zero=1, void=1)


def test_nothing_scored_has_no_mean() -> None:
    """No score: the mean is absent, not zero."""
    summary = summary_of(record(VOID, ttfi_ms=None))
    assert (summary.reward_mean, summary.reward_mean_by_task) == (None, None)
    assert (summary.reward_mean_low, summary.reward_mean_high) == (0.0, 1.0)
    assert summary.ttfi_ms.p50 is None
    assert summary_of().reward_mean_low is None


def test_tokens_and_stages_are_summed_up() -> None:
    """Tokens add up; stages that no rollout reached have no percentiles."""
    summary = summary_of(record(ONE), record(ONE))
    assert (summary.prompt_tokens, summary.completion_tokens) == (20, 10)
    assert (summary.turns, summary.tool_calls, summary.malformed_calls) == (4, {"bash": 2, "submit": 2}, 2)
    assert (summary.stage_ms["create"].p95, summary.stage_ms["exec"].p95) == (2.0, None)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_measured_values_in_order(values: list[float]) -> None:
    """Each percentile is one of the values, at least its share of them is not above it, and they ascend."""
    found = percentiles(values)
    assert found.p50 is not None and found.p95 is not None and found.p99 is not None
    assert found.p50 <= found.p95 <= found.p99
    for share, value in ((0.50, found.p50), (0.95, found.p95), (0.99, found.p99)):
        assert value in [round(item, 3) for item in values]
        assert sum(round(item, 3) <= value for item in values) >= share * len(values)


def test_what_was_tried_again_counts_by_its_last_try() -> None:
    """Earlier tries are told apart, and move neither the counts nor the bounds of the mean."""
    summary = summary_of(
        record(VOID, sample_index=0),
        record(ONE, sample_index=1),
        record(VOID, sample_index=0, attempt=1),
        record(ZERO, sample_index=0, attempt=2),
        record(VOID, sample_index=2, attempt=1),
    )
    assert (summary.rollouts, summary.scored, summary.void, summary.retried) == (3, 2, 1, 2)
    assert (summary.reward_mean, summary.reward_mean_high) == (0.5, 2 / 3)
    assert (summary.void_by_cause, summary.not_started) == ({"boot_failure": 1}, 3)


def test_surplus_is_told_from_what_a_person_cancelled() -> None:
    """Both are cancelled; a truncated rollout is told as a share of the scored ones."""
    summary = summary_of(record(ONE), record(ZERO), record(cancelled("exec", "surplus")), record(cancelled("exec")))
    assert (summary.cancelled, summary.surplus, summary.truncated_share) == (2, 1, 0.5)


def test_each_task_has_its_row() -> None:
    """Counts, mean, turns, tokens and the time of the agent's programs; the worst come first."""
    tally = Tally()
    for item in (
        record(ONE, "good"),
        record(ONE, "mixed"),
        record(ZERO, "mixed", sample_index=1),
        record(VOID, "mixed", sample_index=2),
        record(cancelled("exec"), "mixed", sample_index=3),
        record(VOID, "lost"),
        record(VOID, "lost", attempt=1),
    ):
        tally.add(item)
    lost, mixed, good = worst_first(tally.rows)
    assert [row.task_id for row in (lost, mixed, good)] == ["lost", "mixed", "good"]
    assert (mixed.n, mixed.scored, mixed.void, mixed.cancelled, mixed.reward_mean) == (4, 2, 1, 1, 0.5)
    assert (mixed.turns_mean, mixed.completion_tokens_mean, mixed.agent_s_p95, mixed.truncated) == (2.0, 5.0, 0.5, 1)
    assert (lost.n, lost.void, lost.reward_mean) == (1, 1, None)
    assert tally.summary(run_id="r", task_set="s", policy="p", wanted=6, wall_s=1.0, out="o").groups == GroupMix(
        all_one=1, mixed=1, void=1
    )
