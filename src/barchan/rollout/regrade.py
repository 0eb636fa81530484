"""Grades what finished rollouts have left once more: after a grader was mended, or to see what it gives twice."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import InvalidSpec, NotFound
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.graders.base import Artifact
from barchan.rollout.pipeline import GradingPipeline
from barchan.rollout.record import RolloutRecord
from barchan.rollout.settings import RunSettings
from barchan.rollout.store import artifact_path
from barchan.rollout.task import Task
from barchan.rollout.verdict import TRUNCATING, ended_as, verdict_of_error, void
from barchan.sdk.aio.client import AsyncClient

Change = Literal["same", "changed", "newly void", "no longer void"]


class Regrading(Struct, frozen=True, kw_only=True):
    """A rollout's verdict as it was, and its record with the new one."""

    before: Verdict
    record: RolloutRecord

    @property
    def change(self) -> Change:
        return change_of(self.before, self.record.verdict)


def change_of(before: Verdict, after: Verdict) -> Change:
    """What is different for whoever looks at rewards."""
    if before.status == after.status:
        return "same" if before.reward == after.reward else "changed"
    return "newly void" if after.status == "void" else "no longer void"


def gradable(record: RolloutRecord) -> bool:
    """Whether it left something that can still be graded. A `shared` sandbox is gone, and who cancelled wanted none."""
    return record.artifact_kind not in (None, "shared") and record.verdict.status != "cancelled"


async def grade_again(
    client: AsyncClient,
    settings: RunSettings,
    folder: Path,
    records: Iterable[RolloutRecord],
    tasks: Mapping[str, Task],
    sink: Callable[[Regrading], None],
) -> None:
    """Grade each record's artifact by its task, in the pipeline that rollouts are graded in.

    Args:
        settings: Its `run_id` begins the new sandboxes' ids, and must be another each time.
        folder: Where the run's artifacts are.
        tasks: By task id; each record's is among them.
        sink: Gets each as soon as it is graded.
    """
    images = {image.name for image in await client.images()}
    pipeline = GradingPipeline(client, settings, workers=settings.graders, waiting_max=settings.graders)
    queue = iter(records)

    async def work() -> None:
        for record in queue:
            sink(await _again(pipeline, settings.run_id, folder, record, tasks[record.task_id], images))

    try:
        async with pipeline, asyncio.TaskGroup() as group:
            for _ in range(settings.graders):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _again(
    pipeline: GradingPipeline,
    run_id: str,
    folder: Path,
    record: RolloutRecord,
    task: Task,
    images: Collection[str],
) -> Regrading:
    timings, sandbox_ids = record.timings, record.grader_sandbox_ids
    if record.artifact_kind == "diff" and record.artifact not in images:
        gone = Evidence(
            source="node",
            fact="has no image of the artifact any more (a run keeps them with barchan rollout --keep-images)",
            value=record.artifact,
        )
        return Regrading(before=record.verdict, record=replace(record, verdict=void("platform", "image", (gone,))))
    try:
        job = pipeline.job(f"{run_id}-{record.rollout_id}", task, artifact_of(folder, record))
        verdict = ended_as(await pipeline.grade(job), ended_of(record.verdict))
        timings = replace(timings, grade_ms=round(job.grade_s * 1e3, 3), grade_queue_ms=round(job.queue_s * 1e3, 3))
        sandbox_ids = tuple(job.sandboxes.state.ids["grader"] + job.sandboxes.state.ids["control"])
    except Exception as error:  # the rollout's own boundary: whatever it was becomes its verdict
        verdict = verdict_of_error(error, "grade")
    after = replace(record, verdict=verdict, timings=timings, grader_sandbox_ids=sandbox_ids)
    return Regrading(before=record.verdict, record=after)


def ended_of(before: Verdict) -> Cause:
    """How the policy's own part ended, as far as the old verdict says."""
    return before.cause if before.cause in TRUNCATING or before.cause == "refusal" else "completed"


def artifact_of(folder: Path, record: RolloutRecord) -> Artifact:
    """What a finished rollout left behind.

    Raises:
        NotFound: The file that should hold it is gone.
        InvalidSpec: It can't be made from the record.
    """
    kind, text = record.artifact_kind, record.artifact
    if kind == "files":
        path = artifact_path(folder, record.rollout_id)
        try:
            return Artifact(kind="files", data=path.read_bytes())
        except OSError as error:
            raise NotFound(f"the artifact {path}: {error.strerror}") from error
    if kind is None or kind == "shared" or text is None:
        raise InvalidSpec(f"rollout {record.rollout_id} left nothing that can be graded")
    if kind == "diff":
        return Artifact(kind="diff", image=text)
    notes: tuple[Evidence, ...] = ()
    if "\ufffd" in text:
        notes = (Evidence(source="record", fact="the artifact was no text, and is not what it was", value=True),)
    return Artifact(kind=kind, data=text.encode(), notes=notes)
