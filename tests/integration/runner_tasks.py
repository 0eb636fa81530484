"""A task set of the tests' own: half of its tasks need an environment that is built first."""

from collections.abc import Mapping
from typing import Any

from barchan.rollout.calls import call_to
from barchan.rollout.graders.base import Artifact
from barchan.rollout.task import Environment, FileArtifact, FilesArtifact, PythonGrader, Task
from barchan.sdk.recipe import Recipe, Run

BUILT = Recipe(base="debian", steps=(Run(command="echo 41 > /opt/number"),))
BROKEN = Recipe(base="debian", steps=(Run(command="echo no luck >&2; exit 3"),))


def tasks() -> list[Task]:
    return [made(number, BUILT if number % 2 else None) for number in range(4)]


def with_a_broken_one() -> list[Task]:
    return [made(0, BROKEN), *tasks()[1:]]


def with_files() -> list[Task]:
    grader = PythonGrader(function="tests.integration.runner_tasks:holds_it")
    return [made(0, artifact=FilesArtifact(paths=("answer.txt",)), grader=grader)]


def made(number: int, recipe: Recipe | None = None, **fields: Any) -> Task:
    """Write the number that follows, into answer.txt."""
    command = "expr 1 + $(cat /opt/number 2>/dev/null || echo 41) > answer.txt"
    given = {
        "task_id": f"next-{number}",
        "instruction": "Which number follows the one in /opt/number, or 41? Write it to answer.txt.",
        "grader": PythonGrader(function="tests.integration.runner_tasks:is_right"),
        "artifact": FileArtifact(path="answer.txt"),
        "environment": Environment(recipe=recipe),
        "oracle": (call_to("bash", command=command), call_to("submit")),
        "nop": (call_to("bash", command="true"), call_to("submit")),
    }
    return Task(**{**given, **fields})


def is_right(task: Task, artifact: Artifact) -> Mapping[str, float]:
    return {"reward": float(artifact.data.strip() == b"42"), "bytes": len(artifact.data)}


def holds_it(task: Task, artifact: Artifact) -> float:
    return float(b"42\n" in artifact.data)


def breaks(task: Task, artifact: Artifact) -> float:
    raise KeyError("the grader's own")
