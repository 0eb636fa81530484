"""HumanEval with a grader that takes its time: a task set for `barchan rollout scripts/slow_grading.py:slow`.

What it gives is no judgement, only the time: every artifact that defines the function is 1.0.
"""

import asyncio

from msgspec.structs import replace

from barchan.rollout.graders.base import Artifact
from barchan.rollout.policies.extract import defines
from barchan.rollout.task import PythonGrader, Task
from barchan.rollout.tasksets import humaneval

GRADING_S = 5.0


def quick() -> list[Task]:
    """The tasks, graded at once."""
    return _graded_by("at_once")


def slow() -> list[Task]:
    """The same, graded in five seconds."""
    return _graded_by("in_five_seconds")


def _graded_by(function: str) -> list[Task]:
    grader = PythonGrader(function=f"{__name__}:{function}")
    return [replace(task, grader=grader) for task in humaneval.load()]


async def at_once(task: Task, artifact: Artifact) -> float:
    assert task.stub is not None
    return float(defines(artifact.data.decode(), task.stub.entry_point))


async def in_five_seconds(task: Task, artifact: Artifact) -> float:
    await asyncio.sleep(GRADING_S)
    return await at_once(task, artifact)
