"""Runs of rollouts that are put aside in the middle of a command, and resumed: nothing is lost, nothing runs twice."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import barchan
from barchan.cli.common import PREEMPTED
from barchan.model.tiers import TierChange
from tests.integration.resume_kills import Lives, faults
from tests.integration.resume_node import running
from tests.integration.resume_tasks import SLOW_GRADER, SLOW_PYTHON, SLOW_SHELL
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(240), pytest.mark.requires("root", "cgroup", "userns")]

WAIT_S = 60.0
LEASE_GRACE_S = 20.0


@pytest.fixture(scope="module")
def node(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    node = NodeProcess(tmp_path_factory.mktemp("node"), images)
    node.start()
    yield node
    assert node.wait_empty(LEASE_GRACE_S) == []
    assert node.end() == []


async def until_runs(lives: Lives, program: str, told: bytes) -> None:
    """Until it runs, and the logs say that it was asked for: another run of this host may have the same programs."""
    async with asyncio.timeout(WAIT_S):
        while not (lives.run.exists() and any(told in log for log in lives.logs().values()) and any(running(program))):
            await asyncio.sleep(0.005)


async def preempted(client: barchan.AsyncClient) -> list[TierChange]:
    (run,) = {lease.labels["run"] for lease in await client.leases() if "run" in lease.labels and lease.holders}
    return await client.preempt(run, by="a test", keep_s=600)


@pytest.mark.parametrize(
    ("program", "told"),
    [(SLOW_SHELL, SLOW_SHELL.encode()), (SLOW_GRADER, b'"grade"')],
    ids=["shell", "grading"],
)
async def test_a_run_goes_on_where_it_was_put_aside(
    node: NodeProcess, tmp_path: Path, program: str, told: bytes
) -> None:
    """`barchan rollout` ends with an exit code of its own and leaves no verdict behind; `--resume` finds its sandboxes,
    and every rollout gets the verdict that it would have had.
    """
    lives = Lives(tmp_path / "lives", node)
    async with barchan.connect_async(lives.url) as client:
        life = lives.begin()
        await until_runs(lives, program, told)
        changes = await preempted(client)
        assert {change.tier for change in changes} <= {"paused", "hibernated"}
        assert await asyncio.to_thread(lives.end, life) == PREEMPTED, lives.output
        assert "was preempted by a test" in lives.output
        before = lives.logs()
        assert not any(b'"verdict"' in log and b'"void"' in log for log in before.values())
    assert await asyncio.to_thread(lives.live) == 0, lives.output
    assert faults(lives, before) == [], lives.output


async def test_a_trainer_goes_on_where_it_was_put_aside(node: NodeProcess, tmp_path: Path) -> None:
    """One with generation of its own gets `Preempted` from whatever it does; `client.run(attach=True)` goes on."""
    lives = Lives(tmp_path / "lives", node)
    async with barchan.connect_async(lives.url) as client:
        life = lives.begin_to_train()
        await until_runs(lives, SLOW_PYTHON, SLOW_PYTHON.encode())
        await preempted(client)
        assert await asyncio.to_thread(lives.end, life) == 1, lives.output
        assert "barchan.errors.Preempted: run 'counted' was preempted by a test" in lives.output
        before = lives.logs()
    assert await asyncio.to_thread(lives.train) == 0, lives.output
    assert faults(lives, before) == [], lives.output
