"""Policies that need no model: they show that tasks, sandboxes and grading are sound."""

from barchan.rollout.policies.base import Answer
from barchan.rollout.task import Task


class OraclePolicy:
    """Answers with the known-good solution: anything but 1.0 is our fault or the task's."""

    name = "oracle"

    async def answer(self, task: Task, sample_index: int) -> Answer:
        return Answer(solution=task.reference)


class NopPolicy:
    """Answers with an empty body: anything but 0.0 means that the checks check nothing."""

    name = "nop"

    async def answer(self, task: Task, sample_index: int) -> Answer:
        return Answer(solution=f"{task.prompt}    pass\n")
