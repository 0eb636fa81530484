"""Rollouts graded by scripts on a real node: where the reward comes from, and what a trick is worth."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import barchan
from barchan.model.verdict import Verdict
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.calls import ToolCall, call_to
from barchan.rollout.pipeline import GradingPipeline
from barchan.rollout.record import RolloutRecord
from barchan.rollout.rules.control import quarantined
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import (
    ArtifactSpec,
    DiffArtifact,
    Environment,
    FileArtifact,
    FilesArtifact,
    ScriptGrader,
    Service,
    SharedArtifact,
    Task,
)
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.recipe import Put
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns")]

REWARD = "/logs/verifier/reward.txt"
RUNS_IT = f'test "$(python3 solution.py)" = 42 && echo 1 >{REWARD} || echo 0 >{REWARD}'
ORACLE = (call_to("submit", solution="print(42)\n"),)
_runs = itertools.count()


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


def settings(**fields: Any) -> RunSettings:
    run_id = f"grading-{time.monotonic_ns()}-{next(_runs)}"
    return RunSettings(run_id=run_id, template="debian", memory_mib=256, **fields)


def a_task(command: str = RUNS_IT, artifact: ArtifactSpec = FileArtifact(), **fields: Any) -> Task:  # noqa: B008
    grader = {name: fields.pop(name) for name in tuple(fields) if name in ScriptGrader.__struct_fields__}
    spec = ScriptGrader(command=command, **{"timeout_s": 30.0, "cwd": "/home/agent", **grader})
    return Task(task_id="t", instruction="Do it.", grader=spec, artifact=artifact, **fields)


def bash(command: str) -> ToolCall:
    return call_to("bash", command=command)


async def attempt(
    client: AsyncClient,
    task: Task,
    calls: Sequence[ToolCall],
    given: RunSettings | None = None,
    pipeline: GradingPipeline | None = None,
) -> RolloutRecord:
    """One rollout that makes these calls in one turn."""
    given = given or settings()
    job = Job(f"{given.run_id}-{next(_runs)}", task, 0)
    rollout = Rollout(client, given, job, policy_name="script", pipeline=pipeline)
    await rollout.open()
    if rollout.verdict is None:
        await rollout.act(calls)
    await rollout.finish()
    return rollout.row()


def facts(verdict: Verdict, source: str) -> dict[str, object]:
    return {item.fact: item.value for item in verdict.evidence if item.source == source}


async def images(client: AsyncClient, text: str) -> list[str]:
    return [image.name for image in await client.images() if text in image.name]


async def test_a_script_gives_the_reward(client: AsyncClient) -> None:
    """What it writes is the reward, whatever it exits with; its exit code and output are evidence."""
    for solution, reward in (("print(42)", 1.0), ("print(41)", 0.0), ("raise SystemExit(0)", 0.0)):
        row = await attempt(client, a_task(f"{RUNS_IT}; echo done; exit 7"), [call_to("submit", solution=solution)])
        verdict = row.verdict
        assert (verdict.status, verdict.reward, verdict.cause, verdict.exposed) == ("scored", reward, "completed", True)
        assert facts(verdict, "grader's command") == {"exit_code": 7, "output": "done"}
        assert (row.artifact, row.artifact_kind) == (solution, "file")
        assert row.agent_sandbox_id not in row.grader_sandbox_ids


async def test_json_counts_before_text_and_brings_metrics(client: AsyncClient) -> None:
    """Both may be there, rewards may be on a scale of their own, and the other numbers are metrics."""
    command = f"""echo 0 >{REWARD}; echo '{{"reward": 12.5, "passed": 3}}' >/logs/verifier/reward.json"""
    row = await attempt(client, a_task(command), ORACLE)
    assert (row.verdict.reward, row.verdict.metrics) == (12.5, {"passed": 3.0})


async def test_the_graders_files_are_its_own(client: AsyncClient, tmp_path: Path) -> None:
    """They are there when the command runs, the agent never saw them, and another user can't look into them."""
    folder = tmp_path / "tests"
    (folder / "data").mkdir(parents=True)
    (folder / "test.sh").write_text(
        f"cat /tests/data/answer /tests/extra | grep -q 42.7 && test -x /tests/test.sh && echo 1 >{REWARD}\n"
        "stat -c %a /tests\n"
    )
    (folder / "test.sh").chmod(0o755)
    (folder / "data" / "answer").write_text("42")
    files = (Put(path="/tests", source=str(folder)), Put(path="/tests/extra", data=b"x7"))
    row = await attempt(
        client, a_task("/tests/test.sh", files=files), [bash("ls /tests && cp -r /tests . ; echo 1 >solution.py")]
    )
    assert (row.verdict.reward, facts(row.verdict, "grader's command")["output"]) == (1.0, "700")


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("true", "reward_missing"),
        (f": >{REWARD}", "reward_missing"),
        (f"echo one >{REWARD}", "reward_malformed"),
        (f"echo nan >{REWARD}", "reward_malformed"),
        (f"ln -s /etc/hostname {REWARD}", "reward_malformed"),
        (f"mkfifo {REWARD}", "reward_malformed"),
        (f"mkdir {REWARD}", "reward_malformed"),
        (f"head -c 70000 /dev/zero >{REWARD}", "reward_malformed"),
        (f"truncate -s 1T {REWARD}", "reward_malformed"),
        (f"echo 1 >{REWARD}; sleep 600", "grader_timeout"),
    ],
)
async def test_no_reward_is_void_where_nothing_can_be_compared(client: AsyncClient, command: str, cause: str) -> None:
    """Missing, empty, odd or too late; without an oracle there is no control, and the verdict says so."""
    row = await attempt(client, a_task(command, timeout_s=2.0), ORACLE)
    verdict = row.verdict
    assert (verdict.status, verdict.fault, verdict.cause, verdict.exposed) == ("void", "task", cause, True)
    assert facts(verdict, "control")["known-good artifact"] == "none"
    assert quarantined(verdict)


@pytest.mark.parametrize(
    ("solution", "cause"),
    [
        ("while True: pass", "exec_timeout"),
        ("import time; time.sleep(600)", "exec_timeout"),
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "guest_wrecked"),
        (f"import os, signal; open('{REWARD}', 'w').write('1'); os.kill(0, signal.SIGSTOP)", "exec_timeout"),
        (
            "import os, signal\nif os.fork(): os.kill(os.getppid(), signal.SIGKILL); os._exit(0)\nos.setsid()\n"
            "while True:\n for n in os.listdir('/proc'):\n  if n.isdigit() and int(n) != os.getpid():\n"
            "   try: os.kill(int(n), signal.SIGSTOP)\n   except OSError: pass",
            "guest_wrecked",
        ),
        ("import os\nwhile True: os.write(2, b'x' * 65536)", "exec_timeout"),
        (
            "import os, signal\nif os.fork(): os.kill(os.getppid(), signal.SIGKILL)\n"
            "keep = []\nwhile True: keep.append(bytearray(16 << 20))",
            "guest_wrecked",
        ),
    ],
)
async def test_a_submission_buys_no_void(client: AsyncClient, solution: str, cause: str) -> None:
    """One that hangs, stops, floods or kills its grader scores 0 where the oracle's artifact is graded well."""
    row = await attempt(client, a_task(timeout_s=4.0, oracle=ORACLE), [call_to("submit", solution=solution)])
    verdict = row.verdict
    assert (verdict.status, verdict.reward) == ("scored", 0.0)
    assert verdict.cause in (cause, "oom_within_limit") if cause == "guest_wrecked" else verdict.cause == cause
    assert facts(verdict, "control") == {"known-good artifact": "good"}


async def test_an_oracle_that_is_no_better_is_the_tasks_fault(client: AsyncClient) -> None:
    """Where what is known to be good gets 0, or no reward, hanging proves nothing."""
    hangs = [call_to("submit", solution="while True: pass")]
    wrong = await attempt(client, a_task(timeout_s=2.0, oracle=(call_to("submit", solution="print(1)"),)), hangs)
    assert (wrong.verdict.status, wrong.verdict.fault, wrong.verdict.cause) == ("void", "task", "grader_timeout")
    row = await attempt(client, a_task("sleep 600", timeout_s=2.0, oracle=ORACLE), hangs)
    assert (row.verdict.status, row.verdict.fault, row.verdict.cause) == ("void", "platform", "grader_timeout")


async def test_a_control_is_made_once_for_a_task(client: AsyncClient) -> None:
    """Two that hang: the first is graded twice beside the oracle's play and grading, the second only twice."""
    hangs = [call_to("submit", solution="while True: pass")]
    task, given = a_task(timeout_s=3.0, oracle=ORACLE), settings()
    async with GradingPipeline(client, given, workers=1, waiting_max=1) as pipeline:
        rows = [await attempt(client, task, hangs, given, pipeline) for _ in range(2)]
    assert [row.verdict.reward for row in rows] == [0.0, 0.0]
    assert [len(row.grader_sandbox_ids) for row in rows] == [4, 2]


ROOT = Environment(user="root", workdir="/root")
FORGED = f"mkdir -p /logs/verifier && echo 1 >{REWARD} && echo '{{\"reward\": 1}}' >/logs/verifier/reward.json"
DONE = f"test -f /root/done && echo 1 >{REWARD}; true"


@pytest.mark.parametrize(
    "forged", [FORGED, "mkdir -p /logs && ln -s /root /logs/verifier && echo 1 >/root/reward.txt", "echo >/logs"]
)
async def test_an_early_reward_is_worth_nothing(client: AsyncClient, forged: str) -> None:
    """A reward that came with the artifact is removed before the grader runs; here it then gives none, and the control
    shows whose doing that is.
    """
    task = a_task(DONE, DiffArtifact(), cwd="/", environment=ROOT, oracle=(bash("touch /root/done"),))
    row = await attempt(client, task, [bash(forged)])
    assert (row.verdict.status, row.verdict.reward, row.verdict.cause) == ("scored", 0.0, "guest_wrecked")


async def test_a_diff_is_all_that_was_written(client: AsyncClient) -> None:
    """The grader sees what the agent wrote and removed anywhere, and none of its processes; the image is gone at the
    end, unless the run keeps it.
    """
    command = f"test -f /root/done -a ! -e /etc/hostname && ! pgrep sleep && echo 1 >{REWARD}"
    task = a_task(command, DiffArtifact(), cwd="/", environment=ROOT)
    deeds = [bash("touch /root/done; rm /etc/hostname; (setsid sleep 1000 >/dev/null 2>&1 &)")]
    for keeps in (False, True):
        given = settings(keep_images=keeps)
        row = await attempt(client, task, deeds, given)
        assert (row.verdict.status, row.verdict.reward, row.verdict.exposed) == ("scored", 1.0, True)
        assert row.artifact_kind == "diff"
        assert row.artifact is not None
        assert await images(client, given.run_id) == ([row.artifact] if keeps else [])
        if keeps:
            await client.remove_image(row.artifact)


async def test_a_diff_that_is_given_up_leaves_no_image(client: AsyncClient) -> None:
    """Cancelled between handing in and grading."""
    given = settings()
    task = a_task(DONE, DiffArtifact(), cwd="/", environment=ROOT)
    rollout = Rollout(client, given, Job(f"{given.run_id}-0", task, 0), policy_name="script")
    await rollout.open()
    await rollout.act([bash("touch /root/done")])
    await rollout.hand_in()
    assert len(await images(client, given.run_id)) == 1
    await rollout.cancel("stale")
    assert await images(client, given.run_id) == []


async def test_files_are_graded_where_they_were(client: AsyncClient) -> None:
    """What is missing is evidence, and the rest is judged."""
    command = f"test $(cat out/a)$(cat out/link) = 11 -a ! -e out/old && echo 1 >{REWARD} || echo 0 >{REWARD}"
    task = a_task(command, FilesArtifact(paths=("out", "nothing")))
    row = await attempt(client, task, [bash("mkdir out; echo 1 >out/a; ln -s a out/link")])
    assert (row.verdict.reward, row.artifact, row.artifact_kind) == (1.0, None, "files")
    assert facts(row.verdict, "artifact") == {"missing": "nothing"}


async def test_shared_grading_sees_live_processes(client: AsyncClient) -> None:
    """The grader runs beside the agent's server, in the same sandbox, which ends afterwards."""
    fetch = "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8000/x\")'"
    task = a_task(f"{fetch} && echo 1 >{REWARD} || echo 0 >{REWARD}", SharedArtifact(), environment=ROOT, cwd="/")
    serve = bash(
        "echo 1 >x; (python3 -m http.server >/dev/null 2>&1 &); for n in $(seq 99); do sleep 0.1; "
        "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))' 2>/dev/null && break; done"
    )
    row = await attempt(client, task, [serve])
    assert (row.verdict.status, row.verdict.reward, row.verdict.exposed) == ("scored", 1.0, True)
    assert (row.grader_sandbox_ids, row.artifact_kind) == ((), "shared")
    nothing = await attempt(client, task, [bash("true")])
    assert nothing.verdict.reward == 0.0
    assert await client.list(labels={"run": row.run_id}) == []


SERVER = Service(
    name="web", command="mkdir -p /srv/w; cd /srv/w; echo 42 >x; exec python3 -m http.server 8001", port=8001
)
FETCH = "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:8001/x\").read().decode())'"


async def test_services_are_there_for_the_agent_and_the_grader(client: AsyncClient) -> None:
    """Each sandbox has its own; the grader's only where it asks for them."""
    environment = Environment(services=(SERVER,))
    for services, reward in ((True, 1.0), (False, 0.0)):
        command = f'test $(cat solution.py) = 42 -a "$({FETCH})" = 42 && echo 1 >{REWARD} || echo 0 >{REWARD}'
        task = a_task(command, environment=environment, services=services)
        row = await attempt(client, task, [bash(f"{FETCH} >solution.py")])
        assert row.verdict.reward == reward
        assert (row.artifact or "").strip() == "42"
        assert row.timings.setup_ms is not None


async def test_a_service_that_never_comes_up_is_the_tasks_fault(client: AsyncClient) -> None:
    """Void before the policy has acted, with what the service wrote."""
    bad = Service(name="db", command="echo no license; exit 4", port=5432)
    row = await attempt(client, a_task(environment=Environment(services=(bad,))), ORACLE)
    assert (row.verdict.status, row.verdict.fault, row.verdict.cause) == ("void", "task", "service_not_ready")
    assert (facts(row.verdict, "task"), row.turns) == ({"output": "no license"}, 0)


async def test_breaking_the_graders_service_is_zero(client: AsyncClient) -> None:
    """An agent whose diff keeps the service from starting where it is graded has broken it by itself."""
    service = replace(SERVER, command="exec /usr/local/bin/serve", port=None, ready="test -e /tmp/up")
    make = (
        "mkdir -p /usr/local/bin; cd /usr/local/bin; test -e serve || "
        "{ printf '#!/bin/sh\\ntouch /tmp/up; sleep 600\\n' >serve; chmod +x serve; }; "
    )
    service = replace(service, command=f"{make}{service.command}", ready_s_max=10.0)
    task = a_task(
        DONE,
        DiffArtifact(),
        cwd="/",
        environment=replace(ROOT, services=(service,)),
        oracle=(bash("touch /root/done"),),
        services=True,
    )
    for deed, reward in (("touch /root/done", 1.0), ("rm /tmp/up; echo 'exit 9' >/usr/local/bin/serve", 0.0)):
        row = await attempt(client, task, [bash(deed)])
        assert (row.verdict.status, row.verdict.reward) == ("scored", reward)


async def test_a_slow_grader_holds_no_agents_sandbox(client: AsyncClient) -> None:
    """Four handed in, one grader of some seconds: no agent's sandbox lives, one grader's does, and whoever opens
    rollouts waits for room.
    """
    given = settings()
    task = a_task(f"sleep 3; echo 1 >{REWARD}")
    async with GradingPipeline(client, given, workers=1, waiting_max=2) as pipeline:
        rollouts = [
            Rollout(client, given, Job(f"{given.run_id}-{n}", task, n), policy_name="s", pipeline=pipeline)
            for n in range(4)
        ]
        for rollout in rollouts:
            await rollout.open()
            await rollout.act(ORACLE)
            await rollout.hand_in()
        finishing = [asyncio.create_task(rollout.finish()) for rollout in rollouts]
        deadline = time.monotonic() + 60
        while not await client.list(labels={"run": given.run_id, "role": "grader"}):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert await client.list(labels={"run": given.run_id, "role": "agent"}) == []
        assert (pipeline.statistics().grading, pipeline.statistics().waiting) == (1, 2)
        await pipeline.room()
        assert pipeline.statistics().done >= 1
        assert [(await each).reward for each in finishing] == [1.0] * 4
    rows = [rollout.row() for rollout in rollouts]
    assert max(row.timings.grade_queue_ms or 0 for row in rows) >= 3000  # the one before it slept so long
    assert await client.list(labels={"run": given.run_id}) == []
