"""Why an attempt left no artifact: the policy's doing, or the platform's."""

from typing import Any, cast

import pytest

from barchan.errors import BarchanError, GuestWrecked, InvalidSpec, NotFound
from barchan.model.verdict import Evidence
from barchan.rollout.artifact import take
from barchan.rollout.task import DiffArtifact, ScriptGrader, Task
from barchan.rollout.tools import Workspace
from barchan.rollout.verdict import verdict_of_error

TASK = Task(task_id="t", instruction="", grader=ScriptGrader(command="true"), artifact=DiffArtifact())


class Failing:
    """A sandbox of which no image can be made."""

    def __init__(self, error: BarchanError) -> None:
        self._error = error

    async def snapshot(self, name: str) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [NotFound("its image was removed", layer="0" * 64), InvalidSpec("65 layers are too many", layers=65)],
)
async def test_an_image_that_the_platform_can_not_make_is_no_zero(error: BarchanError) -> None:
    """Its layers went, or can't be merged: no policy can do that, and the verdict names the image."""
    with pytest.raises(type(error)) as raised:
        await take(Workspace(cast(Any, Failing(error)), 1000), TASK, "image")
    verdict = verdict_of_error(raised.value, "exec")
    assert (verdict.status, verdict.reward, verdict.cause) == ("void", None, "image")


async def test_files_that_no_image_can_hold_are_the_guest_s_doing() -> None:
    """What it wrote can be no layer: evidence in place of an artifact."""
    taken = await take(Workspace(cast(Any, Failing(GuestWrecked("too deep"))), 1000), TASK, "image")
    assert isinstance(taken, Evidence)
    assert taken.source == "artifact: GuestWrecked"
