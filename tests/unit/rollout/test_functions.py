"""The grader's host side: what it accepts as a report."""

import pytest

from barchan.rollout.graders.functions import check, parse_report
from barchan.rollout.limits import GradingLimits
from barchan.rollout.verdict import CheckReport
from tests.unit.rollout.fakes import FakeClient, FakeSandbox, result, task

pytestmark = pytest.mark.timeout(30)


def test_a_report_is_read() -> None:
    """Outcome, counts and detail of one well-formed line with the right nonce."""
    report = parse_report(result(stdout=b"n1 failed 2 3 'an assertion, here'\n"), "n1")
    assert report == CheckReport("failed", 2, 3, "an assertion, here")


@pytest.mark.parametrize(
    "stdout",
    [
        b"",
        b"PASSED\n",
        b"n2 passed 1 1 ''\n",
        b"n1 won 1 1 ''\n",
        b"n1 passed -1 1 ''\n",
        b"n1 passed one 1 ''\n",
        b"n1 passed 1\n",
        b"\xff\xfe n1 passed 1 1 ''\n",
        b"noise\nn1 passed 1 1 ''\n",
    ],
)
def test_anything_else_is_no_report(stdout: bytes) -> None:
    """Another nonce, outcome or form is never read as a report, whatever the exit code says."""
    assert parse_report(result(0, stdout=stdout), "n1") is None


async def test_output_without_the_nonce_is_malformed() -> None:
    """A checker that wrote something else is told from one that wrote nothing."""
    client = FakeClient()
    client.check = lambda source: ("", 0, 0, "")
    sandbox = FakeSandbox(client, 1)
    silent = await check(sandbox, task().grader, "x", GradingLimits())
    assert (silent.report, silent.report_malformed) == (None, False)
    client.checker_end = result(stdout=b"PASSED\n")
    forged = await check(sandbox, task().grader, "x", GradingLimits())
    assert (forged.report, forged.report_malformed) == (None, True)


async def test_each_grading_has_its_own_nonce() -> None:
    """A nonce seen in one grading is worth nothing in the next."""
    nonces: list[str] = []

    class Listening(FakeClient):
        def checked(self, job: dict[str, str]):  # type: ignore[no-untyped-def]
            nonces.append(job["nonce"])
            return super().checked(job)

    for _ in range(2):
        await check(FakeSandbox(Listening(), 1), task().grader, "x", GradingLimits())
    assert len(set(nonces)) == 2
    assert min(len(nonce) for nonce in nonces) >= 32
