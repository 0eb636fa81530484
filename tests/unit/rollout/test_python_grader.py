"""Grading by a function in this process: what it may give, and that its failures are the task's."""

import asyncio
import threading
from collections.abc import Mapping
from typing import cast

import pytest

from barchan.errors import NodeLost, TaskError
from barchan.model.verdict import Verdict
from barchan.rollout.graders.base import Artifact, Grading
from barchan.rollout.graders.python import PythonGrading
from barchan.rollout.ports import Client, NoLog
from barchan.rollout.sandboxes import Sandboxes, SandboxesState
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import PythonGrader, Task
from tests.unit.rollout.fakes import FakeClient, task

pytestmark = pytest.mark.timeout(60)

SETTINGS = RunSettings(run_id="r", template="debian")
ARTIFACT = Artifact(kind="file", data=b"42")
HOLD = threading.Event()


def equals_42(task: Task, artifact: Artifact) -> Mapping[str, float]:
    return {"reward": float(artifact.data) == 42, "length": len(artifact.data)}


async def slowly(task: Task, artifact: Artifact) -> float:
    await asyncio.sleep(0.001)
    return 0.5


def lazily(task: Task, artifact: Artifact) -> object:
    return slowly(task, artifact)


def gives_text(task: Task, artifact: Artifact) -> str:
    return "good"


def raises(task: Task, artifact: Artifact) -> float:
    raise KeyError("no such thing")


def leaves(task: Task, artifact: Artifact) -> float:
    raise SystemExit(3)


def hangs(task: Task, artifact: Artifact) -> float:
    HOLD.wait()
    return 1.0


async def hangs_async(task: Task, artifact: Artifact) -> float:
    await asyncio.Event().wait()
    return 1.0


async def loses_its_node(task: Task, artifact: Artifact) -> float:
    raise NodeLost("gone")


async def looks(task: Task, artifact: Artifact, sandbox: object) -> float:
    return 1.0


def grading() -> Grading:
    sandboxes = Sandboxes(cast(Client, FakeClient()), SETTINGS, "r-0", state=SandboxesState())
    return Grading(task=task(), settings=SETTINGS, sandboxes=sandboxes, log=NoLog())


async def graded(name: str, artifact: Artifact = ARTIFACT, timeout_s: float = 30.0) -> Verdict:
    spec = PythonGrader(function=f"{__name__}:{name}", timeout_s=timeout_s)
    return await PythonGrading(spec).grade(grading(), artifact)


@pytest.mark.parametrize(("name", "reward"), [("equals_42", 1.0), ("slowly", 0.5), ("lazily", 0.5)])
async def test_a_function_gives_the_reward(name: str, reward: float) -> None:
    """A plain one, an async one, and a plain one that gives something to await; metrics stand beside the reward."""
    verdict = await graded(name)
    assert (verdict.status, verdict.reward, verdict.cause, verdict.exposed) == ("scored", reward, "completed", False)
    assert verdict.metrics == ({"length": 2.0} if name == "equals_42" else {})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "KeyError: 'no such thing'"),
        ("leaves", "SystemExit: 3"),
        ("gives_text", "the reward is no number but str"),
    ],
)
async def test_its_failure_is_the_tasks(name: str, said: str) -> None:
    """A function that raises, leaves or gives no number scores nothing; the evidence says what and where."""
    verdict = await graded(name)
    assert (verdict.status, verdict.reward, verdict.fault, verdict.cause) == ("void", None, "task", "grader_crash")
    assert verdict.evidence[0].value == said
    if name != "gives_text":
        assert f" {name}" in str(verdict.evidence[1].value)


async def test_a_strange_artifact_is_no_zero() -> None:
    """What the function can't read makes it raise, which is no score by itself."""
    verdict = await graded("equals_42", Artifact(kind="file", data=b"forty-two"))
    assert (verdict.status, verdict.cause) == ("void", "grader_crash")


@pytest.mark.parametrize("name", ["hangs", "hangs_async"])
async def test_one_that_takes_too_long_is_given_up(name: str) -> None:
    """The time-out is the grader's, and holds for a thread, which goes on, as for a coroutine, which is ended."""
    try:
        verdict = await graded(name, timeout_s=0.05)
    finally:
        HOLD.set()
    assert (verdict.status, verdict.fault, verdict.cause) == ("void", "task", "grader_timeout")
    assert verdict.evidence[0].value == 0.05


async def test_the_platforms_failure_is_raised() -> None:
    """What the node fails to do is no fault of the function that worked with it."""
    with pytest.raises(NodeLost):
        await graded("loses_its_node")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (PythonGrader(function="no_such_module_here:f"), "No module named"),
        (PythonGrader(function=f"{__name__}:no_such"), "no attribute 'no_such'"),
        (PythonGrader(function=f"{__name__}:HOLD"), "it can't be called"),
        (PythonGrader(function="just_a_name"), "module:function"),
        (PythonGrader(function=f"{__name__}:equals_42", sandbox=True), "it has to be async"),
    ],
)
def test_what_is_no_grader(spec: PythonGrader, said: str) -> None:
    """A function that is not there, or does not fit, is told before it is called."""
    with pytest.raises(TaskError, match=said):
        PythonGrading(spec)


async def test_cancelling_ends_the_function() -> None:
    """A grading that is given up takes its coroutine with it."""
    before = asyncio.all_tasks()
    call = asyncio.ensure_future(graded("hangs_async"))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert asyncio.all_tasks() == before
