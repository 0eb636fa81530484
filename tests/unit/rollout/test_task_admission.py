"""What the verdicts of several rounds say about a task."""

from barchan.model.verdict import Evidence, Verdict
from barchan.rollout.admission import admission
from barchan.rollout.calls import call_to
from barchan.rollout.task import ScriptGrader, Task
from barchan.rollout.verdict import scored, void

TASK = Task(task_id="t", instruction="", grader=ScriptGrader(command="x"), oracle=(call_to("submit"),))


def rewarded(reward: float, *not_passed: str) -> Verdict:
    evidence = tuple(Evidence(source="tests", fact="not passed, failed", value=name) for name in not_passed)
    return scored(reward, "completed", False, evidence)


ONE, ZERO, VOID = rewarded(1.0), rewarded(0.0), void("platform", "grader_timeout", ())


def test_a_sound_task() -> None:
    """The oracle always 1, everything else always less: admitted."""
    found = admission(TASK, {"oracle": [ONE, ONE], "nop": [ZERO, ZERO], "empty": [rewarded(0.5)] * 2}, 1.23456)
    assert found.admitted and found.why == () and found.unstable == ()
    assert (found.oracle, found.nop, found.empty, found.seconds) == ((1.0, 1.0), (0.0, 0.0), (0.5, 0.5), 1.235)


def test_each_reason() -> None:
    """Too little for the oracle, too much for nothing, and a void anywhere keep a task out, each with its round."""
    for verdicts, why in (
        ({"oracle": [ONE, rewarded(0.9)]}, "oracle, round 2: reward 0.9, completed"),
        ({"oracle": [VOID, ONE]}, "oracle, round 1: void by platform, grader_timeout"),
        ({"oracle": [ONE], "nop": [ONE]}, "nop, round 1: reward 1, completed"),
        ({"oracle": [ONE], "nop": [ZERO], "empty": [VOID]}, "empty, round 1: void by platform, grader_timeout"),
    ):
        found = admission(TASK, verdicts, 0.0)
        assert not found.admitted
        assert why in found.why


def test_equal_reasons_are_told_once() -> None:
    """With the rounds, of whatever attempts, that they are the reason for."""
    verdicts = {"oracle": [VOID, rewarded(0.5), VOID], "nop": [VOID, ZERO], "empty": [ONE, ONE]}
    assert admission(TASK, verdicts, 0.0).why[:3] == (
        "oracle, rounds 1, 3 and nop, round 1: void by platform, grader_timeout",
        "oracle, round 2: reward 0.5, completed",
        "empty, rounds 1, 2: reward 1, completed",
    )


def test_a_task_without_an_oracle() -> None:
    """Nothing shows that it can be solved."""
    bare = Task(task_id="t", instruction="", grader=ScriptGrader(command="x"))
    assert admission(bare, {"nop": [ZERO, ZERO]}, 0.0).why == ("it has no known-good attempt",)


def test_what_differs_from_round_to_round() -> None:
    """A test that fails in one of the oracle's rounds, and a score that changes, are named; one that always fails is
    no flake.
    """
    verdicts = {
        "oracle": [rewarded(0.0, "a::flaky", "a::broken"), rewarded(0.0, "a::broken")],
        "nop": [ZERO, rewarded(0.5)],
        "empty": [ZERO, ZERO],
    }
    found = admission(TASK, verdicts, 0.0)
    assert found.unstable == ("nop: its score", "a::flaky")
    assert found.why[-1] == "unstable: nop: its score, a::flaky"
    assert "tests: not passed, failed: a::flaky" in found.why[0]
