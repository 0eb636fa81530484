"""Task sets by how a person names them."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from barchan.errors import InvalidSpec, TaskError
from barchan.rollout.task import Task
from barchan.sdk.dockerfile import BaseConfig

FORMS = "humaneval, a folder of Harbor tasks, swe:ROWS.jsonl, FILE.py, or module:function"


class SetOptions(NamedTuple):
    """What some sets need besides their name.

    Attributes:
        repos: Of `swe:`: the folder that the rows' repositories lie in.
        bases: Of Harbor folders: images of the node by the name that a task gives its base.
        variables: Of Harbor folders: values for the `${NAME}` of their variables.
        base_config: Of Harbor folders: what an image of the node starts with, for Dockerfiles on it.
    """

    repos: Path | None = None
    bases: Mapping[str, str] = {}
    variables: Mapping[str, str] = {}
    base_config: Callable[[str], BaseConfig | None] = lambda name: None


class TaskSet(NamedTuple):
    """Tasks, and what to call them together."""

    name: str
    tasks: list[Task]


def load_set(spec: str, options: SetOptions = SetOptions()) -> TaskSet:  # noqa: B008 (frozen)
    """The tasks that a name means, each of them read and checked.

    Raises:
        InvalidSpec: There is no such set, or an option does not belong to it.
        TaskError: It can't be used as it is; the message names the place.
        RequirementMissing: It comes with a package that is not installed.
    """
    kind, _, rows = spec.partition(":")
    path = Path(spec)
    if options.repos is not None and kind != "swe":
        raise InvalidSpec("--repos belongs to swe:ROWS.jsonl")
    if options.bases and not path.is_dir():
        raise InvalidSpec("--base belongs to a folder of Harbor tasks")
    # Imported only when used: each set has needs of its own.
    if spec == "humaneval":
        from barchan.rollout.tasksets.humaneval import load

        found = TaskSet("humaneval", load())
    elif kind == "swe" and rows:
        from barchan.rollout.tasksets.swe import load_swe

        found = TaskSet(Path(rows).stem, load_swe(Path(rows), repos=options.repos))
    elif path.is_dir():
        from barchan.rollout.tasksets.harbor import load_harbor

        loaded = load_harbor(path, bases=options.bases, variables=options.variables, base_config=options.base_config)
        found = TaskSet(path.resolve().name, loaded)
    elif kind.endswith(".py") or (rows and "/" not in kind):
        from barchan.rollout.tasksets.plain import load_plain

        found = TaskSet(Path(kind).stem, load_plain(spec))
    else:
        raise InvalidSpec(f"no task set {spec!r}; give {FORMS}")
    if not found.tasks:
        raise TaskError(f"task set {spec}: it holds no task")
    task_id, count = Counter(task.task_id for task in found.tasks).most_common(1)[0]
    if count > 1:
        raise TaskError(f"task set {spec}: {count} tasks are called {task_id}")
    return found
