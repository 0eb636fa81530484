"""Harbor folders on a real node: every kind of artifact, what is admitted and what is not, and `barchan task`."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import barchan
from barchan.rollout.admission import check
from barchan.rollout.policies import NopPolicy, OraclePolicy, Policy
from barchan.rollout.prepare import prepare_all
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Task
from barchan.rollout.tasksets.harbor import load_harbor
from barchan.sdk.aio.client import AsyncClient
from tests.nodes import NodeProcess
from tests.stores import node_of_its_own

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs")]

OFFLINE = '[environment]\nnetwork_mode = "no-network"\nworkdir = "/app"\n'
DOCKERFILE = "FROM debian\nWORKDIR /app\nCOPY numbers.txt .\n"
TEST = """#!/bin/bash
if [ "$(cat total.txt 2>/dev/null)" = "$(cat /tests/expected)" ]; then
    echo '{"reward": 1, "lines": '"$(wc -l < numbers.txt)"'}' > /logs/verifier/reward.json
else
    echo 0 > /logs/verifier/reward.txt
fi
"""
SOLVE = "#!/bin/bash\npython3 -c 'print(sum(map(int, open(\"numbers.txt\"))))' > total.txt\n"


def write(folder: Path, **files: str) -> Path:
    """A task that asks for the sum of some numbers; `/` is `__` and `.` is `_dot_` in the names of its files."""
    content = {
        "task.toml": OFFLINE,
        "instruction.md": "Write the sum of numbers.txt to total.txt.",
        "environment/Dockerfile": DOCKERFILE,
        "environment/numbers.txt": "1\n2\n39\n",
        "tests/test.sh": TEST,
        "tests/expected": "42\n",
        "solution/solve.sh": SOLVE,
        **{name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()},
    }
    for name, text in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def node(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with an image store of its own, which starts with the base image."""
    yield from node_of_its_own(images, tmp_path_factory)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


def settings(name: str) -> RunSettings:
    return RunSettings(run_id=f"harbor-{name}", template="debian", concurrency=2, graders=2, memory_mib=256)


async def play(client: AsyncClient, tasks: list[Task], policy: Policy) -> list[RolloutRecord]:
    records: list[RolloutRecord] = []
    await Runner(client, tasks, policy, settings(policy.name), records.append).run()
    return sorted(records, key=lambda record: record.task_id)


SEPARATE = OFFLINE + '[verifier]\nenvironment_mode = "separate"\n'
SHARED = OFFLINE + '[verifier]\nenvironment_mode = "shared"\n'


async def test_every_kind_of_artifact(client: AsyncClient, tmp_path: Path) -> None:
    """The oracle scores 1 and nobody 0: graded over the agent's layer, beside its processes, from what is declared,
    as another user, with variables, and in an image of the verifier's own.
    """
    write(tmp_path / "diff")
    write(tmp_path / "shared", task_dot_toml=SHARED)
    write(tmp_path / "separate", task_dot_toml='artifacts = ["total.txt"]\n' + SEPARATE)
    write(
        tmp_path / "users",
        task_dot_toml=OFFLINE + '[agent]\nuser = "agent"\n[verifier]\nuser = 1000\n[solution]\nenv = { N = "a b" }\n',
        environment__Dockerfile=DOCKERFILE + "RUN chmod 777 .\n",
        solution__solve_dot_sh=SOLVE + 'test "$N" = "a b" && test "$(id -un)" = agent || rm total.txt\n',
    )
    write(
        tmp_path / "verifier",
        task_dot_toml='artifacts = ["/app/total.txt"]\n'
        + OFFLINE
        + '[verifier.environment]\nnetwork_mode="no-network"\n',
        tests__Dockerfile="FROM debian\nWORKDIR /app\nCOPY test.sh expected /tests/\n"
        "RUN chmod 755 /tests/test.sh; seq 3 > numbers.txt\n",
    )
    tasks = load_harbor(tmp_path, build_network="none")
    solved = await play(client, tasks, OraclePolicy())
    assert [(row.task_id, row.verdict.status, row.verdict.reward) for row in solved] == [
        (name, "scored", 1.0) for name in ("diff", "separate", "shared", "users", "verifier")
    ], [row.verdict for row in solved]
    assert [row.artifact_kind for row in solved] == ["diff", "files", "shared", "diff", "files"]
    assert all(row.verdict.exposed for row in solved)
    assert [row.verdict.metrics for row in solved if row.task_id != "separate"] == [{"lines": 3.0}] * 4
    idle = await play(client, tasks, NopPolicy())
    assert [row.verdict.reward for row in idle] == [0.0] * 5, [row.verdict for row in idle]


async def test_no_other_policy_sees_the_solution(client: AsyncClient, tmp_path: Path) -> None:
    """Neither the solution nor the tests are in the sandbox of a policy that is not the oracle."""
    (task,) = load_harbor(write(tmp_path / "task"), build_network="none")
    seen: list[str] = []

    class Looks:
        name = "looks"

        async def step(self, task: Task, sample_index: int, observation: object) -> object:
            from barchan.rollout.calls import Observation, call_to
            from barchan.rollout.policies import Step

            assert isinstance(observation, Observation)
            seen.extend(result.content for result in observation.results)
            return Step(tool_calls=(call_to("bash", command="ls -d /solution /tests; ls /app"),), is_last=bool(seen))

    await play(client, [task], Looks())  # type: ignore[arg-type]
    assert "'/solution': No such file" in seen[0] and "'/tests': No such file" in seen[0] and "numbers.txt" in seen[0]


async def test_what_is_admitted(client: AsyncClient, tmp_path: Path) -> None:
    """A sound task is admitted; one whose oracle fails, one that pays for nothing, one without an oracle, one that
    can't be built, and one whose checks say nothing are not, each with its reason.
    """
    write(tmp_path / "a-sound")
    write(tmp_path / "b-wrong", solution__solve_dot_sh="#!/bin/sh\necho 41 > total.txt\n")
    write(tmp_path / "c-generous", tests__test_dot_sh="#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    write(tmp_path / "d-unsolved")
    (tmp_path / "d-unsolved/solution/solve.sh").unlink()
    write(tmp_path / "e-broken", environment__Dockerfile=DOCKERFILE + "RUN exit 3\n")
    write(tmp_path / "f-silent", tests__test_dot_sh="#!/bin/sh\nexit 1\n")
    tried: list[tuple[str, str]] = []
    found = await check(
        client,
        load_harbor(tmp_path, build_network="none"),
        settings("check"),
        done=lambda task_id, what: tried.append((task_id, what)),
    )
    told = {item.task_id: "; ".join(item.why) for item in found}
    assert [item.task_id for item in found if item.admitted] == ["a-sound"]
    assert (found[0].oracle, found[0].nop, found[0].empty, found[0].why) == ((1.0, 1.0), (0.0, 0.0), (0.0, 0.0), ())
    assert told["b-wrong"].startswith("oracle, rounds 1, 2: reward 0, completed")
    assert told["c-generous"].startswith("nop, rounds 1, 2 and empty, rounds 1, 2: reward 1, completed")
    assert told["d-unsolved"] == "it has no known-good attempt"
    assert "RUN exit 3" not in told["e-broken"] and "ended with exit code 3" in told["e-broken"]
    assert "void by platform, reward_missing" in told["f-silent"] and found[5].oracle == (None, None)
    assert sorted(tried)[:4] == [("a-sound", "nop"), ("a-sound", "nop"), ("a-sound", "oracle"), ("a-sound", "oracle")]
    assert await client.list() == []


async def test_preparing_builds_what_is_needed(client: AsyncClient, tmp_path: Path) -> None:
    """Each task's images are there afterwards, and asking again starts nothing; one that can't be built is said."""
    write(tmp_path / "a")
    write(tmp_path / "b", environment__Dockerfile=DOCKERFILE + "RUN exit 3\n")
    tasks = load_harbor(tmp_path, build_network="none")
    first, second = await prepare_all(client, tasks)
    assert first.ready and len(first.images) == 1
    assert first.images[0] in [image.name for image in await client.images()]
    assert not second.ready and "ended with exit code 3" in second.why
    async with barchan.connect_async(state_dir=client.endpoint.state_dir) as other:
        creates = (await other.node_info()).creates_total
        assert (await prepare_all(other, tasks[:1]))[0].images == first.images
        assert (await other.node_info()).creates_total == creates


def run(node: NodeProcess, *arguments: str) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if not name.startswith("BARCHAN_")}
    return subprocess.run(
        [sys.executable, "-m", "barchan.cli", "--state-dir", str(node.state_dir), *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


def test_the_commands(node: NodeProcess, tmp_path: Path) -> None:
    """`task prepare` and `task check` say what they found in a table, in JSON, in a file and by their exit codes."""
    tasks = tmp_path / "tasks"
    write(tasks / "good")
    prepared = run(node, "task", "prepare", str(tasks), "--json")
    assert prepared.returncode == 0, prepared.stderr
    (told,) = json.loads(prepared.stdout.splitlines()[-1])
    assert told["task_id"] == "good" and told["ready"] and told["images"][0].startswith("prep-")
    write(tasks / "bad", solution__solve_dot_sh="#!/bin/sh\n")
    checked = run(node, "task", "check", str(tasks), "--write", str(tmp_path / "ids"), "--json")
    assert checked.returncode == 1, checked.stderr
    assert "1 of 2 admitted" in checked.stdout
    assert (tmp_path / "ids").read_text() == "good\n"
    bad, good = json.loads(checked.stdout.splitlines()[-1])
    assert (bad["task_id"], bad["admitted"], good["oracle"]) == ("bad", False, [1.0, 1.0])
    assert run(node, "task", "check", str(tasks), "--task", "good").returncode == 0
    assert "no such task" in run(node, "task", "check", str(tasks), "--task", "ugly").stderr
    refused = run(node, "task", "check", str(write(tmp_path / "odd", task_dot_toml="steps = []\n")))
    assert refused.returncode == 1 and "odd/task.toml: steps: tasks of several steps" in refused.stderr


def test_an_image_from_a_dockerfile(node: NodeProcess, tmp_path: Path) -> None:
    """`image build PATH --name NAME` gives the image that name; what can't be built is one line, with its place."""
    (tmp_path / "Dockerfile").write_text("FROM there\nARG V\nRUN echo $V > /v\nUSER agent\n")
    options = ("--name", "named", "--base", "there=debian", "--arg", "V=7", "--network", "none")
    built = run(node, "image", "build", str(tmp_path), *options, "--json")
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout.splitlines()[-1])["name"] == "named"
    assert run(node, "run", "named", "--", "cat", "/v").stdout == "7\n"
    missing = run(node, "image", "build", str(tmp_path), "--name", "other", "--arg", "V=7")
    assert missing.returncode == 1 and "no image 'there' to build on" in missing.stderr
    (tmp_path / "Dockerfile").write_text("FROM debian\nVOLUME /x\n")
    refused = run(node, "image", "build", str(tmp_path / "Dockerfile"), "--name", "other")
    assert refused.returncode == 2 and "Dockerfile:2: VOLUME: is not supported" in refused.stderr
