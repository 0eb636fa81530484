"""Rollouts on a real node that are graded by a function with a sandbox, and by a judge."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import barchan
from barchan.rollout.calls import call_to
from barchan.rollout.graders.base import Artifact
from barchan.rollout.policies import OraclePolicy, Policy, ScriptPolicy
from barchan.rollout.ports import Sandbox
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.store import RunFolder, RunInfo
from barchan.rollout.task import FileArtifact, FilesArtifact, JudgeGrader, PythonGrader, Task
from barchan.sdk.aio.client import AsyncClient
from barchan.trajectory.atif import atif
from barchan.trajectory.format import log_files
from barchan.trajectory.reader import load
from barchan.trajectory.story import account
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns")]

ORACLE = (call_to("bash", command="mkdir out && echo 42 >out/a.txt && rm -f absent"), call_to("submit"))


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


async def played(client: AsyncClient, task: Task, folder: Path, policy: Policy | None = None) -> RolloutRecord:
    """The oracle's rollout of a task, or another policy's, with its log in a run's folder."""
    info = RunInfo(
        run_id=f"kinds-{time.monotonic_ns()}",
        task_set="kinds",
        policy="oracle",
        settings={},
        barchan_version="0",
        started_unix_s=0.0,
    )
    records: list[RolloutRecord] = []
    settings = RunSettings(run_id=info.run_id, template="debian", memory_mib=256)
    with RunFolder.create(folder, info, [task]) as store:
        await Runner(client, [task], policy or OraclePolicy(), settings, records.append, open_log=store.open_log).run()
    (record,) = records
    return record


async def counts(task: Task, artifact: Artifact, sandbox: Sandbox) -> dict[str, float]:
    """Looks where the agent had its files, and runs something beside them."""
    data = await sandbox.files.read("/home/agent/out/a.txt")
    lines = (await sandbox.exec("wc -l </home/agent/out/a.txt")).check()
    return {"reward": float(data) / 42, "lines": float(lines.text)}


async def test_a_function_in_a_sandbox(client: AsyncClient, tmp_path: Path) -> None:
    """It finds the artifact in place, in a sandbox that is not the agent's."""
    task = Task(
        task_id="t",
        instruction="Do it.",
        artifact=FilesArtifact(paths=("/home/agent/out",)),
        grader=PythonGrader(function=f"{__name__}:counts", sandbox=True),
        oracle=ORACLE,
    )
    record = await played(client, task, tmp_path / "run")
    verdict = record.verdict
    assert (verdict.reward, verdict.metrics, verdict.exposed) == (1.0, {"lines": 1.0}, False), verdict
    assert len(record.grader_sandbox_ids) == 1
    assert record.agent_sandbox_id not in record.grader_sandbox_ids


def is_42(task: Task, artifact: Artifact) -> bool:
    """Raises for what is no number."""
    return float(artifact.data) == 42


async def test_making_the_function_fail_buys_no_void(client: AsyncClient, tmp_path: Path) -> None:
    """The oracle's artifact is graded as the control; what alone makes the function raise scores 0."""
    task = Task(
        task_id="t",
        instruction="Write 42.",
        artifact=FileArtifact(path="out/a.txt"),
        grader=PythonGrader(function=f"{__name__}:is_42"),
        oracle=ORACLE,
    )
    words = ScriptPolicy({"": (call_to("bash", command="mkdir out && echo forty-two >out/a.txt"), call_to("submit"))})
    verdict = (await played(client, task, tmp_path / "words", words)).verdict
    assert (verdict.status, verdict.reward, verdict.cause) == ("scored", 0.0, "guest_wrecked"), verdict
    assert (await played(client, task, tmp_path / "oracle")).verdict.reward == 1.0


async def test_a_judges_calls_are_no_turns(client: AsyncClient, tmp_path: Path) -> None:
    """They are in the rollout's log with what was asked and said, and in no account of the policy."""
    asked: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(await request.json())
        message = {"role": "assistant", "content": "Good. Score: 8"}
        usage = {"prompt_tokens": 50, "completion_tokens": 5}
        return web.json_response({"choices": [{"index": 0, "message": message}], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        task = Task(
            task_id="t",
            instruction="Write 42.",
            artifact=FileArtifact(path="out/a.txt"),
            grader=JudgeGrader(
                prompt="{instruction} {artifact}",
                base_url=f"http://127.0.0.1:{runner.addresses[0][1]}",
                model="judge",
                samples=3,
            ),
            oracle=ORACLE,
        )
        record = await played(client, task, tmp_path / "run")
    finally:
        await runner.cleanup()
    assert (record.verdict.reward, record.verdict.metrics["judge_tokens"]) == (0.8, 15.0), record.verdict
    assert "\n42\n" in asked[0]["messages"][0]["content"]
    assert (len(asked), record.completion_tokens, record.grader_sandbox_ids) == (3, 0, ())
    (path,) = log_files(tmp_path / "run")
    log = load(path)
    calls = [entry.body for entry in log.entries if entry.kind == "model_call"]
    assert [(call["score"], call["text"]) for call in calls] == [(8.0, "Good. Score: 8")] * 3
    (note,) = [entry.body for entry in log.entries if entry.kind == "note"]
    assert note == {"judge": "judge", "prompt": asked[0]["messages"][0]["content"]}
    told = account(log)
    assert (told.turns, told.prompt_tokens, told.completion_tokens, told.reward) == (record.turns, 0, 0, 0.8)
    agents = [step for step in atif(log)["steps"] if step["source"] == "agent"]
    assert all("Score" not in str(step.get("message")) for step in agents)
