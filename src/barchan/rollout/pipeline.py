"""Grading as a stage of its own: a bounded number at once, a bounded number waiting, its own times.

A rollout comes here when its agent's sandbox is gone, so a slow grader holds none. Whoever opens rollouts waits for
`room` first, so that artifacts don't pile up faster than they are graded.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from msgspec import Struct

from barchan.errors import Conflict, InvalidSpec, SandboxLost, TransportError
from barchan.model.verdict import Verdict
from barchan.rollout.graders.base import Artifact
from barchan.rollout.grading import Controls, GradeJob, grade
from barchan.rollout.percentiles import Percentiles, percentiles
from barchan.rollout.ports import Client, Log, NoLog
from barchan.rollout.rules.causes import RULES
from barchan.rollout.sandboxes import Sandboxes, SandboxesState
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Task
from barchan.rollout.verdict import verdict_of_error

TIMES_KEPT = 4096
CONTROLS_MAX = 4096


class PipelineStatistics(Struct, frozen=True, kw_only=True):
    """`waiting` and `grading` now, `done` since the start; the times are those of the last 4096."""

    waiting: int
    grading: int
    done: int
    queue_ms: Percentiles
    grade_ms: Percentiles


class GradingPipeline:
    """Grades, in the tasks of those who ask. As a context it is left when the last grading has ended.

    Args:
        workers: Gradings at once; each holds a sandbox of its own, at times two.
        waiting_max: Jobs that wait for a worker. Those who come when so many wait stand in line before that.
    """

    def __init__(self, client: Client, settings: RunSettings, *, workers: int, waiting_max: int) -> None:
        if workers < 1 or waiting_max < 1:
            raise InvalidSpec(f"a grading pipeline has workers={workers} and waiting_max={waiting_max}: at least 1")
        self._client = client
        self._settings = settings
        self._workers = workers
        self._waiting_max = waiting_max
        self._waiting = self._grading = self._done = 0
        self._is_open = True
        self._changed = asyncio.Event()
        self._controls = Controls(CONTROLS_MAX)
        self._queue_ms: deque[float] = deque(maxlen=TIMES_KEPT)
        self._grade_ms: deque[float] = deque(maxlen=TIMES_KEPT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._tell()
        await self._until(lambda: self._grading == 0)

    def job(self, rollout_id: str, task: Task, artifact: Artifact, log: Log | None = None) -> GradeJob:
        """A job for an artifact that has no rollout any more."""
        sandboxes = Sandboxes(self._client, self._settings, rollout_id, state=SandboxesState())
        return GradeJob(rollout_id=rollout_id, task=task, artifact=artifact, sandboxes=sandboxes, log=log or NoLog())

    async def grade(self, job: GradeJob) -> Verdict:
        """The verdict on an artifact, as if the attempt had been completed. If cancelled, its sandboxes are ended.

        Raises:
            BarchanError: What the platform, the model endpoint or the task failed to do.
            Conflict: The pipeline was left.
        """
        asked = time.monotonic()
        await self._start()
        started = time.monotonic()
        job.queue_s, capacity_s = started - asked, job.sandboxes.state.queue_s
        try:
            return await grade(job, self._settings, self._controls)
        finally:
            job.grade_s = time.monotonic() - started - (job.sandboxes.state.queue_s - capacity_s)
            self._queue_ms.append(job.queue_s * 1e3)
            self._grade_ms.append(job.grade_s * 1e3)
            self._done += 1
            self._grading -= 1
            self._tell()

    async def room(self) -> None:
        """Wait until fewer than `waiting_max` jobs wait."""
        await self._until(lambda: self._waiting < self._waiting_max)

    def statistics(self) -> PipelineStatistics:
        return PipelineStatistics(
            waiting=self._waiting,
            grading=self._grading,
            done=self._done,
            queue_ms=percentiles(self._queue_ms),
            grade_ms=percentiles(self._grade_ms),
        )

    async def _start(self) -> None:
        await self.room()
        self._waiting += 1
        try:
            await self._until(lambda: self._grading < self._workers or not self._is_open)
            if not self._is_open:
                raise Conflict("the grading pipeline was left")
            self._grading += 1
        finally:
            self._waiting -= 1
            self._tell()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._changed.wait()

    def _tell(self) -> None:
        """Have all who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()


async def graded(job: GradeJob, pipeline: GradingPipeline | None, client: Client, settings: RunSettings) -> Verdict:
    """Grade; once more, where the platform loses the grader or the way to it, and the artifact is still there.

    Args:
        pipeline: None: at once.

    Raises:
        BarchanError: What the platform, the model endpoint or the task failed to do.
    """
    try:
        return await _graded_once(job, pipeline, client, settings)
    except (TransportError, SandboxLost) as error:
        if job.artifact.kind == "shared" or RULES[verdict_of_error(error, "grade").cause].retry != "resume":
            raise
    job.sandboxes.begin_grading_anew()
    return await _graded_once(job, pipeline, client, settings)


async def _graded_once(
    job: GradeJob, pipeline: GradingPipeline | None, client: Client, settings: RunSettings
) -> Verdict:
    if pipeline is not None:
        return await pipeline.grade(job)
    async with GradingPipeline(client, settings, workers=1, waiting_max=1) as alone:
        return await alone.grade(job)
