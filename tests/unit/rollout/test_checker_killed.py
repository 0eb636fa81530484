"""A checker that something outside its sandbox has killed is no doing of the submission's."""

from barchan.model.sandbox import ExecResult
from barchan.rollout.rules.checks import Checked, judge
from tests.unit.rollout.fakes import result


def cause_of(checker: ExecResult) -> str:
    return judge(Checked(report=None, checker=checker, candidate=None, checks_total=1, cpu_s_max=5)).cause


def test_a_killed_checker_is_the_platform_s() -> None:
    """It is root's, so the candidate can't have killed it: void at once, and no control may make a zero of it. Out of
    time, out of memory, or ended in another way, it stays for a control to decide.
    """
    assert cause_of(result(137, signal=9)) == "sandbox_lost"
    assert cause_of(result(137, signal=9, oom_killed=True)) == "reward_missing"
    assert cause_of(result(137, signal=9, timed_out=True)) == "grader_timeout"
    assert cause_of(result(1)) == "reward_missing"
