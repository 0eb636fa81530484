"""Multi-turn rollouts on a real node: tools, limits, what a policy may break and may not, and a model server."""

import asyncio
import json
import re
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace

import barchan
from barchan.model.verdict import Verdict
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.calls import Observation, ToolCall, call_to
from barchan.rollout.limits import Limits
from barchan.rollout.policies import ChatPolicy, ChatSettings
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.store import RunFolder, RunInfo, read_rollouts
from barchan.rollout.task import Task
from barchan.rollout.tasksets import humaneval
from barchan.sdk.aio.client import AsyncClient
from barchan.trajectory.format import log_path
from barchan.trajectory.reader import load, verify
from tests.integration.rollout_hacks import REFERENCE, TASK
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(120), pytest.mark.requires("root", "cgroup", "userns")]

Handler = Callable[[dict[str, Any], int], Awaitable[web.StreamResponse]]


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


def limited(**limits: Any) -> Task:
    return replace(TASK, limits=Limits(**limits))


def settings() -> RunSettings:
    """Of a run of its own: an id used twice would find the first one's sandbox."""
    return RunSettings(run_id=f"tools-{uuid.uuid4().hex[:8]}", template="debian", memory_mib=128, pids_max=64)


@asynccontextmanager
async def rollout_on(client: AsyncClient, task: Task = TASK) -> AsyncIterator[Rollout]:
    run = settings()
    rollout = Rollout(client, run, Job(f"{run.run_id}-0", task, 0), policy_name="test")
    await rollout.open()
    try:
        yield rollout
    finally:
        await rollout.cancel()


def bash(command: str) -> ToolCall:
    return call_to("bash", command=command)


def edit(**arguments: Any) -> ToolCall:
    return call_to("edit", **arguments)


async def said(rollout: Rollout, *calls: ToolCall) -> list[tuple[str, str]]:
    """Status and content of each call of one turn."""
    return [(item.status, item.content) for item in (await rollout.act(calls)).results]


SCRIPT = [
    {"name": "bash", "arguments": {"command": "cd /tmp; export WHO=me; pwd"}},
    {"name": "bash", "arguments": {"command": 'echo "$WHO $PWD"; id -un; echo oops >&2; false'}},
    {"name": "edit", "arguments": {"command": "create", "path": "solution.py", "file_text": "WRONG"}},
    {"name": "python", "arguments": {"code": "print(open('solution.py').read())\nraise SystemExit(3)"}},
]


def test_a_scripted_rollout_edits_runs_and_submits(node: NodeProcess, tmp_path: Path) -> None:
    """From the command line: scripts of two tasks are played; right work is 1, wrong work 0, all on record."""
    first, second = humaneval.load()[:2]
    good = {"command": "str_replace", "path": "solution.py", "old_str": "WRONG", "new_str": first.grader.reference}
    scripts = {
        first.task_id: [*SCRIPT, {"name": "edit", "arguments": good}, {"name": "submit"}],
        second.task_id: [*SCRIPT, {"name": "submit"}],
    }
    (tmp_path / "scripts.json").write_text(json.dumps(scripts))
    words = ["--policy", "script", "--script", str(tmp_path / "scripts.json"), "--limit", "2", "--json"]
    command = [sys.executable, "-m", "barchan.cli", "rollout", "humaneval", "--state-dir", str(node.state_dir)]
    done = subprocess.run([*command, *words, "--out", str(tmp_path / "r")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["groups"] == {"all_one": 1, "mixed": 0, "all_zero": 1, "void": 0}
    assert (summary["turns"], summary["tool_calls"]["bash"], summary["malformed_calls"]) == (11, 4, 0)
    rows = {row.task_id: row for row in read_rollouts(tmp_path / "r")}
    right, wrong = rows[first.task_id], rows[second.task_id]
    assert (right.verdict.reward, wrong.verdict.reward) == (1.0, 0.0)
    assert (right.turns, right.tool_calls) == (6, {"bash": 2, "edit": 2, "python": 1, "submit": 1})
    assert (right.artifact, wrong.artifact) == (first.grader.reference, "WRONG")
    log = log_path(tmp_path / "r", right.rollout_id)
    assert verify(log).ok
    told = [
        entry.body["content"] for entry in load(log).entries if entry.kind == "tool_call" and entry.part == "result"
    ]
    assert told[:2] == ["/tmp", "me /tmp\nagent\n[stderr]\noops\n[exit code 1]"]
    assert told[3] == "WRONG\n[exit code 3]"


async def test_files_are_the_agents_own(client: AsyncClient) -> None:
    """The kernel's permission checks hold for the edit tool; its failures are told."""
    async with rollout_on(client) as rollout:
        results = await said(
            rollout,
            edit(command="view", path="/etc/passwd", view_range=[1, 1]),
            edit(command="create", path="/etc/passwd", file_text="x"),
            edit(command="create", path="deep/er/a.sh", file_text="#!/bin/sh\necho hi\n"),
            bash("chmod 755 deep/er/a.sh; ln -s er/a.sh deep/link; mkfifo pipe; stat -c %U deep/er/a.sh"),
            edit(command="str_replace", path="deep/link", old_str="hi", new_str="ho"),
            bash("deep/er/a.sh; test -L deep/link && echo still a link"),
            edit(command="view", path="deep"),
            edit(command="view", path="pipe"),
            edit(command="view", path="gone"),
        )
    assert [status for status, _ in results] == ["ok", "failed", "ok", "ok", "ok", "ok", "ok", "failed", "failed"]
    assert results[0][1].startswith("     1\troot:")
    assert results[3][1] == "agent"
    assert results[5][1] == "ho\nstill a link"
    assert results[6][1].split() == ["er/", "link", "->", "er/a.sh"]


async def test_long_outputs_keep_head_and_tail(client: AsyncClient) -> None:
    """From a shell and from a program: bounded, and what is missing is said."""
    task = limited(output_chars_max=200)
    async with rollout_on(client, task) as rollout:
        observation = await rollout.act(
            [
                bash("seq 1 1000"),
                bash("echo start; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end"),
                call_to("python", code="print('start', 'x' * 3_000_000, 'end')"),
            ]
        )
    for item, head, tail, missing in zip(
        observation.results,
        ("1\n2\n", "start", "start"),
        ("999\n1000", "end", "end"),
        ("characters", "more than", "2999"),
        strict=True,
    ):
        assert (item.status, item.truncated) == ("ok", True)
        assert item.content.startswith(head) and item.content.endswith(tail) and missing in item.content
        assert len(item.content) < 300


async def test_a_call_that_takes_too_long_is_told(client: AsyncClient) -> None:
    """Each tool's time-out is an observation; the shell and the rollout go on."""
    async with rollout_on(client, limited(call_s_max=1.0)) as rollout:
        await rollout.act([bash("X=1; cd /tmp")])
        results = await said(
            rollout,
            bash("echo before; sleep 60"),
            call_to("python", code="import time\nprint('before', flush=True)\ntime.sleep(60)"),
            bash('echo "$X $PWD"'),
        )
        assert [status for status, _ in results] == ["timed_out", "timed_out", "ok"]
        assert results[0][1].startswith("before\n")
        assert results[0][1].endswith("[timed out after 1 s; everything that ran in the shell was killed]")
        assert results[1][1].startswith("before\n[timed out after 1 s")
        assert results[2][1] == "1 /tmp"
        await rollout.act([call_to("submit", solution=REFERENCE)])
        assert (await rollout.finish()).reward == 1.0


async def finished(client: AsyncClient, task: Task, *turns: list[ToolCall]) -> tuple[Observation, Verdict]:
    async with rollout_on(client, task) as rollout:
        for calls in turns:
            await rollout.record(completion_tokens=10)
            observation = await rollout.act(calls)
        return observation, await rollout.finish()


WRITE_IT = edit(command="create", path="solution.py", file_text=REFERENCE)


@pytest.mark.parametrize(
    ("limits", "turns", "cause"),
    [
        ({"turns_max": 2}, [[WRITE_IT], [bash("true")]], "turn_limit"),
        ({"tokens_max": 20}, [[WRITE_IT], [bash("true")]], "context_limit"),
        ({"agent_s_max": 1.0}, [[WRITE_IT], [bash("sleep 60")]], "agent_timeout"),
        ({"agent_s_max": 1.0}, [[WRITE_IT], [call_to("python", code="while True: pass")]], "agent_timeout"),
    ],
    ids=["turns", "tokens", "agent time in a shell", "agent time in a program"],
)
async def test_each_limit_is_graded_and_truncated(
    client: AsyncClient, limits: dict[str, Any], turns: list[list[ToolCall]], cause: str
) -> None:
    """What the agent had written when it ran into the limit is graded."""
    observation, verdict = await finished(client, limited(**limits), *turns)
    assert observation.over == cause
    assert (verdict.status, verdict.reward, verdict.cause, verdict.truncated) == ("scored", 1.0, cause, True)
    assert any(item.source == "limits" for item in verdict.evidence)


NO_ARTIFACT = {
    "nothing": "true",
    "an empty file": ": > solution.py",
    "a directory": "mkdir solution.py",
    "a pipe": "mkfifo solution.py",
    "a link to nowhere": "ln -s nowhere solution.py",
    "a link to itself": "ln -s solution.py solution.py",
    "not readable": "echo x > solution.py; chmod 0 solution.py",
    "no home left": "cd /; rm -rf ~ 2>/dev/null; chmod 0 ~; true",
}


@pytest.mark.parametrize("command", NO_ARTIFACT.values(), ids=NO_ARTIFACT)
async def test_no_artifact_is_zero(client: AsyncClient, command: str) -> None:
    """Whatever the agent left in its place, the policy is scored, on evidence, and nothing is graded."""
    _, verdict = await finished(client, TASK, [bash(command), call_to("submit")])
    assert (verdict.status, verdict.reward, verdict.cause) == ("scored", 0.0, "completed")
    assert verdict.evidence[0].source.startswith("artifact")


BREAKERS = {
    "fork bomb": "f() { while :; do sleep 300 & done; }; f 2>/dev/null & sleep 0.5; true",
    "memory": "python3 -c 'x = bytearray(1 << 30); input()'",
    "kills its shell": "kill -9 $$",
    "kills all it can": "kill -9 -1",
    "stops its shell": "kill -STOP $$",
    "replaces its shell": "exec sleep 600",
    "closes the shell's input": "exec 0<&-",
    "closes the shell's descriptors": 'for fd in 0 1 2 8 9 $(ls /proc/$$/fd); do eval "exec $fd>&-"; done',
    "lets its shell write nothing": "ulimit -f 0; ulimit -n 3; ulimit -u 1",
    "hides its programs": "PATH=/nowhere; unset HOME; alias echo=false; printf() { exit 9; }; command() { exit 9; }",
    "fills its disk": "head -c 4G /dev/zero > big; true",
}


@pytest.mark.parametrize("command", BREAKERS.values(), ids=BREAKERS)
async def test_breaking_its_own_sandbox_is_never_void(client: AsyncClient, command: str) -> None:
    """The policy reads what happened, may go on as far as it can, and is scored for what it hands in."""
    turns = [[bash(command)], [bash("echo still here")], [call_to("python", code="print(1)"), call_to("submit")]]
    _, verdict = await finished(client, limited(call_s_max=3.0), *turns)
    assert (verdict.status, verdict.reward) == ("scored", 0.0)


async def test_malformed_calls_are_told_and_cost_only_their_turn(client: AsyncClient) -> None:
    """Unknown tools, broken JSON and wrong types are observations; the rollout is scored as if they had not been."""
    calls: list[dict[str, Any]] = [
        {"id": "a", "type": "function", "function": {"name": "fly", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls'}},
        {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": ["ls"]}'}},
        {"no": "call"},
    ]
    async with rollout_on(client) as rollout:
        observation = await rollout.act(calls)
        assert [item.status for item in observation.results] == ["malformed"] * 4
        await rollout.act([call_to("submit", solution=REFERENCE)])
        assert (await rollout.finish()).reward == 1.0
        assert rollout.row().malformed_calls == 4


@pytest.mark.parametrize("call", [bash("true"), call_to("python", code="1"), WRITE_IT, call_to("submit")], ids=repr)
async def test_a_sandbox_killed_in_mid_rollout_is_void(client: AsyncClient, call: ToolCall) -> None:
    """Killed from outside between two turns, whatever the policy does next: void, by the platform's fault."""
    async with rollout_on(client) as rollout:
        await rollout.act([bash("true")])
        await client.kill(labels={"rollout": rollout.rollout_id})
        observation = await rollout.act([call])
        verdict = await rollout.finish()
        assert (verdict.status, verdict.reward, verdict.fault) == ("void", None, "platform")
        assert verdict.cause in ("sandbox_expired", "sandbox_lost")
        assert observation.over == verdict.cause


async def test_a_sandbox_killed_during_a_call_is_void(client: AsyncClient) -> None:
    """A command that is cut off by the end of its sandbox is no exit code of the policy's."""
    async with rollout_on(client) as rollout:
        acting = asyncio.create_task(rollout.act([bash("sleep 60")]))
        await asyncio.sleep(0.5)
        await client.kill(labels={"rollout": rollout.rollout_id})
        assert (await acting).over is not None
        verdict = await rollout.finish()
        assert (verdict.status, verdict.fault) == ("void", "platform")


# a model server


def reply(content: str | None = None, *calls: ToolCall, finish: str = "stop", tokens: int = 7) -> web.Response:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [call.as_message for call in calls]
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return web.json_response({"model": "mock", "choices": [choice], "usage": {"completion_tokens": tokens}})


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    bodies: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await handler(bodies[-1], len(bodies) - 1)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies
    finally:
        await runner.cleanup()


async def chatted(client: AsyncClient, base_url: str, task: Task, out: Path, **options: Any) -> RolloutRecord:
    """One rollout of the chat policy, logged."""
    records: list[RolloutRecord] = []
    fast: dict[str, Any] = {"wait_s_first": 0.01, "wait_s_max": 0.05, "attempts_max": 3, **options}
    async with aiohttp.ClientSession() as session:
        policy = ChatPolicy(session, ChatSettings(base_url=base_url, model="mock", **fast))
        info = RunInfo(
            run_id="tools", task_set="one", policy="chat", settings={}, barchan_version="0", started_unix_s=0.0
        )
        with RunFolder.create(out, info, [task]) as folder:
            await Runner(client, [task], policy, settings(), records.append, open_log=folder.open_log).run()
    (record,) = records
    assert verify(log_path(out, record.rollout_id)).ok
    return record


async def test_a_model_that_uses_tools_is_scored(client: AsyncClient, tmp_path: Path) -> None:
    """It edits, runs, reads the result, repairs, survives a malformed call and a 500, and submits."""
    turns = [
        reply("Let me look.", bash("ls -a"), tokens=5),
        web.Response(status=500),
        reply(None, edit(command="create", path="solution.py", file_text="def double(x):\n    return 3 * x\n")),
        reply(None, ToolCall(name="python", arguments="{code: 1}")),
        reply(None, call_to("python", code="import solution\nprint(solution.double(4))")),
        reply("Now I know."),
        reply(None, edit(command="str_replace", path="solution.py", old_str="3", new_str="2"), call_to("submit")),
    ]
    async with serving(lambda body, before: asyncio.sleep(0, turns[before])) as (base_url, bodies):
        record = await chatted(client, base_url, TASK, tmp_path)
    assert (record.verdict.reward, record.verdict.cause) == (1.0, "completed")
    assert (record.turns, record.malformed_calls, record.completion_tokens) == (6, 1, 40)
    assert record.tool_calls == {"bash": 1, "edit": 2, "python": 2, "submit": 1}
    assert [completion.requests for completion in record.completions] == [1, 2, 1, 1, 1, 1]
    conversation = bodies[-1]["messages"]
    assert [message["role"] for message in conversation[:3]] == ["user", "assistant", "tool"]
    assert next(message["content"] for message in conversation if message["content"] == "12")
    kinds = [entry.kind for entry in load(log_path(tmp_path, record.rollout_id)).entries if entry.part != "result"]
    assert (kinds.count("model_call"), kinds.count("tool_call"), kinds.count("file_write")) == (6, 6, 2)


async def test_a_model_that_never_calls_a_tool_is_graded_by_its_code(client: AsyncClient, tmp_path: Path) -> None:
    """Fenced code in its first turn is the attempt."""
    async with serving(lambda body, before: asyncio.sleep(0, reply(f"```python\n{REFERENCE}```"))) as (url, _):
        record = await chatted(client, url, TASK, tmp_path)
    assert (record.verdict.reward, record.turns, record.tool_calls) == (1.0, 1, {"submit": 1})


async def test_a_model_that_only_talks_after_a_call_runs_out_of_turns(client: AsyncClient, tmp_path: Path) -> None:
    """Words are told to be no action; the turn limit ends it, scored."""
    async with serving(lambda body, before: asyncio.sleep(0, reply("Hm.", *([bash("ls")] if before == 0 else [])))) as (
        url,
        bodies,
    ):
        record = await chatted(client, url, limited(turns_max=4), tmp_path)
    assert (record.verdict.reward, record.verdict.cause, record.verdict.truncated) == (0.0, "turn_limit", True)
    assert len(bodies) == 4


async def test_the_tokens_left_bound_each_request(client: AsyncClient, tmp_path: Path) -> None:
    """The server is never asked for more than the task still allows, and reaching it is the context's limit."""
    async with serving(lambda body, before: asyncio.sleep(0, reply(None, bash("true"), tokens=40))) as (url, bodies):
        record = await chatted(client, url, limited(tokens_max=100), tmp_path)
    assert [body["max_tokens"] for body in bodies] == [100, 60, 20]
    assert (record.verdict.cause, record.verdict.truncated) == ("context_limit", True)


async def _garbage() -> web.StreamResponse:
    return web.Response(text="<html>")


async def _down() -> web.StreamResponse:
    return web.Response(status=500)


async def _hang() -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError("not reached")


async def _refuse() -> web.StreamResponse:
    return web.Response(status=401)


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (_garbage, "model_garbage"),
        (_down, "model_unreachable"),
        (_hang, "model_timeout"),
        (_refuse, "model_refused"),
    ],
)
async def test_a_model_server_that_fails_in_mid_rollout_is_no_zero(
    client: AsyncClient, tmp_path: Path, failure: Callable[[], Awaitable[web.StreamResponse]], cause: str
) -> None:
    """After a good first turn the server fails for good: void by the model's fault, and the sandbox is ended."""

    async def handler(body: dict[str, Any], before: int) -> web.StreamResponse:
        return reply(None, WRITE_IT) if before == 0 else await failure()

    async with serving(handler) as (url, _):
        record = await chatted(client, url, TASK, tmp_path, request_timeout_s=0.5)
    verdict = record.verdict
    assert (verdict.status, verdict.reward, verdict.fault, verdict.cause) == ("void", None, "model", cause)
    assert record.turns == 1
    assert await client.list(labels={"rollout": record.rollout_id}) == []


async def test_a_full_context_is_scored_as_it_stands(client: AsyncClient, tmp_path: Path) -> None:
    """A conversation too long for the model ends the attempt; what it had written counts."""
    full = web.json_response({"error": {"code": "context_length_exceeded"}}, status=400)
    async with serving(lambda body, before: asyncio.sleep(0, reply(None, WRITE_IT) if before == 0 else full)) as (
        url,
        _,
    ):
        record = await chatted(client, url, TASK, tmp_path)
    assert (record.verdict.reward, record.verdict.cause, record.verdict.truncated) == (1.0, "context_limit", True)


OWN_POLICY = """
from barchan.rollout.calls import call_to
from barchan.rollout.policies import Step


class Half:
    name = "half"

    async def step(self, task, sample_index, observation):
        if sample_index == 0:
            raise RuntimeError("no idea")
        return Step(tool_calls=(call_to("submit", solution=task.grader.reference),), is_last=True)
"""


def test_a_policy_of_the_users_own(node: NodeProcess, tmp_path: Path) -> None:
    """`--policy module:Class` finds it in the current directory; where it raises, that rollout alone is void."""
    (tmp_path / "mine.py").write_text(OWN_POLICY)
    words = ["--policy", "mine:Half", "--limit", "1", "--group", "2", "--json", "--out", "r"]
    command = [sys.executable, "-m", "barchan.cli", "rollout", "humaneval", "--state-dir", str(node.state_dir), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    verdicts = {row.sample_index: row.verdict for row in read_rollouts(tmp_path / "r")}
    assert (verdicts[0].status, verdicts[0].fault, verdicts[0].reward) == ("void", "caller", None)
    assert verdicts[1].reward == 1.0


PAGE = Path(__file__).parents[2] / "docs/rollouts.md"


def test_the_examples_of_the_page_run(node: NodeProcess, tmp_path: Path) -> None:
    """The programs of docs/rollouts.md do what they say there."""
    policy, trainer, by_hand, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(policy)
    (tmp_path / "hand.py").write_text(
        by_hand.replace("connect_async()", f"connect_async(state_dir={str(node.state_dir)!r})")
    )
    words = ["--policy", "mine:Policy", "--limit", "1", "--out", "r", "--state-dir", str(node.state_dir), "--json"]
    run = [sys.executable, "-m", "barchan.cli", "rollout", "humaneval", *words]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["turns"] == 2
    (tmp_path / "trainer.py").write_text(trainer.replace("runs/a", "r"))
    done = subprocess.run([sys.executable, "trainer.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[1.0] [0.0] [False] [False]\n")
    done = subprocess.run([sys.executable, "hand.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "completed scored 1.0"
