"""From one artifact to its verdict: graded, and, where that gave no answer, compared with a known-good one."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from msgspec.structs import asdict, replace

from barchan.errors import GuestError, SandboxLost, TaskError
from barchan.model.verdict import Evidence, Verdict
from barchan.rollout.artifact import take, ungraded
from barchan.rollout.doing import logged
from barchan.rollout.graders import grader_of
from barchan.rollout.graders.base import Artifact, Grading
from barchan.rollout.integrity.canary import proof_in
from barchan.rollout.integrity.imported import signs_of_artifact
from barchan.rollout.oracle import put_oracle_files
from barchan.rollout.ports import Log, NoLog
from barchan.rollout.rules.control import agreed, disagree
from barchan.rollout.sandboxes import Sandboxes
from barchan.rollout.services import start_services
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import FunctionGrader, Task, TestsGrader
from barchan.rollout.tools.base import Workspace
from barchan.rollout.tools.toolbox import Toolbox
from barchan.rollout.verdict import Control, control_of, decided, finding_of, is_undecided, scored, verdict_of_error

CONTROL_AGE_S_MAX = 600.0


@dataclass(kw_only=True)
class GradeJob:
    """One artifact to grade.

    Attributes:
        sandboxes: Makes the graders' sandboxes and keeps their times.
        queue_s, grade_s: How long it waited for a free grader, and how long the grading took, once it is over; without
            waiting for room on the node, which `sandboxes` counts.
    """

    rollout_id: str
    task: Task
    artifact: Artifact
    sandboxes: Sandboxes
    log: Log
    queue_s: float = 0.0
    grade_s: float = 0.0


class Controls:
    """Outcomes of known-good artifacts, by task.

    A good one is taken as good for a while and no longer, since it says that this node can grade this task. Any other
    counts only for those who waited for it: else one bad moment of the node would make every later submission void
    that chooses to hang.
    """

    def __init__(self, tasks_max: int) -> None:
        self._tasks_max = tasks_max
        self._made: OrderedDict[str, tuple[Control, float]] = OrderedDict()
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def of(self, task: Task, make: Callable[[], Awaitable[Control]]) -> Control:
        """The control of a task; made by the first who asks, while the others wait."""
        asked = time.monotonic()
        lock = self._making.setdefault(task.task_id, asyncio.Lock())
        async with lock:
            control, made = self._made.get(task.task_id, (None, 0.0))
            if control is not None and is_valid(control, made=made, asked=asked, now=time.monotonic()):
                return control
            control = await make()
            self._made[task.task_id] = (control, time.monotonic())
            self._made.move_to_end(task.task_id)
            while len(self._made) > self._tasks_max:
                self._made.popitem(last=False)
            return control


def is_valid(control: Control, *, made: float, asked: float, now: float) -> bool:
    """Whether a control made then still counts for who asked then; times are monotonic seconds."""
    return made >= asked or (control.outcome == "good" and now - made < CONTROL_AGE_S_MAX)


async def grade(job: GradeJob, settings: RunSettings, controls: Controls) -> Verdict:
    """The verdict on an artifact, as if the attempt had been completed.

    Raises:
        BarchanError: What the platform, the model endpoint or the task failed to do.
    """
    grading = Grading(task=job.task, settings=settings, sandboxes=job.sandboxes, log=job.log)
    asked = {"grader": type(job.task.grader).__struct_config__.tag, "artifact_kind": job.artifact.kind}
    told = {"artifact": job.artifact.image or job.artifact.data} if job.artifact.sandbox is None else {}
    verdict = await logged(
        job.log,
        "grade",
        {**asked, **told},
        lambda: _grade(job, grading, controls),
        lambda verdict: {**asdict(verdict), "sandbox_ids": job.sandboxes.state.ids["grader"]},
    )
    signs = await asyncio.to_thread(signs_of_artifact, job.task, job.artifact)
    return replace(verdict, evidence=verdict.evidence + job.artifact.notes + signs)


async def _grade(job: GradeJob, grading: Grading, controls: Controls) -> Verdict:
    if proof := proof_in(job.task, job.artifact.data):
        return scored(0.0, "integrity_violation", False, proof)
    given = [await _once(grading, job.artifact)]
    repeats = grading.settings.gradings if job.artifact.sandbox is None else 1
    while given[-1].reward is not None and len(given) < repeats:
        given.append(await _once(grading, job.artifact))
    if is_undecided(given[-1]):
        first = given.pop()
        control = await controls.of(job.task, lambda: _control(job, grading))
        second = await _once(grading, job.artifact) if control.outcome == "good" else None
        given.append(decided(first, control, second))
    return agreed(given, await _repeated_control(job, grading, repeats) if disagree(given) else ())


async def _once(grading: Grading, artifact: Artifact) -> Verdict:
    """One grading. What the artifact does to the grader's sandbox is one more way of giving no answer."""
    try:
        return await grader_of(grading.task.grader).grade(grading, artifact)
    except GuestError as error:
        return verdict_of_error(error, "grade")
    except SandboxLost as error:
        if finding_of(error, "grade") != "grading_broke":
            raise
        return verdict_of_error(error, "grade")


async def _repeated_control(job: GradeJob, grading: Grading, times: int) -> list[Verdict]:
    """Whether the task's own known-good artifact is graded the same each time."""
    made = [await _control(job, grading) for _ in range(times)]
    return [control.verdict for control in made if control.verdict is not None]


async def _control(job: GradeJob, grading: Grading) -> Control:
    """Grade what is known to be good as submissions are: the spec's own, or what the oracle leaves behind."""
    grader = job.task.grader
    if isinstance(grader, FunctionGrader):
        return control_of(await _once(grading, Artifact(kind="file", data=grader.reference.encode())))
    if isinstance(grader, TestsGrader) and grader.reference:
        return control_of(await _once(grading, Artifact(kind="patch", data=grader.reference.encode())))
    if not job.task.oracle:
        return Control(outcome="none")
    try:
        return control_of(await grade_oracle(grading, job.rollout_id))
    except TaskError as error:
        return Control(outcome="wrong", verdict=verdict_of_error(error, "grade"))


async def grade_oracle(grading: Grading, rollout_id: str) -> Verdict:
    """Play a task's oracle in a fresh environment, and grade what it leaves.

    Args:
        rollout_id: Names the artifact where that is an image, for as long as it is graded.

    Raises:
        BarchanError: What the platform or the task failed to do.
    """
    task = grading.task
    async with grading.sandboxes.opened("control", task.environment) as sandbox:
        await start_services(sandbox, task.environment.services, NoLog())
        await put_oracle_files(sandbox, task)
        workspace, toolbox = Workspace(sandbox, task.limits.output_chars_max), Toolbox(task)
        for call in task.oracle:
            if (await toolbox.call(workspace, call, task.limits.call_s_max)).submits:
                break
        taken = await take(workspace, task, f"control-{rollout_id}")
        if isinstance(taken, Evidence):
            return ungraded(taken, "completed")
        try:
            return await _once(grading, taken)
        finally:
            if taken.image:
                await grading.sandboxes.remove_image(taken.image)
