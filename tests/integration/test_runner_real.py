"""The runner on a real node: task sets, over-sampling, tries again, slow graders, and runs that were killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import barchan
from barchan.errors import ModelError
from barchan.rollout.calls import Observation
from barchan.rollout.policies import OraclePolicy, Policy, Step
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.store import artifact_path, read_rollouts
from barchan.rollout.task import PythonGrader, Task
from barchan.sdk.aio.client import AsyncClient
from barchan.trajectory.reader import verify
from tests.integration.runner_tasks import made
from tests.nodes import NodeProcess
from tests.stores import copy_base

pytestmark = [pytest.mark.timeout(300), pytest.mark.requires("root", "cgroup", "userns")]

TASKS = Path(__file__).parent / "runner_tasks.py"
DEADLINE_S = 120.0
LEASE_GRACE_S = 20.0  # of the run that is killed here: its lease's, and some


@pytest.fixture(scope="module")
def node(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with an image store of its own, for the images that runs build."""
    node = NodeProcess(tmp_path_factory.mktemp("node"), copy_base(images, tmp_path_factory.mktemp("store") / "images"))
    node.start()
    yield node
    assert node.wait_empty(LEASE_GRACE_S) == []
    assert node.end() == []


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


def runner_of(
    client: AsyncClient, tasks: list[Task], policy: Policy, records: list[RolloutRecord], **settings: Any
) -> Runner:
    given = {"run_id": f"test-{time.monotonic_ns()}", "template": "debian", "memory_mib": 128, "concurrency": 4}
    return Runner(client, tasks, policy, RunSettings(**{**given, **settings}), records.append)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so; the test's own time-out is the bound."""
    while not is_so():
        await asyncio.sleep(0.02)


async def test_surplus_members_are_ended_with_their_sandboxes(client: AsyncClient, node: NodeProcess) -> None:
    """Of five, the first three scored are kept; the two that would never end are cancelled, and nothing is left."""

    class Stuck:
        name = "stuck"

        async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
            if sample_index in (0, 2):
                await asyncio.Event().wait()
            return await OraclePolicy().step(task, sample_index, observation)

    records: list[RolloutRecord] = []
    await runner_of(client, [made(0)], Stuck(), records, group=3, over_sample=2, concurrency=5).run()
    assert {row.sample_index: row.verdict.cause for row in records} == {
        0: "cancelled_surplus",
        1: "completed",
        2: "cancelled_surplus",
        3: "completed",
        4: "completed",
    }
    assert [row.verdict.reward for row in records if row.verdict.status == "scored"] == [1.0] * 3
    assert await client.list(labels={"run": records[0].run_id}) == []


async def test_ended_sandboxes_and_a_model_that_is_down_are_tried_again(client: AsyncClient) -> None:
    """Each void try is followed by another in its place, until the group is full; all of them are recorded."""
    tries: Counter[int] = Counter()

    class Unlucky:
        name = "unlucky"

        async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
            if observation.turn == 0:
                tries[sample_index] += 1
                if sample_index == 1 and tries[1] == 1:
                    raise ModelError("overloaded", cause="model_refused")
                if sample_index == 2 and tries[2] <= 2:
                    rollout_id = f"{run_id}-000002" if tries[2] == 1 else f"{run_id}-000002-1"
                    assert await client.kill(labels={"rollout": rollout_id}) == 1
            return await OraclePolicy().step(task, sample_index, observation)

    run_id = f"test-{time.monotonic_ns()}"
    records: list[RolloutRecord] = []
    await runner_of(client, [made(0)], Unlucky(), records, run_id=run_id, group=3, refill=3).run()
    seen = sorted((row.sample_index, row.attempt, row.verdict.status, row.verdict.cause) for row in records)
    assert seen == [
        (0, 0, "scored", "completed"),
        (1, 0, "void", "model_refused"),
        (1, 1, "scored", "completed"),
        (2, 0, "void", "sandbox_expired"),
        (2, 1, "void", "sandbox_expired"),
        (2, 2, "scored", "completed"),
    ]


async def test_a_slow_grader_holds_no_agents_sandbox(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is graded, the agents' sandboxes end as ever, no more rollouts are opened than may wait, and the
    node holds none of the run's sandboxes.
    """
    go = asyncio.Event()

    async def slow(task: Task, artifact: object) -> float:
        await go.wait()
        return 1.0

    monkeypatch.setattr("barchan.rollout.graders.python.load_function", lambda name, what: slow)
    tasks = [made(number, grader=PythonGrader(function="mine:slow", timeout_s=1000.0)) for number in range(16)]
    records: list[RolloutRecord] = []
    run_id = f"test-{time.monotonic_ns()}"
    runner = runner_of(client, tasks, OraclePolicy(), records, run_id=run_id, concurrency=2, graders=1)
    running = asyncio.create_task(runner.run())
    await until(lambda: "0 at work, 1 wait for grading, 1 in grading" in runner.activity)
    assert await client.list(labels={"run": run_id}) == []
    assert records == []
    go.set()
    await running
    assert [row.verdict.reward for row in records] == [1.0] * 16
    assert max(row.timings.grade_queue_ms or 0.0 for row in records) > 0.0


def command(node: NodeProcess, *words: str) -> list[str]:
    return [sys.executable, "-m", "barchan.cli", *words, "--state-dir", str(node.state_dir)]


def done(node: NodeProcess, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(TASKS.parents[2])}
    return subprocess.run(command(node, *words), capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(("policy", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_a_set_of_ones_own(node: NodeProcess, tmp_path: Path, policy: str, reward: float) -> None:
    """A Python file gives tasks, some with environments that are built first; the oracle is 1, doing nothing is 0;
    the results are exported with advantages.
    """
    words = (str(TASKS), "--policy", policy, "--group", "3", "--over-sample", "1", "--out", str(tmp_path / "r"))
    run = done(node, "rollout", *words, "--json")
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert (summary["scored"], summary["void"], summary["surplus"], summary["reward_mean"]) == (12, 0, 4, reward)
    assert {row["task_id"]: (row["scored"], row["reward_mean"]) for row in summary["tasks"]} == {
        f"next-{number}": (3, reward) for number in range(4)
    }
    assert json.loads((tmp_path / "r" / "tasks.json").read_bytes()) == summary["tasks"]
    exported = done(node, "export", str(tmp_path / "r"), str(tmp_path / "rows.jsonl"))
    assert exported.returncode == 0, exported.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert Counter((row["mask"], row["informative"], row["advantage"]) for row in rows) == {
        (True, False, 0.0): 12,
        (False, False, 0.0): 4,
    }


def test_a_task_that_can_not_be_set_up_is_said_once(node: NodeProcess, tmp_path: Path) -> None:
    """Its rollouts are void by the task's fault, the others are scored."""
    words = ("tests.integration.runner_tasks:with_a_broken_one", "--group", "2", "--refill", "2")
    run = done(node, "rollout", *words, "--out", str(tmp_path / "r"), "--json")
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert (summary["scored"], summary["void_by_cause"]) == (6, {"task_invalid": 2})
    assert run.stderr.count("next-0 can't be set up") == 1
    assert "no luck" in run.stderr


def test_an_artifact_of_files_is_kept(node: NodeProcess, tmp_path: Path) -> None:
    """As a tar in the run's folder, beside the record that can't hold it."""
    run = done(node, "rollout", "tests.integration.runner_tasks:with_files", "--out", str(tmp_path / "r"))
    assert run.returncode == 0, run.stderr
    (record,) = read_rollouts(tmp_path / "r")
    assert (record.verdict.reward, record.artifact_kind, record.artifact) == (1.0, "files", None)
    with tarfile.open(artifact_path(tmp_path / "r", record.rollout_id)) as tar:
        (answer,) = [member for member in tar if member.isfile()]
        content = tar.extractfile(answer)
        assert content is not None and (answer.name.endswith("answer.txt"), content.read()) == (True, b"42\n")


def test_chosen_tasks_only(node: NodeProcess, tmp_path: Path) -> None:
    """`--task` takes tasks by their ids, in the set's order."""
    run = done(
        node, "rollout", str(TASKS), "--task", "next-3", "--task", "next-0", "--out", str(tmp_path / "r"), "--json"
    )
    assert run.returncode == 0, run.stderr
    assert [row["task_id"] for row in json.loads(run.stdout.splitlines()[-1])["tasks"]] == ["next-0", "next-3"]


def test_a_run_that_was_killed_goes_on(node: NodeProcess, tmp_path: Path) -> None:
    """After SIGKILL in the middle and `--resume`, every place of every group has exactly one score: what was scored is
    kept, what was under way goes on by its log, as the same attempt. Its lease has the priority that was asked for.
    """
    folder = tmp_path / "r"
    words = ("rollout", "humaneval", "--limit", "12", "--group", "4")
    process = subprocess.Popen(
        command(node, *words, "--concurrency", "3", "--priority", "5", "--out", str(folder)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lines, deadline = folder / "rollouts.jsonl", time.monotonic() + DEADLINE_S
    while (not lines.exists() or lines.read_bytes().count(b"\n") < 8) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [lease["priority"] for lease in node.request("GET", "/v1/leases") if lease["priority"]] == [5]
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    with lines.open("ab") as file:
        file.write(b'{"run_id": "cut sh')
    kept = read_rollouts(folder)
    logs = {path.name for path in (folder / "trajectories").iterdir()}
    # One killed between the head of its log and the first entry begins anew, as what had no log.
    begun = {path.name for path in (folder / "trajectories").iterdir() if path.read_bytes().count(b"\n") > 1}
    assert 8 <= len(kept) < 48

    other = done(node, *words[:-1], "5", "--resume", str(folder))
    assert (other.returncode, "its --group is 4, and 5 is asked" in other.stderr) == (2, True)
    run = done(node, *words, "--resume", str(folder), "--json")
    assert run.returncode == 0, run.stderr
    records = read_rollouts(folder)
    assert records[: len(kept)] == kept
    scores: defaultdict[tuple[str, int], list[RolloutRecord]] = defaultdict(list)
    for row in records:
        if row.verdict.status == "scored":
            scores[row.task_id, row.sample_index].append(row)
    assert len(scores) == 48
    assert {len(rows) for rows in scores.values()} == {1}
    assert {row.run_id for row in records} == {kept[0].run_id}
    unfinished = begun - {f"{row.rollout_id}.trajectory.jsonl" for row in kept}
    assert {row.attempt for row in records} == {0}
    assert logs <= {path.name for path in (folder / "trajectories").iterdir()}
    for row in records:
        assert verify(folder / "trajectories" / f"{row.rollout_id}.trajectory.jsonl", head_hash=row.head_hash).ok
    summary = json.loads(run.stdout.splitlines()[-1])
    assert (summary["scored"], summary["rollouts"], summary["not_started"]) == (48, 48, 0)
    assert summary["resumed"] == len(unfinished)
