"""Carries a run out: a node, a policy, the runner, and a folder that keeps what comes of it."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import barchan
from barchan.cli.common import Common
from barchan.cli.rollout_report import Progress
from barchan.errors import NotFound
from barchan.model.node import Budget
from barchan.rollout.policies import Policy
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Earlier, Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.store import RunFolder
from barchan.rollout.summary import Summary, Tally
from barchan.rollout.table import TaskRow
from barchan.rollout.task import Task
from barchan.sdk.aio.client import AsyncClient

TICK_S = 1.0
ASKING_MAX = 8  # a blob store may have to be asked for each image


class LeaseTerms(NamedTuple):
    """On what terms the run's lease is held, as `client.run()` takes them."""

    priority: int
    grace_s: float
    budget: Budget


async def carry_out(
    tasks: Sequence[Task],
    make_policy: Callable[[], AbstractAsyncContextManager[Policy]],
    settings: RunSettings,
    store: RunFolder,
    terms: LeaseTerms,
    common: Common,
) -> tuple[Summary, list[TaskRow], bool]:
    """The run's summary, by task too, and whether it was interrupted. The first interrupt ends it in order, a second
    one at once.
    """
    tally = Tally()
    for record in store.earlier:
        tally.add(record)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    interrupted, started, begun = False, time.monotonic(), 0
    async with (
        barchan.connect_async(**common.connection) as connected,
        connected.run(settings.run_id, **terms._asdict()) as run,
        make_policy() as policy,
    ):
        client = run.client  # its sandboxes are under the run's own lease
        await _require_images(client, tasks, settings.template)
        for role in ("grader", "control"):  # what a process that was killed has left of them, nobody waits for
            await client.kill(labels={"run": settings.run_id, "role": role})
        progress = Progress(tally)

        def keep(record: RolloutRecord) -> None:
            nonlocal begun
            begun += 1
            store.add(record)
            tally.add(record)
            progress.update()

        runner = Runner(
            client,
            tasks,
            policy,
            settings,
            keep,
            open_log=store.open_log,
            keep_artifact=store.add_artifact,
            notice=progress.say,
            earlier=_earlier(store),
        )
        with progress.shown(runner.rollouts_total, lambda: runner.activity):
            ticking = asyncio.create_task(_tick(progress))
            try:
                await runner.run()
            except asyncio.CancelledError:
                task.uncancel()
                interrupted = True
            finally:
                ticking.cancel()
    summary = tally.summary(
        run_id=settings.run_id,
        task_set=store.info.task_set,
        policy=store.info.policy,
        wanted=runner.rollouts_total,
        wall_s=time.monotonic() - started,
        out=str(store.path),
        waits=runner.waits,
        begun=begun,
        resumed=runner.resumed,
        answered=runner.answered,
        stopped=runner.stopped.message if runner.stopped is not None else "",
    )
    store.finish(summary, tally.rows)
    return summary, tally.rows, interrupted


def _earlier(store: RunFolder) -> Earlier:
    scored = {(row.group_index, row.sample_index) for row in store.earlier if row.verdict.status == "scored"}
    return Earlier(frozenset(scored), store.rollout_ids)


async def _tick(progress: Progress) -> None:
    """Shows that time goes by where rollouts take long."""
    while True:
        await asyncio.sleep(TICK_S)
        progress.update()


async def _require_images(client: AsyncClient, tasks: Sequence[Task], template: str) -> None:
    """Better one line now than every rollout void."""
    first: dict[str, Task] = {}
    for task in tasks:
        recipe = task.environment.recipe
        first.setdefault(recipe.origin if recipe is not None else template, task)
    turns = asyncio.Semaphore(ASKING_MAX)

    async def require(name: str, task: Task) -> None:
        async with turns:
            try:
                await client.image(name)
            except NotFound as error:
                have = str(error).partition(" (try: ")[0]
                build = "barchan image build debian" if name == "debian" else "barchan image list, --base or --template"
                raise NotFound(f"task {task.task_id}: {have} (try: {build})") from error

    try:
        async with asyncio.TaskGroup() as group:
            for name, task in first.items():
                group.create_task(require(name, task))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
