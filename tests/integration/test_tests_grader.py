"""Grading a patch by tests, in real sandboxes with a real repository, git and pytest."""

import itertools
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

import barchan
from barchan.errors import TaskError
from barchan.model.verdict import Verdict
from barchan.rollout.graders.base import Artifact, Grading
from barchan.rollout.graders.tests import TestsGrading as ByTests
from barchan.rollout.grading import Controls, GradeJob, grade
from barchan.rollout.ports import NoLog
from barchan.rollout.sandboxes import Sandboxes, SandboxesState
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Environment, FileArtifact, PatchArtifact, Task
from barchan.rollout.task import TestsGrader as Spec
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.recipe import Put, Recipe, Run
from tests.nodes import NodeProcess
from tests.stores import copy_base

pytestmark = [pytest.mark.timeout(300), pytest.mark.requires("root", "cgroup", "userns")]

REPO = "/home/agent/repo"
IMAGE = "debian-pytest"
LEASE_GRACE_S = 15.0
BASE: dict[str, str | None] = {
    "calc/__init__.py": "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a - b\n",
    "notes.txt": "one\n",
    "tests/test_calc.py": "from calc import sub\n\n\ndef test_sub():\n    assert sub(5, 3) == 2\n",
    "tests/test_old.py": "from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n",
    "tests/test_gone.py": "def test_gone():\n    pass\n",
}
TESTS: dict[str, str | None] = {
    "tests/test_calc.py": (
        "import pytest\n\nfrom calc import add, sub\n\n\ndef test_sub():\n    assert sub(5, 3) == 2\n\n\n"
        "def test_add():\n    assert add(2, 3) == int(open('tests/new data.txt').read())\n\n\n"
        "class TestMore:\n    @pytest.mark.parametrize('text', ['1 + 2', 'a::b'])\n"
        "    def test_many(self, text):\n        assert add(text, '') == text\n"
    ),
    "tests/new data.txt": "5\n",
    "tests/test_gone.py": None,
}
FIXED = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
FAIL_TO_PASS = (
    "tests/test_calc.py::test_add",
    "tests/test_calc.py::TestMore::test_many[1 + 2]",
    "tests/test_calc.py::TestMore::test_many[a::b]",
)
PASS_TO_PASS = ("tests/test_calc.py::test_sub", "tests/test_old.py::test_zero")
COMMAND = "python3 -m pytest -q -p no:cacheprovider --junitxml={junit} {tests}"
_count = itertools.count()


def git(folder: Path, *words: str) -> bytes:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True).stdout


def write(folder: Path, files: Mapping[str, str | None]) -> None:
    """Text in place of what is there; None removes it, and `-> x` is a link to x."""
    for name, text in files.items():
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if text is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text[3:])
        else:
            path.write_text(text)


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository, as a folder here."""
    folder = tmp_path_factory.mktemp("repo")
    git(folder, "init", "--quiet")
    write(folder, BASE)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "base")
    return folder


def patch(origin: Path, files: Mapping[str, str | None]) -> bytes:
    """What changing these files is as a patch, as an artifact has it."""
    try:
        write(origin, files)
        git(origin, "add", "--all")
        return git(origin, "diff", "--cached", "--binary", "--no-renames", "HEAD")
    finally:
        git(origin, "reset", "--quiet", "--hard", "HEAD")
        git(origin, "clean", "-fdq")


@pytest.fixture(scope="module")
def node(images: Path, with_pytest: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with an image store of its own, with a base image that has git and pytest."""
    store = copy_base(images, tmp_path_factory.mktemp("store") / "images", with_pytest)
    node = NodeProcess(tmp_path_factory.mktemp("node"), store)
    node.start()
    yield node
    assert node.wait_empty(LEASE_GRACE_S) == []
    assert node.end() == []


@pytest.fixture(scope="session")
def the_task(origin: Path) -> Task:
    """Its environment has also run what leaves its mark on the work tree, as installations do."""
    commit = "git init -q . && git add -A && git -c user.name=t -c user.email=t@t commit -qm base"
    marks = "mkdir made.egg-info && echo 1 >made.egg-info/PKG-INFO && echo two >>notes.txt"
    recipe = Recipe(
        base=IMAGE,
        steps=(
            *(Put(path=f"{REPO}/{name}", data=(text or "").encode(), user="agent") for name, text in BASE.items()),
            Run(command=f"{commit} && {marks}", cwd=REPO, user="agent"),
        ),
    )
    return Task(
        task_id="add",
        instruction="Mend add.",
        environment=Environment(recipe=recipe, workdir=REPO),
        artifact=PatchArtifact(repo=REPO, base="HEAD"),
        grader=Spec(
            test_patch=patch(origin, TESTS).decode(),
            command=COMMAND,
            fail_to_pass=FAIL_TO_PASS,
            pass_to_pass=PASS_TO_PASS,
            reference=patch(origin, {"calc/__init__.py": FIXED}).decode(),
            user="agent",
            timeout_s=120.0,
        ),
    )


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


SETTINGS = RunSettings(run_id="test-tests", template="debian", memory_mib=256)


def sandboxes(client: AsyncClient) -> Sandboxes:
    return Sandboxes(client, SETTINGS, f"tests-grader-{next(_count)}", state=SandboxesState())


async def graded(client: AsyncClient, task: Task, data: bytes) -> Verdict:
    """One grading, without a control."""
    assert isinstance(task.grader, Spec)
    grading = Grading(task=task, settings=SETTINGS, sandboxes=sandboxes(client), log=NoLog())
    return await ByTests(task.grader).grade(grading, Artifact(kind="patch", data=data))


async def decided(client: AsyncClient, task: Task, data: bytes) -> Verdict:
    """A grading as rollouts have it."""
    job = GradeJob(
        rollout_id=f"tests-grader-{next(_count)}",
        task=task,
        artifact=Artifact(kind="patch", data=data),
        sandboxes=sandboxes(client),
        log=NoLog(),
    )
    return await grade(job, SETTINGS, Controls(8))


def changed(task: Task, **fields: object) -> Task:
    return replace(task, grader=replace(task.grader, **fields))


def facts(verdict: Verdict, fact: str) -> list[object]:
    return [item.value for item in verdict.evidence if item.fact == fact]


async def test_the_reference_passes(client: AsyncClient, the_task: Task, origin: Path) -> None:
    """All tests of both lists pass: 1, with the counts as metrics, and nothing lacking as evidence."""
    verdict = await graded(client, the_task, patch(origin, {"calc/__init__.py": FIXED}))
    assert (verdict.status, verdict.reward, verdict.cause) == ("scored", 1.0, "completed"), verdict
    counts = {"f2p_passed": 3.0, "f2p_total": 3.0, "p2p_passed": 2.0, "p2p_total": 2.0, "runner_files": 0.0}
    assert verdict.metrics == counts
    assert [(item.fact, item.value) for item in verdict.evidence] == [("exit_code", 1)]  # of the sentinel
    assert verdict.exposed


async def test_nothing_done_is_zero(client: AsyncClient, the_task: Task) -> None:
    """An empty patch fails what it should fail; each such test is named, with its end and the runner's output."""
    verdict = await graded(client, the_task, b"")
    assert (verdict.status, verdict.reward, verdict.cause) == ("scored", 0.0, "completed")
    assert (verdict.metrics["f2p_passed"], verdict.metrics["p2p_passed"]) == (0.0, 2.0)
    assert facts(verdict, "not passed, failed") == list(FAIL_TO_PASS)
    assert facts(verdict, "exit_code") == [1]
    assert "4 failed, 2 passed" in str(facts(verdict, "output"))


WEAK: dict[str, dict[str, str | None]] = {
    "edited": {
        "tests/test_calc.py": "def test_add(): pass\ndef test_sub(): pass\n",
        "tests/test_old.py": "def test_zero(): pass\n",
        "tests/new data.txt": "-1\n",
    },
    "a link": {"tests/test_calc.py": "-> ../easy.py", "easy.py": "def test_add(): pass\n"},
    "a folder": {"tests/test_calc.py": None, "tests/test_calc.py/x.py": "def test_add(): pass\n"},
    "a linked folder": {"tests": "-> easy", "easy/test_calc.py": "def test_add(): pass\n"},
    "removed": {"tests": None},
}


@pytest.mark.parametrize("name", WEAK)
async def test_edits_of_the_tests_are_lost(client: AsyncClient, the_task: Task, origin: Path, name: str) -> None:
    """Whatever the agent makes of the files of the tests, the task's own are run, on wrong code and right."""
    verdict = await graded(client, the_task, patch(origin, WEAK[name]))
    assert (verdict.reward, verdict.metrics["f2p_passed"]) == (0.0, 0.0), verdict
    assert verdict.metrics["p2p_passed"] == 2.0
    verdict = await graded(client, the_task, patch(origin, {**WEAK[name], "calc/__init__.py": FIXED}))
    assert verdict.reward == 1.0, verdict


async def test_what_the_environment_made_is_no_obstacle(client: AsyncClient, the_task: Task, origin: Path) -> None:
    """A patch against base applies although the environment has changed the same files since, as its own did, too."""
    also = {"made.egg-info/PKG-INFO": "1\n", "notes.txt": "one\ntwo\n", "calc/__init__.py": FIXED}
    assert (await graded(client, the_task, patch(origin, also))).reward == 1.0


async def test_files_that_steer_the_runner_are_put_back(client: AsyncClient, the_task: Task, origin: Path) -> None:
    """They are as base has them, or gone, and the verdict names them; those that the reference changes stay."""
    hook = "raise SystemExit(0)\n"
    files = {"conftest.py": hook, "calc/sitecustomize.py": "", "pytest/x.py": "", "a.pth": "", "calc/contest.py": ""}
    data = patch(origin, {**files, "calc/__init__.py": FIXED})
    verdict = await graded(client, the_task, data)
    told = ["a.pth, calc/sitecustomize.py, conftest.py, pytest/x.py"]
    assert facts(verdict, "put back: files that steer the runner") == told
    assert (verdict.reward, verdict.metrics["runner_files"], verdict.exposed) == (1.0, 4.0, True)
    with_conftest = patch(origin, {"calc/__init__.py": FIXED, "conftest.py": "# theirs\n"}).decode()
    verdict = await graded(client, changed(the_task, reference=with_conftest), data)
    assert (verdict.status, verdict.cause) == ("void", "reward_missing"), verdict


async def test_a_runner_that_lets_all_pass_is_found_out(client: AsyncClient, the_task: Task, origin: Path) -> None:
    """The test that must fail is said to have passed: that is proof, and worth 0."""
    sly = "import _pytest.reports as r\n\n_made = r.TestReport.from_item_and_call.__func__\n\n\n"
    sly += "def always(cls, item, call):\n    call.excinfo = None\n    return _made(cls, item, call)\n\n\n"
    sly += "r.TestReport.from_item_and_call = classmethod(always)\n\n\ndef add(a, b): pass\n\n\ndef sub(a, b): pass\n"
    verdict = await graded(client, the_task, patch(origin, {"calc/__init__.py": sly}))
    assert (verdict.status, verdict.reward, verdict.cause) == ("scored", 0.0, "integrity_violation"), verdict


LINKED = b"""diff --git a/out b/out
new file mode 120000
--- /dev/null
+++ b/out
@@ -0,0 +1 @@
+/home/agent
\\ No newline at end of file
diff --git a/out/x b/out/x
new file mode 100644
--- /dev/null
+++ b/out/x
@@ -0,0 +1 @@
+1
"""


@pytest.mark.parametrize(
    "data",
    [
        b"not a patch\n",
        b"diff --git a/calc/__init__.py b/calc/__init__.py\n--- a/calc/__init__.py\n+++ b/calc/__init__.py\n"
        b"@@ -1,1 +1,1 @@\n-something else\n+x\n",
        b"--- /dev/null\n+++ b/../outside\n@@ -0,0 +1 @@\n+1\n",
        b"--- /dev/null\n+++ b/.git/hooks/post-checkout\n@@ -0,0 +1 @@\n+1\n",
        LINKED,
    ],
    ids=["no patch", "another file", "outside", "into git", "through a link"],
)
async def test_a_patch_that_does_not_apply_is_zero(client: AsyncClient, the_task: Task, data: bytes) -> None:
    """It is the artifact's own doing, and git's words are the evidence."""
    verdict = await graded(client, the_task, data)
    assert (verdict.status, verdict.reward, verdict.cause) == ("scored", 0.0, "completed"), verdict
    assert [item.fact for item in verdict.evidence] == ["the patch does not apply"]
    assert str(verdict.evidence[0].value)


async def test_leaving_early_buys_no_void(client: AsyncClient, the_task: Task, origin: Path) -> None:
    """Code that ends the runner leaves no report. That alone decides nothing; with a good control it is a zero."""
    leaving = patch(origin, {"calc/__init__.py": "import os\nos._exit(0)\n"})
    verdict = await graded(client, the_task, leaving)
    assert (verdict.status, verdict.fault, verdict.cause) == ("void", "platform", "reward_missing")
    verdict = await decided(client, the_task, leaving)
    assert (verdict.status, verdict.reward, verdict.cause) == ("scored", 0.0, "guest_wrecked"), verdict


async def test_hanging_buys_no_void(client: AsyncClient, the_task: Task, origin: Path) -> None:
    """Code that hangs is out of time, by the same rule."""
    hanging = patch(origin, {"calc/__init__.py": "import time\ntime.sleep(3600)\n"})
    verdict = await decided(client, changed(the_task, timeout_s=20.0), hanging)
    assert (verdict.status, verdict.reward, verdict.cause) == ("scored", 0.0, "exec_timeout"), verdict


async def test_a_patch_that_fills_the_disk_buys_no_void(client: AsyncClient, the_task: Task, origin: Path) -> None:
    """What does not fit the grader's sandbox is the patch's own doing."""
    task = replace(the_task, environment=replace(the_task.environment, disk_mib=8))
    (origin / "noise").write_bytes(random.Random(1).randbytes(12 << 20))
    verdict = await decided(client, task, patch(origin, {}))
    assert (verdict.status, verdict.reward, verdict.cause) == ("scored", 0.0, "guest_wrecked"), verdict
    assert facts(verdict, "failed"), verdict


async def test_a_forged_report_that_is_none(client: AsyncClient, the_task: Task, origin: Path) -> None:
    """A report that is not one is malformed, and undecided like a missing one."""
    code = "import atexit, sys\n(path,) = [w.split('=')[1] for w in sys.argv if 'junit' in w]\n"
    forging = code + "atexit.register(lambda: open(path, 'w').write('<!DOCTYPE x><testsuite/>'))\n" + FIXED
    verdict = await graded(client, the_task, patch(origin, {"calc/__init__.py": forging}))
    assert (verdict.status, verdict.cause) == ("void", "reward_malformed"), verdict
    assert facts(verdict, "none") == ["malformed: it has a DTD"]


async def test_tests_that_are_missing_from_the_report(client: AsyncClient, the_task: Task, origin: Path) -> None:
    """A test that did not run has not passed."""
    task = changed(the_task, pass_to_pass=(*PASS_TO_PASS, "tests/test_old.py::test_nowhere"))
    verdict = await graded(client, task, patch(origin, {"calc/__init__.py": FIXED}))
    assert (verdict.reward, facts(verdict, "not passed, missing")) == (0.0, ["tests/test_old.py::test_nowhere"])


async def test_tasks_that_cant_be_graded(client: AsyncClient, the_task: Task, origin: Path) -> None:
    """No such base, a test patch for another, an image without git, another kind of artifact: the task's fault."""
    fixed = patch(origin, {"calc/__init__.py": FIXED})
    no_base = replace(the_task, artifact=PatchArtifact(repo=REPO, base="0" * 40))
    with pytest.raises(TaskError, match="no such base"):
        await graded(client, no_base, fixed)
    no_repo = replace(the_task, artifact=PatchArtifact(repo="/nowhere", base="HEAD"))
    with pytest.raises(TaskError, match=r"no such base: .*/nowhere"):
        await graded(client, no_repo, fixed)
    with pytest.raises(TaskError, match=r"the test patch does not fit base: error: .*no_such.py"):
        wrong = (the_task.grader.test_patch).replace("test_calc.py", "no_such.py")  # type: ignore[union-attr]
        await graded(client, changed(the_task, test_patch=wrong), fixed)
    bare = Recipe(base="debian", steps=(Put(path=f"{REPO}/x", data=b"", user="agent"),))
    with pytest.raises(TaskError, match="its image has no git"):
        await graded(client, changed(the_task, recipe=bare), fixed)
    with pytest.raises(TaskError, match="takes a patch"):
        await graded(client, replace(the_task, artifact=FileArtifact()), fixed)


def test_a_grader_without_tests() -> None:
    """It is told before anything is made."""
    with pytest.raises(TaskError, match="no test"):
        ByTests(Spec(test_patch="", command="true", fail_to_pass=()))
