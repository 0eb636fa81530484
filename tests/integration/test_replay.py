"""A rollout's operations carried out again on a real node: restored from a snapshot or the start, replayed whole."""

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import barchan
from barchan.model.verdict import Evidence
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.calls import ToolCall, call_to
from barchan.rollout.ports import NoLog
from barchan.rollout.replay.full import replay
from barchan.rollout.replay.logonly import LogOnly
from barchan.rollout.replay.operations import operations
from barchan.rollout.replay.restore import Restored, restored
from barchan.rollout.replay.snapshots import last_snapshot, snapshot_name
from barchan.rollout.sandboxes import Sandboxes, SandboxesState
from barchan.rollout.settings import RunSettings
from barchan.rollout.store import RunFolder, RunInfo
from barchan.rollout.task import Task
from barchan.sdk.aio.client import AsyncClient
from barchan.testing.faults.guests import inits
from barchan.trajectory.format import Entry, log_path
from barchan.trajectory.reader import load
from tests.integration.rollout_hacks import REFERENCE, TASK
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(120), pytest.mark.requires("root", "cgroup", "userns")]


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


def bash(command: str) -> ToolCall:
    return call_to("bash", command=command)


class Played:
    """A rollout that took turns, and what its log has by then."""

    def __init__(self, client: AsyncClient, folder: Path, task: Task = TASK, **settings: Any) -> None:
        self.client = client
        self.task = task
        run_id = f"replay-{uuid.uuid4().hex[:8]}"
        self.settings = RunSettings(run_id=run_id, template="debian", memory_mib=128, pids_max=64, **settings)
        info = RunInfo(run_id=run_id, task_set="t", policy="test", settings={}, barchan_version="0", started_unix_s=1.0)
        self.store = RunFolder.create(folder, info, [task])
        self.rollout_id = f"{run_id}-0"
        self.path = log_path(folder, self.rollout_id)
        job = Job(self.rollout_id, task, 0)
        self.rollout = Rollout(client, self.settings, job, policy_name="test", open_log=self.store.open_log)

    async def take(self, *turns: list[ToolCall]) -> None:
        await self.rollout.open()
        for calls in turns:
            await self.rollout.act(calls)

    @property
    def entries(self) -> list[Entry]:
        return load(self.path).entries

    async def lose_sandbox(self) -> None:
        sandbox_id = self.rollout.state.sandbox_id
        assert sandbox_id is not None
        await (await self.client.attach(sandbox_id)).kill()

    async def restored(self) -> Restored | Evidence:
        state = SandboxesState()
        state.ids["agent"].append("lost")
        made = Sandboxes(self.client, self.settings, self.rollout_id, state=state)
        return await restored(self.client, self.task, made, self.entries, log=NoLog(), policy_name="test")

    async def replayed(self, times: int = 1, **more: Any) -> Any:
        settings = replace(self.settings, run_id=f"again-{uuid.uuid4().hex[:8]}")
        named = {"rollout_id": self.rollout_id, "policy_name": "test"}
        return await replay(self.client, settings, self.task, self.entries, times=times, **named, **more)


@pytest.fixture
async def play(client: AsyncClient, tmp_path: Path) -> AsyncIterator[Callable[..., Played]]:
    """Makes rollouts that are over, their folders closed, after the test."""
    made: list[Played] = []

    def new(task: Task = TASK, **settings: Any) -> Played:
        made.append(Played(client, tmp_path / f"r{len(made)}", task, **settings))
        return made[-1]

    yield new
    for played in made:
        await played.rollout.cancel()
        with played.store:
            pass


STEADY = [
    [bash("cd /tmp; export WHO=me; mkdir -p d; echo one > d/a; pwd")],
    [bash('echo "$WHO $PWD"; cat d/a; false'), call_to("python", code="print(6 * 7)\nopen('p', 'w').write('x')")],
    [call_to("edit", command="create", path="/tmp/d/b", file_text="two\n"), bash("ls d; cat missing")],
]


async def test_the_start_and_every_operation_give_the_same_sandbox(play: Callable[..., Played]) -> None:
    """No snapshot: all is carried out again, each result is as before, and the shell knows what it knew."""
    played = play()
    await played.take(*STEADY)
    await played.lose_sandbox()
    found = await played.restored()
    assert isinstance(found, Restored), found
    try:
        assert (found.operations, found.snapshot) == (len(operations(played.entries)), "")
        shell = await found.sandbox.shell(point=found.shell)
        assert (await shell.run('echo "$WHO $PWD"; cat d/b')).stdout == b"me /tmp\ntwo\n"
    finally:
        await found.sandbox.kill()


@pytest.mark.requires("criu")
async def test_a_snapshot_with_memory_brings_the_shell_back(play: Callable[..., Played]) -> None:
    """What the shell drew at random before the snapshot is there again; only what came after is carried out again."""
    played = play(snapshot_every=2)
    await played.take([bash("X=$RANDOM$RANDOM; cd /tmp")], [bash("echo $X > x; cat x")], [bash("echo after; pwd")])
    taken = last_snapshot(played.entries)
    assert taken is not None
    assert taken.with_memory
    drawn = operations(played.entries)[1].outcome["stdout"]
    await played.lose_sandbox()
    found = await played.restored()
    assert isinstance(found, Restored), found
    try:
        assert (found.operations, found.snapshot) == (1, taken.snapshot_id)
        shell = await found.sandbox.shell(point=found.shell)
        assert (await shell.run("echo $X; cat x; pwd")).stdout == drawn + drawn + b"/tmp\n"
    finally:
        await found.sandbox.kill()


@pytest.mark.requires("criu")
async def test_snapshots_give_way_and_go_with_the_rollout(client: AsyncClient, play: Callable[..., Played]) -> None:
    """One at a time, found by its rollout; none is left when that is over."""
    played = play(snapshot_every=1)
    await played.take([bash("true")], [bash("true")])
    found = await client.snapshots(metadata={"rollout": played.rollout_id})
    assert [(item.name, item.kind) for item in found] == [(snapshot_name(played.rollout_id, 2), "memory")]
    await played.rollout.cancel()
    assert await client.snapshots(metadata={"rollout": played.rollout_id}) == []


@pytest.mark.parametrize(
    ("command", "fact", "says"),
    [
        ("head -c 8 /dev/urandom | od -An -tx1", "first divergence", "stdout"),
        ("sleep 30", "not repeatable", "time-out"),
    ],
)
async def test_what_comes_out_otherwise_is_not_restored(
    client: AsyncClient, play: Callable[..., Played], command: str, fact: str, says: str
) -> None:
    """Random output, and a command that its time-out ended: there is the reason, and no sandbox is left."""
    played = play(replace(TASK, limits=replace(TASK.limits, turns_max=9, call_s_max=1.0)))
    await played.take([bash("echo steady")], [bash(command)])
    await played.rollout.cancel()
    found = await played.restored()
    assert isinstance(found, Evidence)
    assert (found.source, found.fact) == ("replay", fact)
    assert says in str(found.value)
    assert await client.list(labels={"rollout": played.rollout_id, "role": "agent"}) == []


async def test_where_there_is_a_network_nothing_is_done_twice(client: AsyncClient, play: Callable[..., Played]) -> None:
    """A request may have changed something elsewhere: an agent with a network is not carried out again."""
    task = replace(TASK, environment=replace(TASK.environment, network="open"))
    played = play()
    await played.take([bash("echo hi")])
    await played.rollout.cancel()
    made = Sandboxes(client, played.settings, played.rollout_id, state=SandboxesState())
    found = await restored(client, task, made, played.entries, log=NoLog(), policy_name="test")
    assert found == Evidence(source="replay", fact="not repeatable", value="the sandbox has a network")
    assert made.state.ids["agent"] == []


async def test_a_replay_tells_what_is_steady_and_what_is_not(play: Callable[..., Played]) -> None:
    """Random bytes, the time and a process id differ, by themselves and for the reason that is given; all else not."""
    played = play()
    unsteady = [
        bash("head -c 8 /dev/urandom | od -An -tx1 | tr -d ' '"),
        bash("date +%Y-%m-%dT%H:%M:%S.%N"),
        bash("sh -c 'echo pid $$'; for i in 1 2 3; do true & wait; done"),
    ]
    await played.take(*STEADY, unsteady)
    await played.rollout.cancel()
    done = operations(played.entries)
    found = await played.replayed(times=2)
    assert found.operations == len(done)
    by_seq = {item.seq: item for item in found.differences}
    random, date = (by_seq[item.seq] for item in done[-3:-1])
    assert (random.why, random.members) == ("random", ("stdout",))
    assert date.why == "times"
    assert found.first == random
    assert {random.seq, date.seq} <= set(found.unstable)
    assert set(by_seq) <= {item.seq for item in done[-3:]}
    assert not found.is_equal
    assert found.equal == found.operations - len(found.differences)


async def test_a_steady_rollout_is_replayed_whole_from_the_command_line(
    node: NodeProcess, play: Callable[..., Played]
) -> None:
    """All equal, its artifact and the files of two replays too: exit code 0. A changed log: it says where, code 1."""
    played = play()
    folder = played.store.path
    await played.take(*STEADY, [call_to("submit", solution=REFERENCE)])
    await played.rollout.finish()
    played.store.add(played.rollout.row())
    command = [sys.executable, "-m", "barchan.cli", "trajectory", "replay", "--state-dir", str(node.state_dir)]

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout or done.stderr

    code, out = run(str(folder), "--rollout", played.rollout_id, "--times", "2", "--json")
    assert code == 0, out
    (report,) = json.loads(out)
    assert (report["share"], report["artifact"], report["files"]) == (1.0, "equal", "equal")
    assert report["files_digest"]
    code, out = run(str(played.path))
    assert (code, played.rollout_id in out) == (0, True)
    assert run(str(played.path), "--rollout", "x")[0] == 2
    answers = LogOnly(played.entries)
    for item in operations(played.entries):
        assert answers.answer(item.kind, item.args).seq == item.seq
    assert answers.left == 0


@pytest.mark.requires("criu")
async def test_a_rollout_goes_on_where_its_sandbox_is_lost(
    client: AsyncClient, node: NodeProcess, play: Callable[..., Played]
) -> None:
    """Its init is killed between two turns: the next is taken in a sandbox of the last snapshot, and it is scored."""
    played = play(snapshot_every=2)
    await played.take([bash("cd /tmp; X=$RANDOM")], [bash("echo $X > x; cat x")], [bash("echo 3 >> x")])
    lost = played.rollout.state.sandbox_id
    assert lost is not None
    for init in inits(node.watch, lost):
        init.send(signal.SIGKILL)
        init.close()
    seen = await played.rollout.act([bash('[ "$X" = "$(head -n 1 x)" ] && echo same; tail -n 1 x; pwd')])
    assert seen.over is None, played.rollout.verdict
    assert seen.results[0].content == "same\n3\n/tmp"
    assert played.rollout.state.sandbox_id != lost
    await played.rollout.act([call_to("submit", solution=REFERENCE)])
    verdict = await played.rollout.finish()
    assert (verdict.status, verdict.reward) == ("scored", 1.0)
    restores = [entry.body for entry in played.entries if entry.kind == "restore"]
    assert [body.get("equal", body.get("operations")) for body in restores] == [1, 1]
    assert await client.snapshots(metadata={"rollout": played.rollout_id}) == []
