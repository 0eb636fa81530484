"""The rules of verdicts hold for every combination of what can be found out."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.errors import Fault
from barchan.model.verdict import Cause, Verdict
from barchan.rollout.rules.causes import ENDINGS, RULES, TRUNCATING, fault_of
from barchan.rollout.rules.control import Control, agreed, control_of, decided, disagree, is_undecided
from barchan.rollout.rules.findings import FINDINGS, Finding, cause_of, verdict_of
from barchan.rollout.rules.page import put_into
from barchan.rollout.verdict import ended_as, scored, void
from tests.tidy.source import ROOT

pytestmark = pytest.mark.timeout(60)

NAMES = sorted(FINDINGS)
POLICYS = [name for name in NAMES if FINDINGS[name].is_policys]
OTHERS = [name for name in NAMES if not FINDINGS[name].is_policys]
ANY = st.sets(st.sampled_from(NAMES))
REWARDS = st.none() | st.floats()
FAULTS = st.none() | st.sampled_from(get_args(Fault))
NUMBERS = st.floats(0, 1, allow_nan=False)


@given(ANY, REWARDS, FAULTS)
def test_whatever_is_found_has_a_verdict(found: set[Finding], reward: float | None, fault: Fault | None) -> None:
    """It never raises; it is scored exactly when it has a reward, which is a finite number; all else is the table's."""
    verdict = verdict_of(found, reward=reward, fault=fault)
    rule = RULES[verdict.cause]
    assert (verdict.status == "scored") == (verdict.reward is not None)
    assert verdict.reward is None or math.isfinite(verdict.reward)
    assert (verdict.status, verdict.truncated) == (rule.status, rule.truncated)
    assert verdict.fault in (rule.fault, *rule.or_faults)


@given(REWARDS)
def test_what_nothing_explains_is_void(reward: float | None) -> None:
    """Nothing found: void and unknown, even if a grader gave a reward."""
    verdict = verdict_of((), reward=reward)
    assert (verdict.status, verdict.cause, verdict.reward) == ("void", "unknown", None)


@given(ANY, st.sets(st.sampled_from(OTHERS)), REWARDS)
def test_a_fault_of_others_makes_no_void_scored(found: set[Finding], more: set[Finding], reward: float | None) -> None:
    """What platform, model, task or driver failed to do, found in addition, gives no reward where there was none."""
    if verdict_of(found, reward=reward).status != "scored":
        assert verdict_of(found | more, reward=reward).status != "scored"


@given(st.sets(st.sampled_from(POLICYS), min_size=1), NUMBERS)
def test_a_policy_buys_no_void(found: set[Finding], reward: float) -> None:
    """What a policy can bring about is scored, or undecided; and undecided twice beside a good control is a zero."""
    verdict = verdict_of(found, reward=reward)
    if verdict.status == "scored":
        return
    assert is_undecided(verdict)
    good = control_of(scored(1.0, "completed", False, ()))
    assert decided(verdict, good, verdict).reward == 0.0


@given(st.sets(st.sampled_from(NAMES), min_size=1), st.sets(st.sampled_from(POLICYS)), NUMBERS)
def test_a_policys_doing_makes_no_scored_attempt_void(found: set[Finding], more: set[Finding], reward: float) -> None:
    """Nothing that a policy adds turns a reward into none, but for a grading that a control then decides; and where it
    turns a void into a reward, that is zero.
    """
    before, after = verdict_of(found, reward=reward), verdict_of(found | more, reward=reward)
    if before.status == "scored":
        assert after.status == "scored" or is_undecided(after)
    if before.status != "scored" and not is_undecided(before) and after.status == "scored":
        assert (after.reward, after.cause) == (0.0, "guest_wrecked")


@given(ANY)
def test_the_first_in_the_table_counts(found: set[Finding]) -> None:
    """The order of the table is the order of precedence, however the findings come."""
    cause = cause_of(found)
    assert cause_of(sorted(found)) == cause_of(sorted(found, reverse=True)) == cause
    first = [FINDINGS[name].cause for name in FINDINGS if name in found]
    assert cause == (first[0] if first else "unknown")


def test_every_cause_has_one_row_that_makes_sense() -> None:
    """All causes are there; voids have a fault that is nobody's but the policy's, and no reward; limits truncate."""
    assert set(RULES) == set(get_args(Cause))
    assert set(FINDINGS) == set(get_args(Finding))
    for cause, rule in RULES.items():
        assert (rule.reward == "none") == (rule.status != "scored"), cause
        assert ("policy" not in (rule.fault, *rule.or_faults)) or rule.status == "scored", cause
        assert (rule.fault == "none") == (cause == "completed" or rule.status == "cancelled"), cause
        assert rule.retry == "never" or rule.status == "void", cause
    assert {"agent_timeout", "turn_limit", "context_limit", "output_limit"} == TRUNCATING
    assert RULES["unknown"].status == "void"
    reached = {rule.cause for rule in FINDINGS.values()}
    assert reached == set(RULES)


@given(st.sampled_from(sorted(RULES)), FAULTS, NUMBERS)
def test_no_verdict_is_made_past_the_table(cause: Cause, fault: Fault | None, reward: float) -> None:
    """A cause that is scored can't be void, nor the reverse; a fault that the table does not know gives way."""
    if RULES[cause].status == "void":
        assert void(fault or "none", cause, ()).fault == fault_of(cause, fault)
        with pytest.raises(ValueError, match="gives no reward"):
            scored(reward, cause, False, ())
        return
    with pytest.raises(ValueError, match="not void"):
        void("platform", cause, ())
    if RULES[cause].reward == "graded":
        assert scored(reward, cause, False, ()).reward == reward


VERDICTS = st.builds(lambda reward: scored(reward, "completed", False, ()), NUMBERS) | st.sampled_from(
    [void("platform", cause, ()) for cause in ("grader_timeout", "grader_crash", "sandbox_lost")]
)
CONTROLS = st.lists(VERDICTS, max_size=3)


@given(st.lists(VERDICTS, min_size=1, max_size=4), CONTROLS)
def test_gradings_that_disagree_give_the_least_or_nothing(verdicts: list[Verdict], controls: list[Verdict]) -> None:
    """One without an answer stands; equal rewards stand; else a stable, good control gives the least, others none."""
    verdict = agreed(verdicts, controls)
    rewards = [one.reward for one in verdicts]
    if None in rewards:
        assert verdict in verdicts and verdict.reward is None
    elif not disagree(verdicts):
        assert verdict == verdicts[0]
    elif verdict.status == "scored":
        assert verdict.reward == min(reward for reward in rewards if reward is not None)
        assert len(controls) > 1 and all(control_of(one).outcome == "good" for one in controls)
    else:
        assert (verdict.cause, verdict.fault) == ("grader_nondeterministic", "task")


@given(st.sampled_from(["wrong", "undecided", "none"]), st.sampled_from(sorted(ENDINGS)))
def test_without_a_good_control_nothing_is_scored(outcome: str, ended: Cause) -> None:
    """Whatever the attempt's own part ended as."""
    first = void("platform", "grader_timeout", ())
    control = Control(outcome=outcome)  # type: ignore[arg-type]
    assert ended_as(decided(first, control), ended).status == "void"


def test_the_page_has_the_tables_as_they_are() -> None:
    """docs/verdicts.md is what `python -m barchan.rollout.rules.page docs/verdicts.md` would write."""
    page = (ROOT / "docs/verdicts.md").read_text()
    assert put_into(page) == page
