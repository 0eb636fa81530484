"""Runs tasks x group as rollouts, a bounded number at once; each is scored, voided or cancelled alone."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from barchan.rollout.attempt import Job, Rollout, RunSettings
from barchan.rollout.policies.base import Policy
from barchan.rollout.ports import Client
from barchan.rollout.record import RolloutRecord
from barchan.rollout.task import Task
from barchan.rollout.verdict import cancelled, verdict_of_error


class Runner:
    """One run. `sink` gets each record as soon as its rollout is over, and must not block."""

    def __init__(
        self,
        client: Client,
        tasks: Sequence[Task],
        policy: Policy,
        settings: RunSettings,
        sink: Callable[[RolloutRecord], None],
    ) -> None:
        self._client = client
        self._policy = policy
        self._settings = settings
        self._sink = sink
        self._jobs = self._all_jobs(tasks)
        self.rollouts_total = len(tasks) * settings.group

    def _all_jobs(self, tasks: Sequence[Task]) -> Iterator[Job]:
        """Group by group, so that a run cut short has whole groups."""
        count = 0
        for task in tasks:
            for sample_index in range(self._settings.group):
                yield Job(f"{self._settings.run_id}-{count:06d}", task, sample_index)
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
            rollout = Rollout(self._client, self._policy, self._settings, job)
            try:
                verdict = await rollout.run()
            except asyncio.CancelledError:
                self._sink(rollout.record(cancelled(rollout.stage)))
                raise
            except Exception as error:  # the rollout's own boundary: whatever it was becomes its record
                verdict = verdict_of_error(error, rollout.stage)
            self._sink(rollout.record(verdict))
