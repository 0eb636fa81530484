"""Runs from a program, on a real node: leases, groups that can be asked for again, rollouts that go on elsewhere."""

import asyncio
import json
import os
import pickle
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import barchan
from barchan.errors import Conflict, InvalidSpec, LocalProtocolError, NotFound, RunStopped, TaskError
from barchan.model.node import Budget, LeaseInfo
from barchan.rollout.calls import call_to
from barchan.rollout.limits import Limits
from barchan.rollout.live import AsyncRollout
from barchan.rollout.store import read_rollouts, read_tasks
from barchan.rollout.task import Environment
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.build import build
from barchan.sdk.recipe import Put, Recipe, Run
from barchan.trajectory.format import log_files
from barchan.trajectory.reader import verify
from tests.integration.rollout_hacks import REFERENCE, TASK
from tests.integration.trainers import Trainer, receiver
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(240), pytest.mark.requires("root", "cgroup", "userns")]

SMALL: dict[str, Any] = {"memory_mib": 128, "grace_s": 4.0}


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def members(group: barchan.AsyncGroup) -> list[AsyncRollout]:
    """All of a group, by their places."""
    return sorted([rollout async for rollout in group], key=lambda rollout: rollout.index)


async def solve(rollout: AsyncRollout, solution: str = REFERENCE) -> barchan.Verdict:
    await rollout.record(text="Here.", completion_ids=[1, 2], logprobs=[-0.1, -0.2], policy_version=3)
    await rollout.act([call_to("submit", solution=solution)])
    return await rollout.finish()


def leases_of(node: NodeProcess) -> dict[str, LeaseInfo]:
    leases = msgspec.convert(node.request("GET", "/v1/leases"), list[LeaseInfo])
    return {lease.lease_id: lease for lease in leases}


async def until(seen: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Wait for what a function finds."""
    async with asyncio.timeout(timeout_s):
        while not (found := seen()):
            await asyncio.sleep(0.05)
        return found


@pytest.fixture
def trainer(node: NodeProcess) -> Iterator[Callable[..., Trainer]]:
    """Makes trainers, which end with the test."""
    made: list[Trainer] = []

    def make(*words: Any) -> Trainer:
        made.append(Trainer(node, *words))
        return made[-1]

    yield make
    for one in made:
        one.kill()


async def test_a_group_from_its_first_observation_to_its_verdicts(
    node: NodeProcess, client: AsyncClient, tmp_path: Path
) -> None:
    """Each member has a sandbox of its own, its log and its line; leaving the run ends its lease and its sandboxes."""
    async with client.run("first", out=tmp_path / "out", **SMALL) as run:
        group = await run.group(TASK, 4, key="step0/t0")
        rollouts = await members(group)
        assert [rollout.index for rollout in rollouts] == [0, 1, 2, 3]
        assert len({rollout.sandbox_id for rollout in rollouts}) == 4
        observation = await rollouts[0].observe()
        assert (observation.turn, observation.over, observation.messages[0]["role"]) == (0, None, "user")
        infos = await client.list(labels={"run": "first", "role": "agent"})
        assert {info.sandbox_id for info in infos} == {rollout.sandbox_id for rollout in rollouts}
        assert {info.spec.lease_id for info in infos} == {run.lease_id}
        verdicts = [await solve(rollouts[0]), await solve(rollouts[1], "def double(x):\n    return 0\n")]
        assert [verdict.reward for verdict in verdicts] == [1.0, 0.0]
        assert (await rollouts[2].cancel("stale")).cause == "cancelled_stale"
        assert [rollout.verdict is None for rollout in rollouts] == [False, False, False, True]
    assert await client.list(labels={"run": "first"}) == []
    rows = read_rollouts(tmp_path / "out")
    assert {row.rollout_id for row in rows} == {rollout.rollout_id for rollout in rollouts[:3]}
    assert rows[0].completions[0].completion_ids == (1, 2)
    assert [task.task_id for task in read_tasks(tmp_path / "out")] == [TASK.task_id]
    logs = log_files(tmp_path / "out")
    assert len(logs) == 4
    assert all(verify(log).ok for log in logs)


async def test_a_run_must_be_entered_and_named(client: AsyncClient, tmp_path: Path) -> None:
    """A run that was not entered, or was left, gives nothing; a bad wish is refused before anything starts."""
    run = client.run("not entered")
    with pytest.raises(LocalProtocolError, match="enter it"):
        await run.group(TASK, 2, key="k")
    with pytest.raises(LocalProtocolError, match="enter it"):
        pickle.dumps(run)
    for wish in ({"name": ""}, {"name": "x" * 200}, {"name": "x", "priority": 101}, {"name": "x", "labels": {"": "y"}}):
        with pytest.raises(InvalidSpec):
            client.run(**wish)
    async with run:
        with pytest.raises(InvalidSpec, match="n=0"):
            await run.group(TASK, 0, key="k")
        with pytest.raises(InvalidSpec, match="key"):
            await run.group(TASK, 1, key="")
        with pytest.raises(InvalidSpec, match="tool"):
            await run.group(replace(TASK, tools=("no such tool",)), 1, key="k")
        with pytest.raises(NotFound, match="out="):
            await run.rollout("a-0-0")
    with pytest.raises(LocalProtocolError, match="enter it"):
        await run.group(TASK, 2, key="k")
    async with client.run("one", out=tmp_path):
        pass
    with pytest.raises(InvalidSpec, match="another folder"):
        async with client.run("two", out=tmp_path):
            pass


async def test_asking_again_gives_the_same_group(client: AsyncClient, tmp_path: Path) -> None:
    """In the same process, after the answer was lost, and in a later run of the same folder: no sandbox is made twice,
    and a verdict is given again. Another task or size under the key is a conflict.
    """
    async with client.run("again", out=tmp_path, **SMALL) as run:
        first = await members(await run.group(TASK, 3, key="k"))
        again = await members(await run.group(TASK, 3, key="k"))
        assert [rollout.sandbox_id for rollout in again] == [rollout.sandbox_id for rollout in first]
        with pytest.raises(Conflict, match="size"):
            await run.group(TASK, 4, key="k")
        with pytest.raises(Conflict, match="task"):
            await run.group(replace(TASK, instruction="Something else."), 3, key="k")
        verdict = await solve(first[0])
        assert len(await client.list(labels={"run": "again"})) == 2
    async with client.run("again", out=tmp_path, **SMALL) as run:
        with pytest.raises(Conflict, match="task"):
            await run.group(replace(TASK, instruction="Something else."), 3, key="k")
        later = await members(await run.group(TASK, 3, key="k"))
        assert (later[0].rollout_id, later[0].attempt, later[0].verdict) == (first[0].rollout_id, 0, verdict)
        assert (await later[0].observe()).over == "completed"
        assert [(rollout.attempt, rollout.verdict) for rollout in later[1:]] == [(0, None), (0, None)]
        assert (await solve(later[1])).reward == 1.0
    rows = {row.rollout_id: row for row in read_rollouts(tmp_path)}
    assert rows.keys() == {rollout.rollout_id for rollout in first[:2]}
    evidence = rows[later[1].rollout_id].verdict.evidence
    assert [fact.value for fact in evidence if "restored" in fact.fact] == [0]


async def test_without_a_folder_the_node_alone_knows_the_group(client: AsyncClient) -> None:
    """The ids of a group's creates follow from run, key and place: another run of the name finds those that live."""
    async with client.run("bare", **SMALL) as one, client.run("bare", **SMALL) as two:
        first = await members(await one.group(TASK, 2, key="k"))
        second = await members(await two.group(TASK, 2, key="k"))
        other = await members(await two.group(TASK, 2, key="k2"))
        assert [rollout.sandbox_id for rollout in first] == [rollout.sandbox_id for rollout in second]
        assert {rollout.sandbox_id for rollout in first}.isdisjoint(rollout.sandbox_id for rollout in other)
    async with client.run("bare", **SMALL) as later:
        anew = await members(await later.group(TASK, 2, key="k"))
        assert [(rollout.attempt, rollout.verdict) for rollout in anew] == [(1, None), (1, None)]


async def test_runs_of_one_name_in_two_folders_have_nothing_in_common(client: AsyncClient, tmp_path: Path) -> None:
    """A program that is run again with a new folder starts from nothing, though the node remembers what was before."""
    seen = []
    for folder in ("one", "two"):
        async with client.run("twice", out=tmp_path / folder, **SMALL) as run:
            (rollout,) = await members(await run.group(TASK, 1, key="k"))
            seen.append((rollout.rollout_id, rollout.attempt, rollout.sandbox_id))
            assert (await solve(rollout)).reward == 1.0
    assert [one[:2] for one in seen] == [seen[0][:2]] * 2
    assert seen[0][2] != seen[1][2]


async def test_two_processes_with_one_key(client: AsyncClient, trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    """They get the same sandboxes. Whoever asked last goes on with them, where the other had come to; the other's next
    call is a conflict, and harms nothing.
    """
    other = await trainer(tmp_path, "shared", "k", 2).ready()
    async with client.run("shared", out=tmp_path, **SMALL) as run:
        rollouts = await members(await run.group(TASK, 2, key="k"))
        assert [rollout.sandbox_id for rollout in rollouts] == other.told["sandboxes"]
        observation = await rollouts[0].observe()
        assert (observation.turn, len(observation.messages)) == (1, 3)
        other.say("act")
        assert await asyncio.to_thread(other.hear) == "conflict"
        observation = await rollouts[0].act([call_to("bash", command="pwd; cat mark; echo $x")])
        assert observation.results[0].content.split() == ["/tmp", "mine", "kept"]
        assert (await solve(rollouts[0])).reward == 1.0


async def test_two_processes_that_ask_at_once_make_no_sandbox_twice(
    client: AsyncClient, trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """However their questions fall together, there is one sandbox for each place of the group."""
    others = [trainer(tmp_path, "race", "k", 3) for _ in range(3)]
    for other in others:
        other.told = {"line": await asyncio.to_thread(other.hear)}
    infos = await client.list(labels={"run": "race", "role": "agent"})
    places = [info.spec.labels["rollout"].rpartition("-")[0] for info in infos]
    assert len(places) == len(set(places)) <= 3
    told = [json.loads(other.told["line"]) for other in others if other.told["line"]]
    assert told
    assert {info.sandbox_id for info in infos} <= {sandbox for one in told for sandbox in one["sandboxes"]}


async def test_a_killed_trainers_rollouts_end_by_its_lease(
    node: NodeProcess, client: AsyncClient, trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """Its sandboxes end after the grace time and nobody else's do; then each of its members goes on in another sandbox,
    in which what it had done was carried out again: the conversation, the files and the shell are as they were.
    """
    async with client.run("killed", out=tmp_path, **SMALL) as run:
        mine = await members(await run.group(TASK, 2, key="mine"))
        other = await trainer(tmp_path, "killed", "theirs", 2).ready()
        assert other.told["lease"] != run.lease_id
        other.kill()
        theirs = set(other.told["sandboxes"])
        await until(lambda: theirs.isdisjoint(node.sandboxes()))
        assert {rollout.sandbox_id for rollout in mine} <= set(node.sandboxes())
        anew = await members(await run.group(TASK, 2, key="theirs"))
        assert [rollout.rollout_id for rollout in anew] == other.told["ids"]
        assert theirs.isdisjoint({rollout.sandbox_id for rollout in anew})
        observation = await anew[0].act([call_to("bash", command="pwd; cat mark; echo $x")])
        assert (observation.turn, observation.results[0].content.split()) == (2, ["/tmp", "mine", "kept"])
        assert [(await solve(rollout)).reward for rollout in (*mine, *anew)] == [1.0] * 4
    rows = {row.rollout_id: row.verdict for row in read_rollouts(tmp_path)}
    facts = [fact for rollout_id in other.told["ids"] for fact in rows[rollout_id].evidence if "restored" in fact.fact]
    assert [fact.value for fact in facts] == [1, 1]


async def test_a_trainer_that_comes_back_in_time_loses_nothing(
    node: NodeProcess, client: AsyncClient, trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """Killed and started again within the grace time, it has its sandboxes, its conversation and its shell; they are
    held by its new lease from then on.
    """
    other = await trainer(tmp_path, "back", "k", 2).ready()
    other.kill()
    async with client.run("back", out=tmp_path, **SMALL) as run:
        rollouts = await members(await run.group(TASK, 2, key="k"))
        assert [rollout.sandbox_id for rollout in rollouts] == other.told["sandboxes"]
        await until(lambda: other.told["lease"] not in leases_of(node))
        observation = await rollouts[1].act([call_to("bash", command="pwd; cat mark; echo $x")])
        assert observation.results[0].content.split() == ["/tmp", "mine", "kept"]
        assert (observation.turn, (await solve(rollouts[1])).reward) == (2, 1.0)
        infos = await client.list(labels={"run": "back"})
        assert {info.spec.lease_id for info in infos} == {run.lease_id}


async def test_a_rollout_goes_on_in_the_process_it_was_sent_to(
    node: NodeProcess, client: AsyncClient, tmp_path: Path
) -> None:
    """With its conversation, its limits, its sandbox and its shell, under the same lease, which both hold. Who sent it
    can't act in it any more, and finds its verdict by its id.
    """
    async with client.run("sent", out=tmp_path / "out", **SMALL) as run:
        (rollout,) = await members(await run.group(TASK, 1, key="k"))
        await rollout.act([call_to("bash", command="cd /tmp; x=kept")])
        (tmp_path / "sent").write_bytes(pickle.dumps((rollout, run)))
        with receiver(tmp_path / "sent") as process:
            assert process.stdout is not None and process.stdin is not None
            told = (await asyncio.to_thread(process.stdout.readline)).split()
            assert told == ["2", "/tmp", "kept", run.lease_id]
            for call in (rollout.act([call_to("bash", command="true")]), rollout.finish(), rollout.cancel()):
                with pytest.raises(Conflict, match="another process"):
                    await call
            assert rollout.verdict is None
            assert leases_of(node)[run.lease_id].holders == 2
            process.stdin.write("go on\n")
            process.stdin.flush()
            assert (await asyncio.to_thread(process.stdout.readline)).strip() == "1.0"
        (again,), found = await members(await run.group(TASK, 1, key="k")), await run.rollout(rollout.rollout_id)
        (row,) = read_rollouts(tmp_path / "out")
        assert again.verdict == found.verdict == row.verdict


async def test_a_stale_copy_of_a_rollout_is_refused(client: AsyncClient, tmp_path: Path) -> None:
    """One that was made before the rollout went on here: it takes nothing over, and the rollout goes on."""
    async with client.run("stale", out=tmp_path, **SMALL) as run:
        (rollout,) = await members(await run.group(TASK, 1, key="k"))
        copy = pickle.dumps(rollout)
        await rollout.act([call_to("bash", command="true")])
        with pytest.raises(Conflict, match="has gone on"):
            await pickle.loads(copy).observe()
        assert (await solve(rollout)).reward == 1.0


async def test_a_rollout_is_found_by_its_id(client: AsyncClient, tmp_path: Path) -> None:
    """In the process that has it, the same; in another run of the folder it goes on there. An unknown one is none."""
    async with client.run("ids", out=tmp_path, **SMALL) as one:
        (rollout,) = await members(await one.group(TASK, 1, key="k"))
        assert await one.rollout(rollout.rollout_id) is rollout
        await rollout.act([call_to("bash", command="true")])
        async with client.run("ids", out=tmp_path, **SMALL) as two:
            found = await two.rollout(rollout.rollout_id)
            assert (found.sandbox_id, (await found.observe()).turn) == (rollout.sandbox_id, 1)
            with pytest.raises(Conflict, match="another process"):
                await rollout.observe()
            for unknown in (rollout.rollout_id[:-1] + "7", "no-such-group-0-0", "nonsense"):
                with pytest.raises(NotFound):
                    await two.rollout(unknown)
            assert (await solve(found)).reward == 1.0


async def test_a_run_leaves_nothing_open_in_its_process(client: AsyncClient, tmp_path: Path) -> None:
    """However its rollouts ended: finished, cancelled, taken over, left."""
    before = set(os.listdir("/proc/self/fd"))
    async with client.run("files", out=tmp_path, **SMALL) as run:
        rollouts = await members(await run.group(TASK, 4, key="k"))
        await solve(rollouts[0])
        await rollouts[1].cancel()
        copy = pickle.loads(pickle.dumps(rollouts[2]))
        await copy.observe()
        assert rollouts[2].is_elsewhere
    logs = [os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - before if _is_open(fd)]
    assert [path for path in logs if str(tmp_path) in path] == []


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


async def test_each_member_fails_alone(client: AsyncClient, tmp_path: Path) -> None:
    """Where the lease's budget has room for two, the third is over and void, and the two are not; nothing is raised."""
    options = {**SMALL, "budget": Budget(sandboxes_max=2), "capacity_wait_s": 1.0, "out": tmp_path}
    async with client.run("alone", **options) as run:
        rollouts = await members(await run.group(TASK, 3, key="k"))
        void = [rollout for rollout in rollouts if rollout.verdict is not None]
        assert [(one.verdict.status, one.verdict.cause) for one in void if one.verdict] == [("void", "capacity")]
        assert (await void[0].observe()).over == "capacity"
        assert await void[0].finish() == void[0].verdict
        await next(rollout for rollout in rollouts if rollout.verdict is None).cancel()
        (late,) = await members(await run.group(TASK, 1, key="k2"))
        assert late.verdict is None
    async with client.run("no image", template="no-such-image") as run:
        rollouts = await members(await run.group(TASK, 2, key="k"))
        assert [rollout.verdict.cause for rollout in rollouts if rollout.verdict] == ["image", "image"]


async def test_a_budget_of_seconds_ends_the_runs_rollouts(client: AsyncClient) -> None:
    """They are void by the platform's account of it, never a zero; and no others begin."""
    async with client.run("seconds", budget=Budget(sandbox_s_max=2.0), **SMALL) as run:
        (rollout,) = await members(await run.group(TASK, 1, key="k"))
        observation = await rollout.observe()
        while observation.over is None:
            observation = await rollout.act([call_to("bash", command="sleep 0.2")])
        assert (await rollout.finish()).cause == "budget_spent"
        with pytest.raises(RunStopped, match="budget was used up"):
            await run.group(TASK, 1, key="k2")


async def test_the_node_tells_what_a_run_is(node: NodeProcess, client: AsyncClient) -> None:
    """Its lease has the run's name and labels, its priority, and what is used."""
    async with client.run("told", labels={"team": "a"}, priority=7, **SMALL) as run:
        await members(await run.group(TASK, 2, key="k"))
        lease = leases_of(node)[run.lease_id]
        assert (lease.labels, lease.priority, lease.grace_s) == ({"run": "told", "team": "a"}, 7, 4.0)
        assert (lease.used.sandboxes, lease.used.memory_mib) == (2, 256)
        assert len(await client.list(labels={"team": "a"})) == 2


async def test_a_cancelled_group_ends_every_member(client: AsyncClient, tmp_path: Path) -> None:
    """Also one in the middle of a call; leaving the iteration early ends nothing."""
    async with client.run("cancel", out=tmp_path, **SMALL) as run:
        group = await run.group(TASK, 3, key="k")
        async for first in group:
            rollout = first
            break
        assert len(await members(group)) == 3
        acting = asyncio.create_task(rollout.act([call_to("bash", command="sleep 60")]))
        await until(lambda: rollout._is_busy)
        await group.cancel("stale")
        assert (await acting).over == "cancelled_stale"
        assert [one.verdict.cause for one in await members(group) if one.verdict] == ["cancelled_stale"] * 3
        assert await client.list(labels={"run": "cancel"}) == []
    assert len(read_rollouts(tmp_path)) == 3


async def test_waiting_takes_no_agent_time_and_loses_no_lease(client: AsyncClient) -> None:
    """While the policy thinks, or weights are synchronised, or the trainer's thread computes and lets no other task
    run, the heartbeats go on, and the agent's time does not.
    """
    task = replace(TASK, limits=Limits(agent_s_max=30.0))
    async with client.run("waits", memory_mib=128, grace_s=0.5) as run:
        (rollout,) = await members(await run.group(task, 1, key="k"))
        before = (await rollout.act([call_to("bash", command="true")])).left.agent_s
        time.sleep(3.0)  # noqa: ASYNC251 - the stall is what is tested
        assert (await rollout.observe()).left.agent_s == before > 25.0
        assert (await solve(rollout)).reward == 1.0


async def test_members_start_from_a_recipe_that_is_made_once(client: AsyncClient, tmp_path: Path) -> None:
    """Two groups that ask at once start from one image, with what its steps did; a recipe that fails says why, and the
    key can be asked for again.
    """
    stamp = f"{time.monotonic_ns()}"
    recipe = Recipe(
        base="debian",
        steps=(
            Put(path="/srv/given", data=stamp.encode()),
            Run(command="cat /srv/given > /srv/made; head -c 8 /dev/urandom | od -An -tx1 >> /srv/made"),
        ),
    )
    task = replace(TASK, environment=Environment(recipe=recipe))
    async with client.run("recipe", out=tmp_path, **SMALL) as run:
        groups = await asyncio.gather(*(run.group(task, 2, key=f"k{number}") for number in range(2)))
        seen = set()
        for group in groups:
            for rollout in await members(group):
                observation = await rollout.act([call_to("bash", command="cat /srv/made")])
                seen.add(observation.results[0].content)
        assert len(seen) == 1
        assert seen.pop().startswith(stamp)
        await client.remove_image(await build(client, recipe))
        broken = Recipe(base="debian", steps=(Run(command="exit 3"),))
        for _ in range(2):
            with pytest.raises(TaskError, match="3"):
                await run.group(replace(TASK, environment=Environment(recipe=broken)), 2, key="broken")


def test_the_synchronous_twin_says_the_same(node: NodeProcess, tmp_path: Path) -> None:
    """The same names, from the run to the verdict; rollouts pickle, and are found again."""
    with ExitStack() as stack:
        client = stack.enter_context(barchan.connect(f"unix://{node.socket}"))
        run = stack.enter_context(client.run("sync", out=tmp_path, **SMALL))
        group = run.group(TASK, 2, key="k")
        rollouts = sorted(group, key=lambda rollout: rollout.index)
        again = sorted(run.group(TASK, 2, key="k"), key=lambda rollout: rollout.index)
        assert [rollout.sandbox_id for rollout in again] == [rollout.sandbox_id for rollout in rollouts]
        assert (run.name, group.key, group.n) == ("sync", "k", 2)
        assert rollouts[0].observe().turn == 0
        rollouts[0].record(completion_ids=[5], logprobs=[-0.5], policy_version=1)
        assert rollouts[0].act([call_to("submit", solution=REFERENCE)], timeout_s=30).over == "completed"
        verdict = rollouts[0].finish()
        assert (verdict.reward, rollouts[0].verdict, run.rollout(rollouts[0].rollout_id).verdict) == (
            1.0,
            verdict,
            verdict,
        )
        copy = pickle.loads(pickle.dumps(rollouts[1]))
        assert isinstance(copy, barchan.Rollout)
        assert copy.act([call_to("bash", command="echo hi")]).results[0].content == "hi"
        with pytest.raises(Conflict):
            rollouts[1].act([call_to("bash", command="echo hi")])
        group.cancel()
        assert copy.cancel("stale").cause == "cancelled_stale"
        assert run.lease_id.startswith("le_")
