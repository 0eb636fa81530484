"""A group of a run: attempts at one task from the same state, each ready, over, or void by itself."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Literal

from barchan.errors import Conflict, Preempted, TaskError
from barchan.rollout.attempt import Job
from barchan.rollout.live import AsyncRollout, ended, failed, opened
from barchan.rollout.shared import member_id
from barchan.rollout.task import Task

if TYPE_CHECKING:
    from barchan.rollout.run import AsyncRun

ATTEMPTS_MAX = 100
OPENING_MAX = 64  # at once, of one group; the node has bounds of its own


class AsyncGroup:
    """Iterate over it for its rollouts, in the order in which they are ready; each iteration gives all of them.

    A member that can't start is over and void. Leaving the iteration early ends nothing: `cancel` does. Where the run
    is put aside before all are ready, the iteration raises `Preempted`, and what was not begun has no verdict.
    """

    def __init__(self, run: "AsyncRun", name: str, key: str, task: Task, n: int, group_index: int) -> None:
        """Not called by users: `run.group()` gives groups."""
        self.name = name
        self.key = key
        self.task = task
        self.n = n
        self._run = run
        self._group_index = group_index
        self._starting: asyncio.Task[None] | None = None
        self._members: list[asyncio.Task[None]] = []
        self._ready: list[AsyncRollout] = []
        self._put_aside: Preempted | None = None
        self._changed = asyncio.Condition()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, n={self.n})"

    @property
    def _is_over(self) -> bool:
        """Whether every member has its verdict, or goes on in another process."""
        return len(self._ready) == self.n and all(
            rollout.verdict is not None or rollout.is_elsewhere for rollout in self._ready
        )

    async def __aiter__(self) -> AsyncGenerator[AsyncRollout, None]:
        given = 0
        while given < self.n:
            async with self._changed:
                while len(self._ready) <= given:
                    if self._put_aside is not None:
                        raise self._put_aside
                    await self._changed.wait()
            yield self._ready[given]
            given += 1

    async def cancel(self, reason: Literal["user", "stale", "surplus"] = "user") -> None:
        """Give every member up that is not over yet, also one that is in the middle of a call."""
        await asyncio.gather(*self._members)
        await asyncio.gather(*(_cancel(rollout, reason) for rollout in self._ready))

    # what the run calls

    async def _begin(self) -> None:
        """Make the environment, and begin to open the members. Repeating waits for the same start, unless it failed."""
        failed_before = self._starting is not None and self._starting.done() and not self._members
        if self._starting is None or failed_before:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _find_again(self) -> None:
        """Members that went on in another process and are over there: those have their verdict here, too."""
        folder = self._run._part.folder
        for place, rollout in enumerate(self._ready):
            if folder is not None and rollout.is_elsewhere:
                verdict = await asyncio.to_thread(folder.verdict, rollout.rollout_id)
                if verdict is not None:
                    self._ready[place] = ended(self._run, self._job(rollout.index, rollout.attempt), verdict)

    async def _stop(self) -> None:
        """Open no more members: the run is being left."""
        tasks = [*self._members, *([self._starting] if self._starting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _member(self, rollout_id: str) -> AsyncRollout | None:
        return next((rollout for rollout in self._ready if rollout.rollout_id == rollout_id), None)

    async def _start(self) -> None:
        await self._run._part.build(self.task)
        turns = asyncio.Semaphore(OPENING_MAX)
        self._members += [asyncio.create_task(self._open(index, turns)) for index in range(self.n)]

    async def _open(self, index: int, turns: asyncio.Semaphore) -> None:
        rollout: AsyncRollout | None = None
        async with turns:
            try:
                rollout = await self._latest(index)
            except Preempted as error:
                self._put_aside = error
            except Exception as error:  # the member's own boundary: the others go on
                rollout = await failed(self._run, self._job(index, 0), error)
        async with self._changed:
            self._ready += [rollout] if rollout is not None else []
            self._changed.notify_all()

    async def _latest(self, index: int) -> AsyncRollout:
        """One place of the group: the attempt that is under way or over, or else the next."""
        for attempt in range(ATTEMPTS_MAX):
            rollout = await self._attempt(self._job(index, attempt))
            if not rollout._is_used_up:
                break
        return rollout

    def _job(self, index: int, attempt: int) -> Job:
        rollout_id = member_id(self.name, index, attempt)
        return self._run._part.job(rollout_id, self.task, (self._group_index, index, attempt))

    async def _attempt(self, job: Job) -> AsyncRollout:
        folder, known = self._run._part.folder, self._run._part.live.get(job.rollout_id)
        if known is not None and not known.is_elsewhere:
            return known  # it was taken over here before its group was asked for
        if folder is not None:
            verdict = await asyncio.to_thread(folder.verdict, job.rollout_id)
            if verdict is not None:
                return ended(self._run, job, verdict)
            if folder.has_log(job.rollout_id):
                return await opened(self._run, job)
        why = await self._run._part.quarantine.why(self.task.task_id)
        if why is not None:
            raise TaskError(f"not begun, its task is quarantined: {why}", cause="task_quarantined")
        return await opened(self._run, job)


async def _cancel(rollout: AsyncRollout, reason: Literal["user", "stale", "surplus"]) -> None:
    try:
        await rollout.cancel(reason)
    except Conflict:
        return  # it goes on in another process, whose it is to cancel
