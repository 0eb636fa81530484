"""Facts in, verdict out: what is scored, what is void, and that nothing else can happen."""

import asyncio
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan import errors
from barchan.errors import BY_CODE, BarchanError, GuestError, ModelError
from barchan.model.sandbox import ExecResult, Usage
from barchan.rollout.verdict import (
    CheckReport,
    Control,
    Grading,
    Outcome,
    cancelled,
    judge,
    needs_control,
    verdict_of_error,
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
    control: Control = "not_run",
) -> Grading:
    return Grading(
        report=None if outcome is None else CheckReport(outcome, passed, calls, ""),
        report_malformed=malformed,
        checker=checker,
        candidate=candidate,
        checks_total=3,
        cpu_s_max=5,
        control=control,
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
        (grading("gone", KILLED, control="passed"), 0.0, "policy", "guest_wrecked"),
        (grading("gone", KILLED, control="failed"), None, "platform", "grader_crash"),
        (grading("gone", None, control="passed"), 0.0, "policy", "guest_wrecked"),
        (grading("slow", None, control="passed"), 0.0, "policy", "exec_timeout"),
        (grading("slow", None, control="failed"), None, "platform", "grader_timeout"),
        (grading("slow", None), None, "platform", "grader_timeout"),
        (grading("absent"), None, "platform", "grader_start"),
        (grading(None), None, "platform", "reward_missing"),
        (grading(None, control="failed"), None, "platform", "grader_crash"),
        (grading(None, control="passed"), 0.0, "policy", "guest_wrecked"),
        (grading(None, checker=OUT_OF_MEMORY, control="passed"), 0.0, "policy", "oom_within_limit"),
        (grading(None, checker=TIMED_OUT, control="passed"), 0.0, "policy", "exec_timeout"),
        (grading(None, checker=TIMED_OUT, control="failed"), None, "platform", "grader_timeout"),
        (grading(None, malformed=True), None, "platform", "reward_malformed"),
        (grading(None, malformed=True, control="passed"), None, "platform", "reward_malformed"),
        (grading("passed", passed=2), None, "task", "task_invalid"),
        (grading("passed", passed=3, calls=0), None, "task", "task_invalid"),
    ],
)
def test_each_grading_has_its_verdict(facts: Grading, reward: float | None, fault: str, cause: str) -> None:
    """The table of gradings: reward, whose doing, and why."""
    verdict = judge(facts)
    assert (verdict.reward, verdict.fault, verdict.cause) == (reward, fault, cause)
    assert verdict.status == ("void" if reward is None else "scored")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (grading("slow", None), True),
        (grading("gone", KILLED), True),
        (grading("gone", None), True),
        (grading(None), True),
        (grading(None, malformed=True), False),
        (grading("gone", OUT_OF_CPU), False),
        (grading("gone", OUT_OF_MEMORY), False),
        (grading("failed"), False),
        (grading("passed", passed=3), False),
        (grading("absent"), False),
    ],
)
def test_a_control_is_asked_for_only_where_it_decides(facts: Grading, expected: bool) -> None:
    """Known answers and kernel evidence need no control; silence, stalls and unexplained kills do."""
    assert needs_control(facts) is expected


def test_how_the_policy_ended_is_kept() -> None:
    """An answer cut off by its token limit is graded, and marked as truncated; a passing one as well."""
    verdict = judge(grading("failed"), cause="output_limit", truncated=True)
    assert (verdict.reward, verdict.cause, verdict.fault, verdict.truncated) == (0.0, "output_limit", "policy", True)
    verdict = judge(grading("passed", passed=3), cause="output_limit", truncated=True)
    assert (verdict.reward, verdict.cause, verdict.truncated) == (1.0, "output_limit", True)


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
    Grading,
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
    control=st.sampled_from(get_args(Control)),
)


@given(GRADINGS)
def test_a_reward_needs_a_checker_that_saw_every_check_hold(facts: Grading) -> None:
    """A one comes only from a report of all checks passed; a zero never without a report or a passed control."""
    verdict = judge(facts)
    assert (verdict.reward is None) == (verdict.status == "void")
    if verdict.reward == 1.0:
        assert facts.report is not None
        assert (facts.report.outcome, facts.report.passed) == ("passed", facts.checks_total)
    if verdict.reward == 0.0:
        assert facts.report is not None or facts.control == "passed"
    if needs_control(facts) and facts.control != "passed":
        assert verdict.reward is None


BARCHAN_ERRORS = st.builds(lambda cls, text: cls(text), st.sampled_from(sorted(BY_CODE.values(), key=str)), st.text())
STAGES = st.sampled_from(["create", "policy", "exec", "grade"])


@given(BARCHAN_ERRORS, STAGES)
def test_only_a_guests_own_doing_scores_as_an_error(error: BarchanError, stage: str) -> None:
    """No error of platform, model, task or caller ever becomes a reward; a guest's is a zero, never more."""
    verdict = verdict_of_error(error, stage)
    if isinstance(error, GuestError) and stage != "policy":
        assert (verdict.status, verdict.reward) == ("scored", 0.0)
        return
    assert (verdict.status, verdict.reward) == ("void", None)
    if isinstance(error, ModelError | errors.TaskError):
        assert verdict.fault == error.fault
    elif stage == "policy":
        assert verdict.fault == "caller"
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
        (errors.NotFound("no such template"), "create", "caller", "image"),
        (errors.NotFound("no such file"), "exec", "caller", "unknown"),
        (errors.ReadTimeout("x"), "grade", "platform", "transport"),
        (errors.RemoteProtocolError("x"), "exec", "platform", "platform_bug"),
        (errors.TaskError("x"), "policy", "task", "task_invalid"),
        (ModelError("down", cause="model_unreachable"), "policy", "model", "model_unreachable"),
        (ModelError("odd", cause="anything"), "policy", "model", "model_garbage"),
        (KeyError("surprise"), "exec", "platform", "unknown"),
        (KeyError("surprise"), "policy", "caller", "unknown"),
        (errors.ConnectionLost("its own"), "policy", "caller", "unknown"),
        (errors.ExecTimeout("its own"), "policy", "caller", "unknown"),
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
    verdict = cancelled("exec")
    assert (verdict.status, verdict.reward, verdict.fault, verdict.cause) == (
        "cancelled",
        None,
        "none",
        "cancelled_user",
    )
    assert verdict_of_error(asyncio.CancelledError(), "exec").status == "void"
