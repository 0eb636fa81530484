"""A rollout of a run, as its driver holds it: it can be sent to another process, and be found again by its id."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from barchan.errors import Conflict
from barchan.model.verdict import Cause, Verdict
from barchan.rollout import carried
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.calls import Observation, ToolCall
from barchan.rollout.ports import Log
from barchan.rollout.record import Completion
from barchan.rollout.resuming.bodies import is_abandoned
from barchan.rollout.rules.control import quarantined
from barchan.rollout.shared import POLICY, SharedFolder
from barchan.rollout.state import AttemptState
from barchan.rollout.store import opened_log
from barchan.trajectory.writer import TrajectoryWriter

if TYPE_CHECKING:
    from barchan.rollout.run import AsyncRun


class AsyncRollout:
    """One attempt of a group: observe it, act in it, record what was sampled, finish it. Given by a group or a run.

    One call at a time. It pickles between two calls, and goes on in the process that it is sent to; from that process's
    first call on, this one's calls raise `Conflict`, where the run has a folder.

    Attributes:
        index: Its place in the group; `attempt` says how often that was tried before.
        verdict: None while it is not over.
    """

    def __init__(self, run: "AsyncRun", job: Job, state: AttemptState | None = None) -> None:
        self.rollout_id = job.rollout_id
        self.task = job.task
        self.index = job.sample_index
        self.attempt = job.attempt
        self._run = run
        self._part = run._part
        self._job = job
        self._writer: TrajectoryWriter | None = None
        self._is_busy = False
        self._is_closed = False
        self._telling = asyncio.Lock()
        self._is_lost = False  # to another process
        self._is_told = False  # whether the results have it
        self._carried = state  # not yet gone on with
        self._rollout = self._made(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rollout_id!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_busy:
            raise Conflict(f"rollout {self.rollout_id} is in the middle of a call: send it between two")
        return _revive, (self._run, self._job, carried.dump(self._rollout.state))

    def _made(self, state: AttemptState | None) -> Rollout:
        return Rollout(
            self._part.client,
            self._part.settings,
            self._job,
            policy_name=POLICY,
            toolbox=self._part.toolbox(self.task),
            open_log=self._open_log if self._part.has_folder else None,
            state=state,
        )

    async def _open_log(self, job: Job) -> Log:
        if self._writer is None:
            folder = self._part.folder
            assert folder is not None
            self._writer = await opened_log(lambda: folder.log(job))
        return self._writer

    @property
    def verdict(self) -> Verdict | None:
        return None if self._is_lost or self._rollout.is_relieved else self._rollout.verdict

    @property
    def pending(self) -> tuple[Completion, ...]:
        """Model calls that were recorded and not acted on yet: whoever goes on with it need not sample them again."""
        return self._rollout.pending

    @property
    def is_resumed(self) -> bool:
        """Whether it went on here where its log had left it."""
        return self._rollout.is_resumed

    @property
    def sandbox_id(self) -> str | None:
        """The agent's sandbox, while it lives."""
        return self._rollout.state.sandbox_id

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process goes on with it, as far as the run's folder tells."""
        if not self._is_lost and self._was_taken_over():
            self._is_lost = True
            self._part.note_over(self)
        return self._is_lost

    # what a driver calls

    async def observe(self) -> Observation:
        """What a policy knows before its next turn: messages, tool schemas, limits left."""
        async with self._turn() as rollout:
            return await rollout.observe()

    async def record(
        self,
        *,
        text: str = "",
        prompt_ids: Sequence[int] = (),
        completion_ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        policy_version: str | int | None = None,
        **more: Any,
    ) -> None:
        """Keep a model call; its text is said in the next turn, its completion tokens count towards the limit.

        Args:
            more: What else `barchan.rollout.record.Completion` has.

        Raises:
            InvalidSpec: Ids and log-probs of different lengths.
            Conflict: The rollout has ended, or goes on in another process.
        """
        async with self._turn() as rollout:
            await rollout.record(
                text=text,
                prompt_ids=prompt_ids,
                completion_ids=completion_ids,
                logprobs=logprobs,
                policy_version=policy_version,
                **more,
            )

    async def act(
        self, tool_calls: Sequence[ToolCall | Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> Observation:
        """Take a turn: carry the calls out, one after the other. One that can't be carried out is told, not raised.

        Args:
            tool_calls: Ours, or as a chat completion's message has them.
            timeout_s: For each call, within what the task allows.

        Raises:
            Conflict: The rollout is over, as the last observation said, or goes on in another process.
        """
        async with self._turn() as rollout:
            return await rollout.act(tool_calls, timeout_s=timeout_s)

    async def finish(self, cause: Cause | None = None) -> Verdict:
        """Take the artifact out, end the agent's sandbox, grade elsewhere. Repeating gives the same verdict."""
        async with self._turn() as rollout:
            return await rollout.finish(cause)

    async def fail(self, error: Exception) -> Verdict:
        """The driver can't go on: void, by the model's fault for a `ModelError`, else by the caller's."""
        async with self._turn() as rollout:
            return await rollout.fail(error)

    async def cancel(self, reason: Literal["user", "stale", "surplus"] = "user") -> Verdict:
        """Give the rollout up, also in the middle of another call; its sandbox is ended."""
        if self._is_busy and self._carried is None:
            self._check()
            verdict = await self._rollout.cancel(reason)
            await self._tell()
            return verdict
        async with self._turn() as rollout:
            return await rollout.cancel(reason)

    # what the run and the group call

    async def _open(self) -> None:
        """Begin it. If that fails, it is over and void.

        Raises:
            Conflict: It has gone on in another process meanwhile.
        """
        async with self._turn() as rollout:
            await rollout.open()

    async def _close(self) -> None:
        """Let go of the log; the rollout stays as it is, for its sandbox to end with the lease."""
        self._part.note_over(self)
        self._is_closed = True
        if not self._is_busy:
            await self._close_log()

    async def _close_log(self) -> None:
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[Rollout]:
        """One call. What it changed is kept, or told, when it is over."""
        if self._is_busy:
            raise Conflict(f"rollout {self.rollout_id} is in the middle of another call")
        self._is_busy = True
        try:
            await self._part.ensure_open()
            await self._wake()
            self._check()
            yield self._rollout
            await self._tell()
        finally:
            self._is_busy = False
            if self._is_closed:  # the run was left meanwhile
                await self._close_log()

    @property
    def _is_used_up(self) -> bool:
        """Whether this attempt is over without having been one, so that its place is open for the next: its driver left
        it, or (where only the node knows) an earlier asking made its sandbox, which has ended since.
        """
        verdict, stage = self.verdict, self._rollout.stage
        if verdict is None or self._part.has_folder:
            return verdict is not None and is_abandoned(verdict)
        return stage == "create" and verdict.cause in ("sandbox_expired", "sandbox_lost")

    def _check(self) -> None:
        """Refuse to act for a rollout that another process goes on with."""
        if self.is_elsewhere:
            raise Conflict(f"rollout {self.rollout_id} goes on in another process", rollout_id=self.rollout_id)

    def _was_taken_over(self) -> bool:
        if self._rollout.is_relieved:
            return True
        if self._writer is None or self._rollout.verdict is not None:
            return False
        try:
            self._writer.check()
        except Conflict:
            self._writer.let_go()
            return True
        return False

    async def _wake(self) -> None:
        """Go on with what was carried here: from now on whoever had it before can't.

        Raises:
            Conflict: It has gone on in another process since.
            SandboxExpired, SandboxLost: Its sandbox has ended, and the run has no folder.
        """
        state, folder = self._carried, self._part.folder
        if state is None:
            return
        if state.verdict is None:
            if folder is None:
                await self._rollout.resume()
            else:  # from its log, which also knows of a call that was given up
                if self._writer is None:
                    self._writer = await self._taken_over(folder, state.head_hash)
                self._rollout = self._made(None)
                await self._rollout.open()
        self._carried = None
        self._part.note_begun(self)

    async def _taken_over(self, folder: SharedFolder, head_hash: str) -> TrajectoryWriter:
        """The log of a rollout whose state is known, from there on.

        Raises:
            Conflict: It has gone on since, in another process.
        """
        try:
            return await opened_log(lambda: folder.log_as_of(self.rollout_id, head_hash))
        except Conflict as error:
            why = f"rollout {self.rollout_id} has gone on in another process since"
            raise Conflict(why, rollout_id=self.rollout_id) from error

    async def _tell(self) -> None:
        """Keep the record of what has ended. What has not is in its log."""
        async with self._telling:
            if self._rollout.verdict is not None:
                await self._rollout.end(self._rollout.verdict)  # waits for an end that is under way
            await self._tell_once()

    async def _tell_once(self) -> None:
        self._check()
        if self.verdict is not None:
            if self._part.live.get(self.rollout_id) is self:
                await self._part.look(self._rollout.row(), self.task)
            self._part.note_over(self)
            if why := quarantined(self.verdict):
                await self._part.quarantine.add(self.task.task_id, why)
        folder = self._part.folder
        if folder is None or self._is_told or self.verdict is None:
            return
        await asyncio.to_thread(_end, folder, self._rollout)
        self._is_told = True


def _end(folder: SharedFolder, rollout: Rollout) -> None:
    artifact = rollout.artifact
    if artifact is not None and artifact.kind == "files":
        folder.add_artifact(rollout.rollout_id, artifact.data)
    folder.add(rollout.row())


def _revive(run: "AsyncRun", job: Job, state: bytes) -> AsyncRollout:
    return AsyncRollout(run, job, carried.load(state))


def ended(run: "AsyncRun", job: Job, verdict: Verdict) -> AsyncRollout:
    """A rollout that is over, as the run's folder says."""
    rollout = AsyncRollout(run, job)
    rollout._rollout.state.verdict, rollout._rollout.state.over = verdict, verdict.cause
    rollout._is_told = True
    return rollout


async def opened(run: "AsyncRun", job: Job) -> AsyncRollout:
    """A rollout that begins here, or that an earlier asking began: as its log leaves it, or over and void where nobody
    can go on with it, since its sandbox has ended and can't be made again.

    One that meanwhile has gone on in another process says so by each of its calls.
    """
    rollout = AsyncRollout(run, job)
    run._part.note_begun(rollout)
    try:
        await rollout._open()
    except BaseException as error:
        await rollout._close()
        is_elsewhere = rollout._is_lost or (isinstance(error, Conflict) and rollout._rollout.is_relieved)
        if not is_elsewhere:
            raise
    return rollout


async def failed(run: "AsyncRun", job: Job, error: Exception) -> AsyncRollout:
    """A member that could not even begin: over and void, told to whoever iterates, and to nobody else."""
    rollout = AsyncRollout(run, job)
    rollout._is_told = True
    await rollout._rollout.fail(error)
    return rollout
