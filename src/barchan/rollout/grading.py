"""From an artifact to a grading, in sandboxes where the agent never was."""

from barchan.rollout.graders.functions import grade, with_control
from barchan.rollout.sandboxes import Sandboxes
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import FunctionGrader, Task
from barchan.rollout.verdict import Grading, judge, needs_control


class Grader:
    """Grades the artifacts of one rollout."""

    def __init__(self, sandboxes: Sandboxes, settings: RunSettings, task: Task) -> None:
        self._sandboxes = sandboxes
        self._limits = settings.grading
        assert isinstance(task.grader, FunctionGrader)
        self._checks = task.grader

    async def grade(self, source: str) -> Grading:
        """Grade; where that leaves open whose doing it was, grade the known-good solution, and then the candidate
        once more.

        Each grading gets a sandbox of its own, so that a candidate can't spoil its control. The second look keeps a
        moment's stall of the host from becoming a zero.
        """
        grading = await self._once(source)
        if not needs_control(grading):
            return grading
        control = judge(await self._once(self._checks.reference))
        if control.reward != 1.0:
            return with_control(grading, passed=False)
        return with_control(await self._once(source), passed=True)

    async def _once(self, source: str) -> Grading:
        async with self._sandboxes.opened("grader") as sandbox:
            return await grade(sandbox, self._checks, source, self._limits)
