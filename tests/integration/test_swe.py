"""SWE rows on a real node: the repository that the agent finds, and what its patch is worth."""

import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import barchan
from barchan.image.store import ImageStore
from barchan.rollout.calls import Observation, call_to
from barchan.rollout.policies import NopPolicy, OraclePolicy, Policy, Step
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Task
from barchan.rollout.tasksets.swe import load_swe
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.build import build
from barchan.sdk.recipe import Put, Recipe
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(300), pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs")]

IMAGE = "debian-pytest"
REPO = "/srv/calc"
OLD, FIXED = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TESTS = (
    "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\n"
    "def test_zero():\n    assert add(0, 0) == 0\n"
)
HISTORY = """
git log --all --format=%s; echo "remotes: $(git remote)"; echo "tags: $(git tag)"; echo "reflog: $(git reflog)"
git fsck --full --unreachable --no-progress; echo "changes: $(git status --short)"; stat -c %U . .git calc.py
"""


@pytest.fixture(scope="module")
def node(images: Path, with_pytest: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with an image store of its own, which starts with an image that has git and pytest."""
    machine, own = ImageStore(images), tmp_path_factory.mktemp("store")
    template = machine.resolve(with_pytest)
    for folder in ("templates", "layers"):
        (own / folder).mkdir()
    subprocess.run(["cp", "-a", images / f"templates/{IMAGE}.json", own / "templates"], check=True)
    for layer in template.layers:
        subprocess.run(["cp", "-a", machine.layer_path(layer), own / "layers"], check=True)
    node = NodeProcess(tmp_path_factory.mktemp("node"), own)
    node.start()
    yield node
    assert node.end() == []


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


class Origin:
    """A repository with a bug at its first commit, the fix at the second, and the tests at the third, a tagged one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir()
        git(self.work, "init", "--quiet", "--initial-branch=main")
        commits = []
        for name, text in (("calc.py", OLD), ("calc.py", FIXED), ("test_calc.py", TESTS)):
            (self.work / name).write_text(text)
            git(self.work, "add", "--all")
            git(self.work, "commit", "--quiet", "-m", f"{name} once more")
            commits.append(git(self.work, "rev-parse", "HEAD").strip())
        git(self.work, "tag", "v2")
        self.base, self.fix, self.later = commits
        git(folder, "clone", "--quiet", "--bare", str(self.work), str(folder / "repos/ann__calc.git"))

    def task(self, **changes: Any) -> Task:
        row = {
            "instance_id": "ann__calc-1",
            "repo": "ann/calc",
            "base_commit": self.base,
            "problem_statement": "add subtracts",
            "patch": git(self.work, "diff", self.base, self.fix),
            "test_patch": git(self.work, "diff", self.fix, self.later),
            "FAIL_TO_PASS": ["test_calc.py::test_add"],
            "PASS_TO_PASS": ["test_calc.py::test_zero"],
            **changes,
        }
        path = self.folder / "rows.jsonl"
        path.write_text(json.dumps(row))
        (task,) = load_swe(path, repos=self.folder / "repos")
        return task


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Origin:
    return Origin(tmp_path_factory.mktemp("origin"))


@pytest.fixture(scope="module")
def made(origin: Origin) -> Task:
    """By an environment, whose install leaves its mark on the work tree."""
    install = ["mkdir calc.egg-info && echo 1 > calc.egg-info/PKG-INFO", "touch '/tmp/installed by' && id -un"]
    return origin.task(environment={"base": IMAGE, "install": install, "workdir": REPO})


async def of_image(origin: Origin, client: AsyncClient) -> Task:
    """On an image that has the whole repository, as published images do."""
    whole = Recipe(base=IMAGE, steps=(Put(path="/home/agent/calc", source=str(origin.work), user="agent"),))
    image = await build(client, whole)
    return origin.task(image=image, workdir="/home/agent/calc", user="agent")


async def seen_by_the_agent(client: AsyncClient, task: Task) -> AsyncSandbox:
    assert task.environment.recipe is not None
    return await client.create(await build(client, task.environment.recipe))


@pytest.mark.parametrize("kind", ["environment", "image"])
async def test_the_agent_finds_one_commit_and_nothing_of_later(
    client: AsyncClient, origin: Origin, made: Task, kind: str
) -> None:
    """One commit, a clean work tree of the agent's own, and neither by name nor among all objects what came later."""
    task = made if kind == "environment" else await of_image(origin, client)
    sandbox = await seen_by_the_agent(client, task)
    async with sandbox:
        found = (await sandbox.exec(HISTORY, merge_stderr=True)).check().text.splitlines()
        assert found == ["The repository as it is", "remotes: ", "tags: ", "reflog: ", "changes: ", *["agent"] * 3]
        assert (await sandbox.exec(["git", "cat-file", "-t", origin.later])).exit_code != 0
        listed = (await sandbox.exec("git cat-file --batch-all-objects --batch-check='%(objecttype)'")).check().text
        assert sorted(listed.split()) == ["blob", "commit", "tree"]
        assert (await sandbox.files.read(f"{task.environment.workdir}/calc.py")).decode() == OLD


class EverythingElse:
    """Fixes nothing, and changes what it can: the test, another file, the commit that HEAD names."""

    name = "everything-else"

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        cheat = "echo 'def test_add(): pass' > test_calc.py; echo x > new.txt; git add -A"
        commit = "git -c user.name=x -c user.email=x@x commit -qm x"
        return Step(tool_calls=(call_to("bash", command=f"{cheat}; {commit}"), call_to("submit")), is_last=True)


async def verdicts(client: AsyncClient, task: Task, policy: Policy) -> RolloutRecord:
    records: list[RolloutRecord] = []
    settings = RunSettings(run_id=f"swe-{time.monotonic_ns()}", template=IMAGE, memory_mib=256, concurrency=1)
    await Runner(client, [task], policy, settings, records.append).run()
    (record,) = records
    return record


@pytest.mark.parametrize("kind", ["environment", "image"])
async def test_the_gold_patch_is_worth_one_and_others_nothing(
    client: AsyncClient, origin: Origin, made: Task, kind: str
) -> None:
    """The oracle gets 1; who hands in nothing, and who changes the tests in place of the code, gets 0 with the test
    that failed as evidence.
    """
    task = made if kind == "environment" else await of_image(origin, client)
    oracle = await verdicts(client, task, OraclePolicy())
    assert (oracle.verdict.status, oracle.verdict.reward) == ("scored", 1.0)
    assert oracle.verdict.metrics["f2p_passed"] == oracle.verdict.metrics["p2p_passed"] == 1.0
    assert "egg-info" not in (oracle.artifact or "")
    nop = await verdicts(client, task, NopPolicy())
    assert (nop.verdict.status, nop.verdict.reward) == ("scored", 0.0)
    cheat = await verdicts(client, task, EverythingElse())
    assert (cheat.verdict.status, cheat.verdict.reward) == ("scored", 0.0)
    assert "new.txt" in (cheat.artifact or "")
    assert "test_calc.py::test_add" in [fact.value for fact in cheat.verdict.evidence]
