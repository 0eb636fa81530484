"""Runs from a program that go on by their logs, on a real node: attached to, given up in a call, by a broken log."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import barchan
from barchan.errors import Conflict, InvalidSpec, NotFound
from barchan.rollout.calls import call_to
from barchan.rollout.resuming.bodies import is_abandoned
from barchan.rollout.store import read_rollouts
from barchan.sdk.aio.client import AsyncClient
from barchan.trajectory.format import log_files
from barchan.trajectory.writer import TrajectoryWriter
from tests.integration.rollout_hacks import TASK
from tests.integration.test_run import SMALL, members, solve
from tests.integration.trainers import Trainer
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(240), pytest.mark.requires("root", "cgroup", "userns")]


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


@pytest.fixture
def trainer(node: NodeProcess) -> Iterator[Callable[..., Trainer]]:
    """Makes trainers, which end with the test."""
    made: list[Trainer] = []

    def make(*words: object) -> Trainer:
        made.append(Trainer(node, *words))
        return made[-1]

    yield make
    for one in made:
        one.kill()


async def test_a_log_that_no_rollout_wrote_is_not_guessed_at(
    client: AsyncClient, trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """Whole, and nonsense: nobody can go on by it. Its place has the next attempt at once, and its sandbox is ended."""
    other = await trainer(tmp_path, "cut", "k", 1).ready()
    (log,) = log_files(tmp_path)
    other.kill()
    with TrajectoryWriter.reopen(log) as writer:
        writer.intent("tool_call", {"name": "bash"})
    async with client.run("cut", out=tmp_path, **SMALL) as run:
        (rollout,) = await members(await run.group(TASK, 1, key="k"))
        assert (rollout.attempt, rollout.sandbox_id == other.told["sandboxes"][0]) == (1, False)
        assert [info.sandbox_id for info in await client.list(labels={"run": "cut"})] == [rollout.sandbox_id]
    (row,) = read_rollouts(tmp_path)
    assert (row.rollout_id, is_abandoned(row.verdict)) == (other.told["ids"][0], True)


async def test_a_call_that_was_given_up_goes_on_elsewhere(client: AsyncClient, tmp_path: Path) -> None:
    """Its driver gave it up, which ended the command: whoever goes on with the rollout is told of that end."""
    async with client.run("given up", out=tmp_path, **SMALL) as run:
        (rollout,) = await members(await run.group(TASK, 1, key="k"))
        acting = asyncio.create_task(rollout.act([call_to("bash", command="echo begun | tee /tmp/begun; sleep 60")]))
        sandbox = await client.attach(rollout.sandbox_id or "")
        async with asyncio.timeout(30):
            while not (await sandbox.exec(["test", "-s", "/tmp/begun"])).ok:
                await asyncio.sleep(0.05)
        with pytest.raises(Conflict, match="between two"):
            pickle.dumps(rollout)
        acting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acting
        copy = pickle.loads(pickle.dumps(rollout))
        observation = await copy.observe()
        said = observation.messages[-1]["content"]
        assert (observation.turn, said.split()[0], "[exit code 137]" in said) == (1, "begun", True)
        assert (await solve(copy)).reward == 1.0
        with pytest.raises(Conflict):
            await rollout.cancel()
    async with run:
        (known,) = await members(await run.group(TASK, 1, key="k"))
        assert (known.rollout_id, known.verdict) == (copy.rollout_id, copy.verdict)


async def test_a_run_is_attached_to(client: AsyncClient, trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    """What is not over is taken over at once, from a client that still lives, which then can do nothing more; a run
    that is not there is not made.
    """
    with pytest.raises(NotFound, match="no run"):
        async with client.run("attached", out=tmp_path / "none", attach=True, **SMALL):
            pass
    with pytest.raises(InvalidSpec, match="out="):
        client.run("attached", attach=True)
    assert not (tmp_path / "none").exists()
    other = await trainer(tmp_path, "attached", "k", 2).ready()
    async with client.run("attached", out=tmp_path, attach=True, **SMALL) as run:
        rollouts = await run.rollouts()
        assert [rollout.rollout_id for rollout in rollouts] == sorted(other.told["ids"])
        assert {rollout.sandbox_id for rollout in rollouts} == set(other.told["sandboxes"])
        assert [(rollout.is_resumed, rollout.pending) for rollout in rollouts] == [(True, ())] * 2
        infos = await client.list(labels={"run": "attached", "role": "agent"})
        assert {info.spec.lease_id for info in infos} == {run.lease_id} != {other.told["lease"]}
        other.say("act")
        assert await asyncio.to_thread(other.hear) == "conflict"
        await rollouts[0].record(text="sampled", completion_ids=[1, 2])
        (found,) = [one for one in await run.rollouts() if one.rollout_id == rollouts[0].rollout_id]
        assert [completion.text for completion in found.pending] == ["sampled"]
        assert [(await solve(rollout)).reward for rollout in await run.rollouts()] == [1.0] * 2
        assert await run.rollouts() == []
