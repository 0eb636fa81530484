"""Runs tasks x group as rollouts, a bounded number at once; each is scored, voided or cancelled alone."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from msgspec.structs import asdict

from barchan.errors import InvalidSpec
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.calls import Observation
from barchan.rollout.policies.base import Policy, Step
from barchan.rollout.ports import Client, Log
from barchan.rollout.record import RolloutRecord
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Task
from barchan.rollout.tools import Toolbox


async def play(rollout: Rollout, policy: Policy) -> None:
    """Let a policy drive an opened rollout to its end."""
    observation = await rollout.observe()
    step = Step()
    while observation.over is None and not step.is_last:
        step = await _step(policy, rollout, observation)
        if step.completion is not None:
            await rollout.record(**asdict(step.completion))
        if step.tool_calls or not step.is_last:
            observation = await rollout.act(step.tool_calls)
    await rollout.finish(step.cause)


async def _step(policy: Policy, rollout: Rollout, observation: Observation) -> Step:
    step = await policy.step(rollout.task, rollout.sample_index, observation)
    if not isinstance(step, Step):  # a user's own class, that no type checker may have seen
        raise InvalidSpec(f"policy {policy.name}: step() gave a {type(step).__name__}, not a Step")
    return step


class Runner:
    """One run. `sink` gets each record as soon as its rollout is over, and must not block.

    Raises:
        InvalidSpec: A task names a tool that is not there.
    """

    def __init__(
        self,
        client: Client,
        tasks: Sequence[Task],
        policy: Policy,
        settings: RunSettings,
        sink: Callable[[RolloutRecord], None],
        *,
        open_log: Callable[[Job], Awaitable[Log]] | None = None,
    ) -> None:
        self._client = client
        self._policy = policy
        self._settings = settings
        self._sink = sink
        self._open_log = open_log
        self._toolboxes = {(task.tools, task.artifact): Toolbox(task) for task in tasks}
        self._jobs = self._all_jobs(tasks)
        self.rollouts_total = len(tasks) * settings.group

    def _all_jobs(self, tasks: Sequence[Task]) -> Iterator[Job]:
        """Group by group, so that a run cut short has whole groups."""
        count = 0
        for group_index, task in enumerate(tasks):
            for sample_index in range(self._settings.group):
                yield Job(f"{self._settings.run_id}-{count:06d}", task, sample_index, group_index)
                count += 1

    async def run(self) -> None:
        """Run them all. Cancelling frees the sandboxes of the unfinished ones and records these as cancelled.

        Raises:
            Exception: What the sink raised; it ends the run, like cancelling.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._settings.concurrency, self.rollouts_total)):
                    group.create_task(self._work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _work(self) -> None:
        for job in self._jobs:
            rollout = Rollout(
                self._client,
                self._settings,
                job,
                policy_name=self._policy.name,
                toolbox=self._toolboxes[job.task.tools, job.task.artifact],
                open_log=self._open_log,
            )
            try:
                await rollout.open()
                await play(rollout, self._policy)
            except asyncio.CancelledError:
                await rollout.cancel()
                self._sink(rollout.row())
                raise
            except Exception as error:  # the rollout's own boundary: whatever it was becomes its record
                await rollout.fail(error)
            self._sink(rollout.row())
