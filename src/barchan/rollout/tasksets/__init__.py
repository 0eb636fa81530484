"""Task sets by name."""

from collections.abc import Callable

from barchan.rollout.task import Task
from barchan.rollout.tasksets import humaneval

TASK_SETS: dict[str, Callable[[], list[Task]]] = {"humaneval": humaneval.load}
