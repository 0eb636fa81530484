"""A task whose gradings nothing can be compared with, on a real node."""

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

import barchan
from barchan.rollout.calls import call_to
from barchan.rollout.task import PythonGrader
from barchan.sdk.aio.client import AsyncClient
from tests.integration.rollout_hacks import REFERENCE, TASK
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(120), pytest.mark.requires("root", "cgroup", "userns")]

NO_CONTROL = replace(
    TASK, task_id="no-control", oracle=(), grader=PythonGrader(function="tests.integration.runner_tasks:breaks")
)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def test_a_run_begins_no_further_attempts_at_it(client: AsyncClient) -> None:
    """Its grading is void; the run's next group of it begins nothing, and each member says why; other tasks go on."""
    async with client.run("quarantine", memory_mib=128) as run:
        verdicts = {}
        for key, task in (("first", NO_CONTROL), ("later", NO_CONTROL), ("other", TASK)):
            async for rollout in await run.group(task, 1, key=key):
                if rollout.verdict is None:
                    await rollout.act([call_to("submit", solution=REFERENCE)])
                    await rollout.finish()
                verdicts[key] = rollout.verdict
        found = {key: (verdict.status, verdict.cause) for key, verdict in verdicts.items() if verdict is not None}
        assert found == {
            "first": ("void", "grader_crash"),
            "later": ("void", "task_quarantined"),
            "other": ("scored", "completed"),
        }


async def test_a_trainer_is_told_when_voids_pile_up(client: AsyncClient) -> None:
    """The node has nothing that its tasks start from: the run begins no further group, and says what they share. Who
    has switched that off is not told.
    """
    tasks = [replace(TASK, task_id=f"t{number}") for number in range(3)]
    for breaker, is_stopped in ((0.5, True), (0.0, False)):
        async with client.run("stopped", memory_mib=128, template="no-such-image", breaker=breaker) as run:
            for number, task in enumerate(tasks):
                async for rollout in await run.group(task, 4, key=f"{number}"):
                    assert rollout.verdict is not None and rollout.verdict.cause == "image"
            if is_stopped:
                with pytest.raises(barchan.RunStopped, match=r"with image no-such-image in common"):
                    await run.group(TASK, 1, key="last")
            else:
                await run.group(TASK, 1, key="last")
