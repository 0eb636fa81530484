"""Rollouts on a real node: the oracle is always one, the empty answer always zero, and no trick is paid."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import barchan
from barchan.rollout.calls import Observation, call_to
from barchan.rollout.graders import functions
from barchan.rollout.graders.functions import GradingLimits
from barchan.rollout.policies import NopPolicy, OraclePolicy, Policy, Step
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.store import read_rollouts
from barchan.rollout.task import Task
from barchan.rollout.tasksets import humaneval
from barchan.sdk.aio.client import AsyncClient
from tests.integration.rollout_hacks import HACKS, REFERENCE, TASK, THIEF
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns")]

LIMITS = GradingLimits(cpu_s=1, wall_s=6.0)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


class Says:
    """Answers every task with one text."""

    name = "says"

    def __init__(self, solution: str) -> None:
        self._solution = solution

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        return Step(tool_calls=(call_to("submit", solution=self._solution),), is_last=True)


async def run(
    client: AsyncClient, tasks: list[Task], policy: Policy, limits: GradingLimits = LIMITS
) -> list[RolloutRecord]:
    records: list[RolloutRecord] = []
    settings = RunSettings(
        run_id=f"test-{time.monotonic_ns()}", template="debian", concurrency=4, memory_mib=256, grading=limits
    )
    await Runner(client, tasks, policy, settings, records.append).run()
    return records


@pytest.mark.parametrize(("policy", "reward"), [(OraclePolicy(), 1.0), (NopPolicy(), 0.0)], ids=["oracle", "nop"])
async def test_every_published_task(client: AsyncClient, policy: Policy, reward: float) -> None:
    """All 164 known-good solutions are scored 1.0, all 164 empty ones 0.0, with every stage timed."""
    records = await run(client, humaneval.load(), policy, GradingLimits())
    assert [r.task_id for r in records if r.verdict.reward != reward] == []
    assert len(records) == 164
    for record in records:
        stages = (record.timings.create_ms, record.timings.exec_ms, record.timings.grade_ms, record.timings.ttfi_ms)
        assert all(spent is not None and spent > 0 for spent in stages)
        assert record.agent_sandbox_id not in record.grader_sandbox_ids


@pytest.mark.parametrize("name", HACKS)
async def test_a_trick_is_scored_zero(client: AsyncClient, name: str) -> None:
    """A hack is neither paid nor voided: it scores 0.0, for the cause that the evidence shows."""
    source, cause = HACKS[name]
    (record,) = await run(client, [TASK], Says(source))
    assert (record.verdict.status, record.verdict.reward) == ("scored", 0.0)
    # A bomb reaches whichever of its limits comes first on a busy machine.
    assert record.verdict.cause in (cause, *(["oom_within_limit"] if name == "is a fork bomb" else []))


async def test_an_honest_solution_beside_the_tricks_is_one(client: AsyncClient) -> None:
    """The task of the hacks is passed by its own reference, and by another way of writing it."""
    for source in (REFERENCE, "import os, sys\nprint('working')\ndouble = lambda x: x + x\n"):
        (record,) = await run(client, [TASK], Says(source))
        assert record.verdict.reward == 1.0


async def test_the_checkers_memory_is_out_of_reach(client: AsyncClient) -> None:
    """Code that reads the nonce from the checker's memory and forges a report is scored zero."""
    (record,) = await run(client, [TASK], Says(THIEF))
    assert (record.verdict.reward, record.verdict.cause) == (0.0, "completed")


async def test_it_is_the_other_user_that_protects_the_checker(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the protection off, the candidate as the checker's own user, the same code is paid."""
    monkeypatch.setattr(functions, "CANDIDATE_USER", functions.CHECKER_USER)
    (record,) = await run(client, [TASK], Says(THIEF))
    assert record.verdict.reward == 1.0


async def test_a_template_that_is_not_there_is_void(client: AsyncClient) -> None:
    """A missing image is nobody's zero."""
    records: list[RolloutRecord] = []
    settings = RunSettings(run_id="test", template="no-such-image")
    await Runner(client, [TASK], OraclePolicy(), settings, records.append).run()
    assert [(r.verdict.status, r.verdict.reward, r.verdict.cause) for r in records] == [("void", None, "image")]


def command(node: NodeProcess, *words: str) -> list[str]:
    return [sys.executable, "-m", "barchan.cli", "rollout", "humaneval", "--state-dir", str(node.state_dir), *words]


def test_the_command_prints_a_table_and_one_object(node: NodeProcess, tmp_path: Path) -> None:
    """`--json`: the last line of stdout holds the summary, and the folder one line per rollout."""
    words = ("--limit", "3", "--group", "2", "--out", str(tmp_path / "r"), "--json")
    done = subprocess.run(command(node, *words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    summary = json.loads(last)
    assert (summary["rollouts"], summary["scored"], summary["void"], summary["reward_mean"]) == (6, 6, 0, 1.0)
    assert summary["void_by_cause"] == {}
    assert 0 < summary["ttfi_ms"]["p50"] <= summary["ttfi_ms"]["p95"] <= summary["ttfi_ms"]["p99"]
    assert summary["groups"] == {"all_one": 3, "mixed": 0, "all_zero": 0, "void": 0}
    assert any("mean reward" in line for line in table)
    assert len(read_rollouts(tmp_path / "r")) == 6


def test_nothing_scored_is_a_failure(node: NodeProcess, tmp_path: Path) -> None:
    """With a model that is down every rollout is void, and the exit code is 1."""
    chat = ("--policy", "chat", "--base-url", "http://127.0.0.1:9", "--model", "m")
    words = ("--limit", "2", "--out", str(tmp_path / "r"), "--json", *chat)
    done = subprocess.run(command(node, *words), capture_output=True, text=True, check=False)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, summary["scored"], summary["void"]) == (1, 0, 2)
    assert (summary["reward_mean"], summary["void_by_cause"]) == (None, {"model_unreachable": 2})


def test_an_interrupt_keeps_what_is_finished(node: NodeProcess, tmp_path: Path) -> None:
    """Ctrl-C in the middle: exit code 130, every finished line kept, a summary, and no sandbox left."""
    words = ("--group", "16", "--concurrency", "4", "--out", str(tmp_path / "r"), "--json")
    process = subprocess.Popen(command(node, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = tmp_path / "r" / "rollouts.jsonl"
    deadline = time.monotonic() + 60
    while (not lines.exists() or lines.read_bytes().count(b"\n") < 10) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    summary = json.loads(stdout.splitlines()[-1])
    records = read_rollouts(tmp_path / "r")
    assert summary["scored"] >= 10
    assert summary["rollouts"] == len(records) == 2624 - summary["not_started"]
    assert [r.verdict.status for r in records].count("scored") == summary["scored"]
    assert summary["void"] == 0
    assert node.wait_empty(5.0) == []
