"""What one run of a function's checks amounts to. Pure."""

import signal
from typing import Literal

from msgspec import Struct

from barchan.model.sandbox import ExecResult
from barchan.model.verdict import Evidence, Verdict
from barchan.rollout.rules.findings import Finding, verdict_of

Outcome = Literal["passed", "failed", "raised", "garbled", "gone", "slow", "absent"]


class CheckReport(Struct, frozen=True):
    """The checker's own account: how its checks ended, how many of them held, how often it called the candidate."""

    outcome: Outcome
    passed: int
    calls: int
    detail: str


class Checked(Struct, frozen=True, kw_only=True):
    """All that is known of one run of a function's checks.

    Attributes:
        report: None when the checker gave none.
        report_malformed: The checker wrote something else. The candidate cannot write there.
        checker: How the checker ended; None when it was not waited for.
        candidate: How the candidate's process ended; None when it had not, soon after the checker. It was `restrained`,
            so that it can't have sent itself a SIGKILL.
        cpu_s_max: The candidate's CPU limit, at which the kernel sends SIGXCPU.
    """

    report: CheckReport | None
    report_malformed: bool = False
    checker: ExecResult
    candidate: ExecResult | None
    checks_total: int
    cpu_s_max: int


def judge(checked: Checked) -> Verdict:
    """The verdict of a function's checks, as if the attempt had been completed; undecided where only a control can
    tell the candidate's doing from the platform's.
    """
    finding, reward = _found(checked)
    return verdict_of((finding,), _evidence(checked), reward=reward)


def _found(checked: Checked) -> tuple[Finding, float | None]:
    report = checked.report
    if report is None and checked.report_malformed:
        return "report_malformed", None
    if checked.checker.timed_out or (report is not None and report.outcome == "slow"):
        return "grading_out_of_time", None
    if report is None and checked.checker.signal == signal.SIGKILL and not checked.checker.oom_killed:
        return "killed_from_outside", None  # it is root's: the candidate can't have
    if report is None:
        return "report_missing", None
    if report.outcome == "absent":
        return "grader_not_started", None
    if report.outcome == "gone":
        return _end_of_candidate(checked), None
    if report.outcome != "passed":
        return "handed_in", 0.0
    if report.passed != checked.checks_total or report.calls == 0:
        return "task_contradicts_itself", None
    return "handed_in", 1.0


def _end_of_candidate(checked: Checked) -> Finding:
    """Why the candidate's process ended in the middle of its checks; undecided when it may not have been its own
    doing.
    """
    end = checked.candidate
    if end is None:
        return "grading_broke"
    if end.oom_killed:
        return "memory_limit_reached"
    if end.signal == signal.SIGXCPU:
        return "cpu_limit_reached"
    if end.timed_out:
        return "grading_broke"
    if end.signal == signal.SIGKILL:
        used_s = end.usage.user_s + end.usage.system_s  # only one that ignores SIGXCPU comes to have used it up
        return "cpu_limit_reached" if used_s >= checked.cpu_s_max else "killed_from_outside"
    return "guest_broke_off"


def _evidence(checked: Checked) -> tuple[Evidence, ...]:
    facts: list[Evidence] = []
    report = checked.report
    if report is not None:
        facts.append(Evidence(source="checker", fact="outcome", value=report.outcome))
        facts.append(Evidence(source="checker", fact="checks_passed", value=report.passed))
        if report.detail:
            facts.append(Evidence(source="checker", fact="detail", value=report.detail))
    for source, end in (("checker process", checked.checker), ("candidate process", checked.candidate)):
        if end is None:
            facts.append(Evidence(source=source, fact="still running", value=True))
            continue
        if end.exit_code or end.timed_out:
            facts.append(Evidence(source=source, fact="exit_code", value=end.exit_code))
        if end.oom_killed:
            facts.append(Evidence(source=f"{source}, kernel's memory counter", fact="oom_killed", value=True))
        if end.timed_out:
            facts.append(Evidence(source=source, fact="timed_out", value=True))
    if report is None and checked.checker.stderr:
        facts.append(Evidence(source="checker process", fact="stderr", value=checked.checker.error_text[-400:]))
    if checked.candidate is not None:
        used_s = checked.candidate.usage.user_s + checked.candidate.usage.system_s
        facts.append(Evidence(source="candidate process, wait status", fact="cpu_s", value=round(used_s, 4)))
    return tuple(facts)
