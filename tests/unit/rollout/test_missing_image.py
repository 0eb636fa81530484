"""An image that is missing is told as such wherever that shows."""

import pytest

from barchan.errors import NotFound, SandboxExpired
from barchan.rollout.verdict import Stage, verdict_of_error


@pytest.mark.parametrize("stage", ["setup", "create", "exec", "grade"])
def test_a_missing_image_voids_by_its_own_cause(stage: Stage) -> None:
    """A grader's sandbox may be the first to miss it; another thing that is not found stays unexplained there."""
    verdict = verdict_of_error(NotFound("no image 'debian'", template="debian"), stage)
    assert (verdict.status, verdict.cause) == ("void", "image")
    assert verdict_of_error(NotFound("no such thing"), "grade").cause == "unknown"


@pytest.mark.parametrize("stage", ["setup", "create", "exec", "grade"])
def test_a_lease_that_ended_is_one_event_wherever_it_shows(stage: Stage) -> None:
    """By what becomes of a sandbox that was there, or of one that was to be made."""
    for error in (
        SandboxExpired("sandbox sb_1 has ended: lease_ended", sandbox_id="sb_1", cause="lease_ended"),
        SandboxExpired("lease le_1 is over", lease_id="le_1", cause="lease_ended"),
        NotFound("there is no lease le_1", lease_id="le_1"),
    ):
        assert verdict_of_error(error, stage).cause == "sandbox_expired"
