"""What the tasks of a run start from, made before their first rollout needs it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from barchan.errors import Preempted
from barchan.rollout.task import ScriptGrader, Task, TestsGrader
from barchan.sdk.recipe import Recipe

BUILDS_AT_ONCE = 2  # more would only take the processors from the rollouts that go on beside them

Build = Callable[[Recipe], Awaitable[object]]


def recipes_of(task: Task) -> list[Recipe]:
    """What has to be built for a task: where its agent works, and where it is graded."""
    of_grader = task.grader.recipe if isinstance(task.grader, ScriptGrader | TestsGrader) else None
    return [recipe for recipe in (task.environment.recipe, of_grader) if recipe is not None]


async def prepare(
    tasks: Iterable[tuple[int, Task]],
    build: Build,
    ready: Callable[[int], None],
    failed: Callable[[int, Exception], Awaitable[None]],
) -> None:
    """Build what the tasks need, in their order, a few at a time, and tell of each as it is done. A task that needs
    nothing waits for no other.

    Args:
        tasks: Each with its index, by which it is told of.

    Raises:
        Preempted: The run was put aside; no task is at fault.
    """
    waiting = []
    for index, task in tasks:
        if recipes_of(task):
            waiting.append((index, task))
        else:
            ready(index)
    queue = iter(waiting)

    async def work() -> None:
        for index, task in queue:
            try:
                for recipe in recipes_of(task):
                    await build(recipe)
            except Preempted:
                raise
            except Exception as error:  # the task's own boundary: its rollouts are void by it
                await failed(index, error)
            else:
                ready(index)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(BUILDS_AT_ONCE, len(waiting))):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
