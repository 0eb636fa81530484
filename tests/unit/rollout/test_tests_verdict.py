"""What the test that must fail proves, by what became of it with the artifact and with the reference."""

import pytest

from barchan.model.sandbox import ExecResult, Usage
from barchan.rollout.graders.junit import Outcome
from barchan.rollout.graders.tests import TestRun as Run
from barchan.rollout.graders.tests import tests_verdict as verdict_of
from barchan.rollout.task import TestsGrader as Spec

SPEC = Spec(test_patch="", command="pytest {tests}", fail_to_pass=("t.py::test_a",), reference="diff")
ENDED = ExecResult(
    process_id="p",
    exit_code=0,
    stdout=b"",
    stderr=b"",
    usage=Usage(user_s=0.0, system_s=0.0, max_rss_kib=0, wall_s=0.0),
)


def ran(sentinel: Outcome | None, outcome: Outcome = "passed") -> Run:
    return Run(applied=ENDED, end=ENDED, outcomes={"t.py::test_a": outcome}, sentinel=sentinel)


@pytest.mark.parametrize(
    ("with_artifact", "with_reference", "reward", "is_proof"),
    [
        ("failed", None, 1.0, False),
        ("passed", None, 0.0, True),
        ("missing", "failed", 0.0, True),
        ("skipped", "error", 0.0, True),
        ("missing", "missing", 1.0, False),  # a command that leaves it out
        ("missing", None, 1.0, False),  # no reference: a sign, no more
        (None, None, 1.0, False),  # there was none
    ],
)
def test_what_is_left_out_is_proof_where_the_reference_ran_it(
    with_artifact: Outcome | None, with_reference: Outcome | None, reward: float, is_proof: bool
) -> None:
    """The same command told of it with the reference: then the artifact has kept it from that."""
    control = None if with_reference is None else ran(with_reference)
    verdict = verdict_of(SPEC, ran(with_artifact), control)
    assert verdict.reward == reward
    assert (verdict.cause == "integrity_violation") is is_proof
    assert any(item.fact.startswith("proven") for item in verdict.evidence) is is_proof
