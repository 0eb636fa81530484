"""One rollout as whoever drives it sees it: observe, record, act, finish or cancel.

Our own runner and a trainer with generation of its own drive it by the same methods. What fails on the platform's
side is no exception here: the rollout is then over, and `finish` gives the void verdict with its evidence.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from msgspec.structs import asdict, replace

from barchan.errors import BarchanError, BlobCorrupt, Conflict, InvalidSpec, Preempted
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.agent import Agent
from barchan.rollout.artifact import ungraded
from barchan.rollout.calls import Observation, ToolCall, parse_calls
from barchan.rollout.graders.base import Artifact
from barchan.rollout.grading import GradeJob
from barchan.rollout.limits import Meter
from barchan.rollout.logged import FencedLog
from barchan.rollout.pipeline import GradingPipeline, graded
from barchan.rollout.ports import Client, Log, NoLog
from barchan.rollout.prompts import opening
from barchan.rollout.record import Completion, RolloutRecord
from barchan.rollout.resuming.bodies import (
    LOST,
    abandoned,
    check_completion,
    keep_artifact,
    sampled_body,
)
from barchan.rollout.sandboxes import Sandboxes
from barchan.rollout.settings import RunSettings
from barchan.rollout.state import AttemptState, Decided, Turn, record_of
from barchan.rollout.task import DiffArtifact, Task
from barchan.rollout.tools import Toolbox
from barchan.rollout.verdict import ENDINGS, Stage, cancelled, ended_as, verdict_of_error
from barchan.trajectory.format import Kind


class Job(NamedTuple):
    """Which attempt it is.

    Attributes:
        attempt: How often this place in the group was tried before.
        create_prefix: Of its sandboxes' create ids; the rollout's id when empty.
    """

    rollout_id: str
    task: Task
    sample_index: int
    group_index: int = 0
    attempt: int = 0
    create_prefix: str = ""


class Rollout:
    """One attempt at one task. `stage` says how far it came; `row` can be made once it has ended.

    One call at a time; each of `finish`, `fail` and `cancel` ends it, and from then on gives the same verdict. A
    cancelled call leaves a rollout that only `cancel` and `fail` make sense of.

    Args:
        pipeline: Where it is graded; without one it is graded at once.
        state: That of a rollout that went on elsewhere, which `resume` takes up.

    Attributes:
        is_resumed: It goes on where its log has left it.
    """

    def __init__(
        self,
        client: Client,
        settings: RunSettings,
        job: Job,
        *,
        policy_name: str,
        toolbox: Toolbox | None = None,
        open_log: Callable[[Job], Awaitable[Log]] | None = None,
        pipeline: GradingPipeline | None = None,
        state: AttemptState | None = None,
    ) -> None:
        self.rollout_id = job.rollout_id
        self.task = job.task
        self.sample_index = job.sample_index
        self.is_resumed = False
        self._client = client
        self._settings = settings
        self._job = job
        self._policy_name = policy_name
        self._toolbox = toolbox or Toolbox(job.task)
        self._open_log = open_log
        self._pipeline = pipeline
        self._log: Log = NoLog()
        self._state = state or AttemptState(meter=Meter(job.task.limits), messages=list(opening(job.task)))
        self._sandboxes = Sandboxes(
            client, settings, job.rollout_id, create_prefix=job.create_prefix, state=self._state.sandboxes
        )
        self._agent = Agent(client, job.task, self._state, self._sandboxes, self._toolbox, policy_name)
        self._is_left = False
        self._ending = asyncio.Lock()

    @property
    def state(self) -> AttemptState:
        """As it is between two calls, for whoever goes on with it."""
        workspace = self._agent.workspace
        if workspace is not None:
            self._state.shell, self._state.first_s = workspace.point, workspace.first_s
        if isinstance(self._log, FencedLog):
            self._state.head_hash = self._log.head_hash
        return self._state

    @property
    def is_relieved(self) -> bool:
        """Whether another process goes on with it, or is to. Then nothing that this one does counts, its sandbox is
        left alone, and there is no verdict here.
        """
        return self._is_left or (isinstance(self._log, FencedLog) and self._log.is_relieved)

    @property
    def stage(self) -> Stage:
        return self._state.stage

    @property
    def verdict(self) -> Verdict | None:
        """None until it has ended."""
        return self._state.verdict

    @property
    def artifact(self) -> Artifact | None:
        """What left the agent's sandbox; None before `hand_in`, and where nothing did."""
        return self._state.artifact

    @property
    def decided(self) -> Decided | None:
        """What a policy's step wants done, and was not yet begun."""
        return self._state.decided

    @property
    def is_at_end(self) -> bool:
        """Whether no further step is wanted: the attempt is over, or the last turn's step said that it was the last."""
        return self._state.over is not None or self._state.is_last

    @property
    def pending(self) -> tuple[Completion, ...]:
        """Model calls that were recorded, and not acted on yet."""
        state = self._state
        return tuple(state.completions[len(state.completions) - state.pending :])

    # what a driver calls

    async def open(self) -> None:
        """Make the agent's sandbox and wait for its services; or, where the rollout has a log already, go on where that
        ends. If it fails, the rollout is over and void.

        Raises:
            Preempted: The run was put aside. The rollout is left as it is.
            Conflict: Somebody else has its log, and goes on with it.
        """
        try:
            await self._begin_log()
            if self._log.is_begun:
                await self._go_on()
            else:
                self._agent.tell_policy()
                await self._agent.set_up()
        except Exception as error:
            if self._is_left:
                raise
            is_lost = isinstance(error, LOST) and verdict_of_error(error, "exec").status != "scored"
            if self.is_resumed and is_lost:
                if not self._was_taken_over():  # whose sandboxes these are then
                    await self._sandboxes.end_all()
                await self.end(abandoned(error, self._state.stage))
            else:
                await self._fail(error)

    async def _begin_log(self) -> None:
        if self._open_log is None:
            return
        try:
            self._log = self._agent.log = FencedLog(await self._open_log(self._job))
        except BlobCorrupt:
            self.is_resumed = True  # there is a log, and nobody can go on with it
            raise
        except Conflict:
            self._is_left = True
            raise

    async def _go_on(self) -> None:
        """From the log: what is complete there is known, what was cut short is finished, nothing is done twice."""
        state = self._state
        self.is_resumed = True
        tail = await self._agent.go_on(await asyncio.to_thread(self._log.entries))
        if state.verdict is not None:
            state.head_hash = self._log.head_hash
            await self._close()
        elif tail.untaken is not None:
            await self._end_untaken(tail.untaken, tail.ended or "completed")
        elif tail.ended is not None and state.artifact is None:
            await self._take(tail.ended)

    async def resume(self) -> None:
        """Go on with a rollout that was made from a state: with its log opened again and its sandbox found again.

        Raises:
            SandboxExpired, SandboxLost: The agent's sandbox is no more.
        """
        state = self._state
        await self._begin_log()
        self._sandboxes.begin_grading_anew()
        if state.sandbox_id is not None:
            self._agent.enter(await self._sandboxes.again(state.sandbox_id, self.task.environment))

    async def observe(self) -> Observation:
        """What a policy knows before its next turn."""
        return self._state.seen(self._toolbox.schemas)

    async def record(
        self,
        *,
        text: str = "",
        prompt_ids: Sequence[int] = (),
        completion_ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        policy_version: str | int | None = None,
        tokens: Sequence[str] = (),
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        finish_reason: str = "",
        model: str = "",
        requests: int = 1,
        wait_ms: float | None = None,
        decided: Decided | None = None,
    ) -> None:
        """Keep a model call. Its text is said in the next turn; its completion tokens count towards the limit, by
        `completion_tokens` where given, else by the ids or log-probs.

        Args:
            wait_ms: How long the completion took.
            decided: What it wants done, so that it is known though this process ends before it is.

        Raises:
            InvalidSpec: Ids and log-probs of different lengths.
            Conflict: The rollout has ended.
        """
        state = self._state
        if state.verdict is not None:
            raise Conflict(f"rollout {self.rollout_id} has ended")
        if completion_ids and logprobs and len(completion_ids) != len(logprobs):
            raise InvalidSpec(f"{len(completion_ids)} completion ids and {len(logprobs)} log-probs")
        completion = Completion(
            model=model,
            text=text,
            finish_reason=finish_reason,
            prompt_tokens=len(prompt_ids) if prompt_tokens is None else prompt_tokens,
            completion_tokens=completion_tokens or len(completion_ids) or len(logprobs),
            prompt_ids=tuple(prompt_ids),
            completion_ids=tuple(completion_ids),
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            policy_version=policy_version,
            requests=requests,
            wait_ms=wait_ms,
        )
        check_completion(completion)
        state.sampled(completion)
        self._client.use_tokens(completion.prompt_tokens + completion.completion_tokens)
        state.decided = decided
        told = {"step": asdict(decided)} if decided is not None else {}
        await self._keep("model_call", {**sampled_body(completion), **told})

    async def decide(self, decided: Decided) -> None:
        """Keep what a policy wants done that has asked no model."""
        if self._state.verdict is not None:
            raise Conflict(f"rollout {self.rollout_id} has ended")
        self._state.decided = decided
        await self._keep("step", asdict(decided))

    async def _keep(self, kind: Kind, body: Mapping[str, Any]) -> None:
        try:
            self._log.entry(kind, body)
        except BarchanError as error:
            await self.end(verdict_of_error(error, "trajectory"))

    async def note_asked_again(self) -> None:
        """The policy is asked for a step that it may have been asked for before: if it had, its answer is lost."""
        self._state.asked_again += 1
        self._log.entry("note", {"asked_again": True})

    async def act(
        self, tool_calls: Sequence[ToolCall | Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> Observation:
        """Take a turn: carry the calls out, one after the other. One that can't be carried out is told, not raised.

        Args:
            tool_calls: Ours, or as a chat completion's message has them.
            timeout_s: For each call, within what the task allows.

        Raises:
            Conflict: The rollout is over, as the last observation said.
        """
        state = self._state
        if state.verdict is not None and state.verdict.status == "void":
            return self._state.seen(self._toolbox.schemas)
        if state.over is not None or state.ended is not None or self._agent.workspace is None:
            raise Conflict(f"rollout {self.rollout_id} takes no turn: {state.over or 'it was not opened'}")
        if isinstance(tool_calls, str | Mapping | ToolCall):
            raise InvalidSpec("tool_calls is a list of calls")
        if timeout_s is not None and timeout_s <= 0:
            raise InvalidSpec(f"timeout_s={timeout_s}: a call needs time")
        turn = Turn(calls=parse_calls(tool_calls, state.meter.turns), timeout_s=timeout_s)
        state.enter("exec")
        try:
            self._log.entry("turn", {"calls": turn.calls, "timeout_s": timeout_s})
            state.begin_turn(turn)
            await self._agent.carry_on(turn)
        except Exception as error:
            await self._fail(error)
        return self._state.seen(self._toolbox.schemas, tuple(turn.results))

    async def hand_in(self, cause: Cause | None = None) -> None:
        """Take the artifact and end the agent's sandbox, unless it is `shared`. Nothing left to grade ends the rollout.

        Args:
            cause: How the policy's part ended, where its driver knows more than the rollout: `refusal`, or a limit that
                it ran into.

        Raises:
            Conflict: It was not opened.
            InvalidSpec: No part of a policy's can end so.
        """
        state = self._state
        if cause is not None and cause not in ENDINGS:
            raise InvalidSpec(f"cause={cause!r}: it is none of ours, which are {', '.join(sorted(ENDINGS))}")
        if state.verdict is not None or state.ended is not None:
            return
        if self._agent.workspace is None:
            raise Conflict(f"rollout {self.rollout_id} was not opened")
        ended = cause or state.over or "completed"
        image = f"artifact-{self.rollout_id}" if isinstance(self.task.artifact, DiffArtifact) else ""
        facts = state.meter.facts(ended)
        try:
            self._log.entry("hand_in", {"ended": ended, "facts": facts, "image": image})
            state.over, state.facts, state.image = ended, facts, image
            await self._take(ended)
        except Exception as error:
            await self._fail(error)

    async def _take(self, ended: Cause) -> None:
        """Take the artifact, keep it, and only then let the agent's sandbox go."""
        state = self._state
        state.enter("exec")
        taken = await self._agent.take(state.image)
        if isinstance(taken, Evidence):
            self._log.entry("artifact", {"untaken": taken})
            await self._end_untaken(taken, ended)
            return
        await keep_artifact(self._log, taken)
        state.artifact = replace(taken, sandbox=None)
        state.enter("cleanup")
        if taken.sandbox is None:
            await self._agent.end()
        state.ended = ended
        state.enter("grade")

    async def _end_untaken(self, why: Evidence, ended: Cause) -> None:
        self._state.enter("cleanup")
        await self._agent.end()
        verdict = ungraded(why, ended)
        await self.end(replace(verdict, evidence=verdict.evidence + self._state.facts))

    async def finish(self, cause: Cause | None = None) -> Verdict:
        """`hand_in`, and grade elsewhere.

        Raises:
            Conflict: It was not opened, or another process goes on with it.
        """
        await self.hand_in(cause)
        state = self._state
        if state.verdict is not None:
            return await self.end(state.verdict)
        if state.ended is None:
            raise Conflict(f"rollout {self.rollout_id} goes on in another process")
        try:
            verdict = ended_as(await self._graded(), state.ended)
            verdict = replace(verdict, evidence=verdict.evidence + state.facts)
        except Preempted as error:
            await self._put_aside(error)
        except Exception as error:
            verdict = verdict_of_error(error, "grade")
        return await self.end(verdict)

    async def leave(self) -> None:
        """Have nothing more to do with it: its log and its sandbox stay as they are, for whoever goes on with it.

        Raises:
            BackendError: The log is not on disk.
        """
        self._is_left = True
        await self._close()

    async def _put_aside(self, error: Preempted) -> NoReturn:
        try:
            await self.leave()
        finally:  # whatever the disk does: the run is put aside
            raise error

    async def _close(self) -> None:
        await asyncio.shield(asyncio.to_thread(self._log.close))  # it waits for the disk

    async def _fail(self, error: Exception) -> None:
        """End it by an error of the platform's or the task's; raises one that only puts it aside."""
        if isinstance(error, Preempted):
            await self._put_aside(error)
        await self.end(verdict_of_error(error, self._state.stage))

    async def fail(self, error: Exception) -> Verdict:
        """The rollout can't go on because of its driver: void, by the model's fault for a `ModelError`, else by the
        caller's.
        """
        return await self.end(verdict_of_error(error, self._state.stage))

    async def cancel(self, reason: Literal["user", "stale", "surplus"] = "user") -> Verdict:
        """Give the rollout up, at any point; its sandbox is ended."""
        return await self.end(cancelled(self._state.stage, reason))

    async def end(self, verdict: Verdict) -> Verdict:
        """End it with a verdict of the driver's. The first verdict stands; nothing of the rollout lives on. Who comes
        second waits for the end that is under way.
        """
        async with self._ending:
            return await self._end(verdict)

    async def _end(self, verdict: Verdict) -> Verdict:
        state = self._state
        if state.verdict is not None:
            if not self.is_relieved:
                await self._agent.end()  # a sandbox that a call has made while it was being ended
            return state.verdict
        if self._was_taken_over():
            return verdict
        if state.stage != "grade":  # whose time is its job's
            state.enter(state.stage)
        state.verdict = verdict
        state.over = state.over or verdict.cause
        await self._agent.end()
        if state.image and (state.artifact is None or not self._settings.keep_images):
            await self._sandboxes.remove_image(state.image)
        state.verdict = verdict = replace(verdict, evidence=verdict.evidence + state.asides)
        await self._close_log(verdict)
        return state.verdict

    def _was_taken_over(self) -> bool:
        return self.is_relieved or (isinstance(self._log, FencedLog) and self._log.was_taken_over())

    def row(self) -> RolloutRecord:
        """The ended rollout as a line of the results."""
        job = self._job
        return record_of(
            self._state,
            self.task,
            run_id=self._settings.run_id,
            rollout_id=self.rollout_id,
            place=(job.group_index, job.sample_index, job.attempt),
            policy=self._policy_name,
        )

    # the end

    async def _graded(self) -> Verdict:
        state = self._state
        job = GradeJob(
            rollout_id=self.rollout_id,
            task=self.task,
            artifact=self._agent.to_grade(),
            sandboxes=self._sandboxes,
            log=self._log,
        )
        try:
            return await graded(job, self._pipeline, self._client, self._settings)
        finally:
            state.enter("grade")
            state.spent_s |= {"grade_queue": job.queue_s, "grade": job.grade_s}

    async def _close_log(self, verdict: Verdict) -> None:
        """A log that can't be written is told in the verdict, which is on its way to the row."""
        try:
            if verdict.status == "cancelled":
                self._log.entry("cancel", {"reason": verdict.cause})
            self._log.entry("verdict", asdict(verdict))
            self._state.head_hash = self._log.head_hash
            if isinstance(self._log, FencedLog):
                await self._close()
        except BarchanError as error:
            fact = Evidence(source="trajectory", fact="the log is not whole", value=str(error)[:400])
            self._state.verdict = replace(verdict, evidence=(*verdict.evidence, fact))
