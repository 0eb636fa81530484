"""What tasks start from, built before a run needs it."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from barchan.errors import BarchanError
from barchan.rollout.environments import BUILDS_AT_ONCE, recipes_of
from barchan.rollout.task import ScriptGrader, Task
from barchan.rollout.verifier import prepare_verifier
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.build import build


class Prepared(Struct, frozen=True, kw_only=True):
    """What became of one task.

    Attributes:
        images: Names of what its environment and its grader start from, made by recipes, and of what its grader
            installs.
        untested: Over what its grader installs nothing known to be good was graded: the task has no oracle.
    """

    task_id: str
    ready: bool
    images: tuple[str, ...] = ()
    seconds: float = 0.0
    why: str = ""
    untested: bool = False


async def prepare_all(
    client: AsyncClient,
    tasks: Sequence[Task],
    *,
    template: str = "debian",
    progress: Callable[[str], None] = lambda said: None,
) -> list[Prepared]:
    """Build what each task needs, a few at a time. One that fails keeps no other from being prepared.

    Args:
        template: The image of tasks without one of their own.
    """
    turns = asyncio.Semaphore(BUILDS_AT_ONCE)
    done = 0
    run_id = f"prepare_{secrets.token_hex(6)}"

    async def one(task: Task) -> Prepared:
        nonlocal done
        async with turns:
            began, why, images, untested = time.monotonic(), "", list[str](), False
            try:
                for recipe in recipes_of(task):
                    images.append(await build(client, recipe, progress=lambda said: _tell(task, said)))
                if isinstance(task.grader, ScriptGrader) and task.grader.installs:
                    _tell(task, "running the verifier for what it installs")
                if (kept := await prepare_verifier(client, task, run_id, template)) is not None:
                    images.append(kept)
                    untested = not task.oracle
            except BarchanError as error:
                why = str(error)
            done += 1
            return Prepared(
                task_id=task.task_id,
                ready=not why,
                images=tuple(images),
                seconds=round(time.monotonic() - began, 3),
                why=why,
                untested=untested,
            )

    def _tell(task: Task, said: str) -> None:
        progress(f"{done} of {len(tasks)} done; {task.task_id}: {said}")

    async with asyncio.TaskGroup() as group:
        building = [group.create_task(one(task)) for task in tasks]
    return [task.result() for task in building]
