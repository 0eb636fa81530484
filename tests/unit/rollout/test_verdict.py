"""Facts in, verdict out: what is scored, what is void, and that nothing else can happen."""

import asyncio
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from barchan import errors
from barchan.errors import BY_CODE, BarchanError, GuestError, ModelError
from barchan.model.sandbox import ExecResult, Usage
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.verdict import (
    TRUNCATING,
    UNDECIDED,
    Checked,
    CheckReport,
    Control,
    Outcome,
    cancelled,
    control_of,
    decided,
    ended_as,
    is_undecided,
    judge,
    scored,
    verdict_of_error,
    void,
)
from tests.unit.rollout.fakes import result

pytestmark = pytest.mark.timeout(60)

EXITED = result()
KILLED = result(137, signal=9)
OUT_OF_MEMORY = result(137, signal=9, oom_killed=True)
OUT_OF_CPU = result(152, signal=24, cpu_s=5.0)
OUT_OF_CPU_HARD = result(137, signal=9, cpu_s=6.0)
TIMED_OUT = result(137, signal=9, timed_out=True)


def grading(
    outcome: Outcome | None,
    candidate: ExecResult | None = EXITED,
    *,
    passed: int = 0,
    calls: int = 1,
    checker: ExecResult = EXITED,
    malformed: bool = False,
) -> Checked:
    return Checked(
        report=None if outcome is None else CheckReport(outcome, passed, calls, ""),
        report_malformed=malformed,
        checker=checker,
        candidate=candidate,
        checks_total=3,
        cpu_s_max=5,
    )


@pytest.mark.parametrize(
    ("facts", "reward", "fault", "cause"),
    [
        (grading("passed", passed=3), 1.0, "none", "completed"),
        (grading("failed", passed=2), 0.0, "none", "completed"),
        (grading("raised"), 0.0, "none", "completed"),
        (grading("garbled"), 0.0, "none", "completed"),
        (grading("gone"), 0.0, "policy", "guest_wrecked"),
        (grading("gone", OUT_OF_MEMORY), 0.0, "policy", "oom_within_limit"),
        (grading("gone", OUT_OF_CPU), 0.0, "policy", "exec_timeout"),
        (grading("gone", OUT_OF_CPU_HARD), 0.0, "policy", "exec_timeout"),
        (grading("gone", KILLED), None, "platform", "sandbox_lost"),  # it is restrained, so it can't have been itself
        (grading("gone", TIMED_OUT), None, "platform", "grader_crash"),
        (grading("gone", None), None, "platform", "grader_crash"),
        (grading("slow", None), None, "platform", "grader_timeout"),
        (grading("absent"), None, "platform", "grader_start"),
        (grading(None), None, "platform", "reward_missing"),
        (grading(None, checker=OUT_OF_MEMORY), None, "platform", "reward_missing"),
        (grading(None, checker=TIMED_OUT), None, "platform", "grader_timeout"),
        (grading(None, malformed=True), None, "platform", "reward_malformed"),
        (grading("passed", passed=2), None, "task", "task_invalid"),
        (grading("passed", passed=3, calls=0), None, "task", "task_invalid"),
    ],
)
def test_each_grading_has_its_verdict(facts: Checked, reward: float | None, fault: str, cause: str) -> None:
    """The table of gradings: reward, whose doing, and why."""
    verdict = judge(facts)
    assert (verdict.reward, verdict.fault, verdict.cause) == (reward, fault, cause)
    assert verdict.status == ("void" if reward is None else "scored")


FIRST = void("platform", "grader_timeout", (Evidence(source="first", fact="x"),))
CRASHED = void("task", "grader_crash", ())
NO_MEMORY = void("task", "reward_missing", (Evidence(source="kernel", fact="oom_killed", value=True),))
GOOD = control_of(scored(1.0, "completed", False, ()))


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [
        (scored(1.0, "completed", False, ()), "good"),
        (scored(100.0, "completed", False, ()), "good"),
        (scored(0.99, "completed", False, ()), "wrong"),
        (scored(0.0, "guest_wrecked", False, ()), "wrong"),
        (FIRST, "undecided"),
        (void("platform", "grader_start", ()), "undecided"),
    ],
)
def test_what_a_known_good_artifact_shows(verdict: Verdict, outcome: str) -> None:
    """It is good with a reward of 1 or more, wrong with less, and shows nothing without one."""
    assert control_of(verdict).outcome == outcome


@pytest.mark.parametrize(
    ("first", "control", "second", "reward", "fault", "cause"),
    [
        (FIRST, GOOD, FIRST, 0.0, "policy", "exec_timeout"),
        (FIRST, GOOD, CRASHED, 0.0, "policy", "guest_wrecked"),
        (FIRST, GOOD, NO_MEMORY, 0.0, "policy", "oom_within_limit"),
        (NO_MEMORY, GOOD, FIRST, 0.0, "policy", "oom_within_limit"),
        (FIRST, GOOD, scored(1.0, "completed", False, ()), 1.0, "none", "completed"),
        (FIRST, GOOD, scored(0.0, "completed", False, ()), 0.0, "none", "completed"),
        (FIRST, GOOD, void("platform", "grader_start", ()), None, "platform", "grader_start"),
        (FIRST, control_of(scored(0.0, "completed", False, ())), None, None, "task", "grader_timeout"),
        (CRASHED, control_of(FIRST), None, None, "platform", "grader_crash"),
        (CRASHED, Control(outcome="none"), None, None, "task", "grader_crash"),
        (CRASHED, control_of(CRASHED), None, None, "task", "grader_crash"),
    ],
)
def test_a_control_decides(
    first: Verdict, control: Control, second: Verdict | None, reward: float | None, fault: str, cause: str
) -> None:
    """After a good one the second look counts, and no answer again is zero; after any other nobody knows."""
    verdict = decided(first, control, second)
    assert (verdict.reward, verdict.fault, verdict.cause) == (reward, fault, cause)
    assert (control.outcome in [item.value for item in verdict.evidence if item.source == "control"]) is True


def test_an_exposed_grading_stays_exposed_when_it_is_decided() -> None:
    """Whether the agent's files could reach the grader does not depend on how it ended."""
    exposed = replace(FIRST, exposed=True)
    assert decided(exposed, GOOD, exposed).exposed is True
    assert decided(exposed, Control(outcome="none")).exposed is True


def test_how_the_policy_ended_is_kept() -> None:
    """An answer cut off by its token limit is graded, and marked as truncated; a passing one as well."""
    verdict = ended_as(judge(grading("failed")), "output_limit")
    assert (verdict.reward, verdict.cause, verdict.fault, verdict.truncated) == (0.0, "output_limit", "policy", True)
    verdict = ended_as(judge(grading("passed", passed=3)), "turn_limit")
    assert (verdict.reward, verdict.cause, verdict.truncated) == (1.0, "turn_limit", True)
    verdict = ended_as(judge(grading("gone", OUT_OF_CPU)), "refusal")
    assert (verdict.cause, verdict.truncated) == ("exec_timeout", False)
    assert ended_as(FIRST, "turn_limit") == FIRST


def test_evidence_names_its_source() -> None:
    """A zero for memory rests on the kernel's counter, and says so."""
    facts = {(item.source, item.fact): item.value for item in judge(grading("gone", OUT_OF_MEMORY)).evidence}
    assert facts["candidate process, kernel's memory counter", "oom_killed"] is True
    assert facts["checker", "outcome"] == "gone"


ENDS = st.builds(
    ExecResult,
    process_id=st.just("p"),
    exit_code=st.integers(0, 255),
    signal=st.none() | st.sampled_from([6, 9, 11, 24]),
    timed_out=st.booleans(),
    oom_killed=st.booleans(),
    usage=st.builds(Usage, user_s=st.floats(0, 10), system_s=st.floats(0, 10)),
)
GRADINGS = st.builds(
    Checked,
    report=st.none()
    | st.builds(
        CheckReport,
        outcome=st.sampled_from(get_args(Outcome)),
        passed=st.integers(0, 5),
        calls=st.integers(0, 5),
        detail=st.text(max_size=5),
    ),
    report_malformed=st.booleans(),
    checker=ENDS,
    candidate=st.none() | ENDS,
    checks_total=st.integers(1, 5),
    cpu_s_max=st.integers(1, 6),
)


@given(GRADINGS)
def test_a_reward_needs_a_checker_that_saw_every_check_hold(facts: Checked) -> None:
    """A one comes only from a report of all checks passed; a zero never without a report."""
    verdict = judge(facts)
    assert (verdict.reward is None) == (verdict.status == "void")
    if verdict.reward == 1.0:
        assert facts.report is not None
        assert (facts.report.outcome, facts.report.passed) == ("passed", facts.checks_total)
    if verdict.reward == 0.0:
        assert facts.report is not None


VERDICTS = st.builds(scored, st.sampled_from([0.0, 1.0]), st.just("completed"), st.booleans(), st.just(())) | st.builds(
    void, st.sampled_from(["task", "platform"]), st.sampled_from([*sorted(UNDECIDED), "grader_start"]), st.just(())
)
ENDINGS = st.sampled_from(["completed", "refusal", *sorted(TRUNCATING)])


@given(VERDICTS, st.builds(Control, outcome=st.sampled_from(["good", "wrong", "undecided", "none"])), VERDICTS, ENDINGS)
def test_no_answer_is_worth_more_than_an_answer(
    first: Verdict, control: Control, second: Verdict, ended: Cause
) -> None:
    """A submission that twice gives no answer, where a good one gives one, is zero."""
    if not is_undecided(first):
        return
    verdict = ended_as(decided(first, control, second if control.outcome == "good" else None), ended)
    if control.outcome == "good":
        assert verdict.reward == (0.0 if is_undecided(second) else second.reward)
    else:
        assert (verdict.status, verdict.cause) == ("void", first.cause)


BARCHAN_ERRORS = st.builds(lambda cls, text: cls(text), st.sampled_from(sorted(BY_CODE.values(), key=str)), st.text())
STAGES = st.sampled_from(["setup", "create", "policy", "exec", "grade"])


@given(BARCHAN_ERRORS, STAGES)
def test_only_a_guests_own_doing_scores_as_an_error(error: BarchanError, stage: str) -> None:
    """No error of platform, model, task or caller ever becomes a reward; a guest's is a zero, never more."""
    verdict = verdict_of_error(error, stage)
    if isinstance(error, GuestError) and stage == "exec":
        assert (verdict.status, verdict.reward) == ("scored", 0.0)
        return
    assert (verdict.status, verdict.reward) == ("void", None)
    if isinstance(error, ModelError | errors.TaskError):
        assert verdict.fault == error.fault
    elif stage == "policy":
        assert verdict.fault == "caller"
    elif isinstance(error, GuestError):
        assert verdict.fault == "task"
    elif isinstance(error, errors.SandboxExpired):
        assert verdict.fault == "platform"
    else:
        assert verdict.fault == error.fault
        assert verdict.fault in ("platform", "model", "task", "caller")


@pytest.mark.parametrize(
    ("error", "stage", "fault", "cause"),
    [
        (errors.CapacityError("full", retry_after_ms=5), "create", "platform", "capacity"),
        (errors.BootFailed("x"), "create", "platform", "boot_failure"),
        (errors.NodeLost("x"), "exec", "platform", "sandbox_lost"),
        (errors.SandboxExpired("x"), "grade", "platform", "sandbox_expired"),
        (errors.NotFound("x", sandbox_id="sb_1"), "exec", "platform", "sandbox_lost"),
        (errors.BlobCorrupt("x"), "create", "platform", "image"),
        (errors.BlobUnavailable("x"), "create", "platform", "image_unavailable"),
        (errors.BlobUnavailable("x"), "exec", "platform", "image_unavailable"),
        (errors.NotFound("no such template"), "create", "caller", "image"),
        (errors.NotFound("no such file"), "exec", "caller", "unknown"),
        (errors.ReadTimeout("x"), "grade", "platform", "transport"),
        (errors.RemoteProtocolError("x"), "exec", "platform", "platform_bug"),
        (errors.TaskError("x"), "policy", "task", "task_invalid"),
        (ModelError("down", cause="model_unreachable"), "policy", "model", "model_unreachable"),
        (ModelError("odd", cause="anything"), "policy", "model", "model_garbage"),
        (KeyError("surprise"), "exec", "platform", "unknown"),
        (errors.TaskError("x", cause="service_not_ready"), "setup", "task", "service_not_ready"),
        (errors.ExecFailed("a step of the recipe"), "setup", "task", "task_invalid"),
        (errors.GuestWrecked("x"), "grade", "task", "grader_crash"),
        (KeyError("surprise"), "policy", "caller", "policy_error"),
        (errors.ConnectionLost("its own"), "policy", "caller", "policy_error"),
        (errors.ExecTimeout("its own"), "policy", "caller", "policy_error"),
        (errors.ExecTimeout("x"), "exec", "policy", "exec_timeout"),
        (errors.GuestOutOfMemory("x"), "exec", "policy", "oom_within_limit"),
        (errors.ExecFailed("x"), "exec", "none", "completed"),
    ],
)
def test_each_error_has_its_cause(error: Exception, stage: str, fault: str, cause: str) -> None:
    """The table of errors; what nobody foresaw is void and `unknown`, with the message as evidence."""
    verdict = verdict_of_error(error, stage)
    assert (verdict.fault, verdict.cause) == (fault, cause)
    assert type(error).__name__ in verdict.evidence[0].source


def test_cancelling_is_nobodys_fault() -> None:
    """A rollout given up by its runner is neither scored nor void."""
    assert cancelled("exec", "stale").cause == "cancelled_stale"
    assert cancelled("exec", "surplus").cause == "cancelled_surplus"
    verdict = cancelled("exec")
    assert (verdict.status, verdict.reward, verdict.fault, verdict.cause) == (
        "cancelled",
        None,
        "none",
        "cancelled_user",
    )
    assert verdict_of_error(asyncio.CancelledError(), "exec").status == "void"
