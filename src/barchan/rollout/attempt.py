"""One rollout as whoever drives it sees it: observe, record, act, finish or cancel.

Our own runner and a trainer with generation of its own drive it by the same methods. What fails on the platform's
side is no exception here: the rollout is then over, and `finish` gives the void verdict with its evidence.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from barchan.errors import BarchanError, Conflict, InvalidSpec, NotFound, SandboxLost
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.artifact import take, ungraded
from barchan.rollout.calls import Message, Observation, ToolCall, ToolResult, parse_calls
from barchan.rollout.graders.base import Artifact
from barchan.rollout.grading import GradeJob
from barchan.rollout.integrity.canary import put_canaries
from barchan.rollout.limits import Meter
from barchan.rollout.logged import FencedLog, LoggedSandbox, logged
from barchan.rollout.oracle import ORACLE, put_oracle_files
from barchan.rollout.pipeline import GradingPipeline
from barchan.rollout.ports import Client, Log, NoLog, Sandbox
from barchan.rollout.prompts import NO_CALL, opening
from barchan.rollout.record import Completion, RolloutRecord
from barchan.rollout.sandboxes import Sandboxes
from barchan.rollout.services import start_services
from barchan.rollout.settings import RunSettings
from barchan.rollout.state import AttemptState, record_of
from barchan.rollout.task import DiffArtifact, Task
from barchan.rollout.tools import Toolbox, Workspace
from barchan.rollout.tools.toolbox import not_run
from barchan.rollout.verdict import ENDINGS, Stage, cancelled, ended_as, verdict_of_error

CALLS_PER_TURN_MAX = 64


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
        self._workspace: Workspace | None = None

    @property
    def state(self) -> AttemptState:
        """As it is between two calls, for whoever goes on with it."""
        if self._workspace is not None:
            self._state.shell, self._state.first_s = self._workspace.point, self._workspace.first_s
        if isinstance(self._log, FencedLog):
            self._state.head_hash = self._log.head_hash
        return self._state

    @property
    def is_relieved(self) -> bool:
        """Whether another process goes on with it. Then nothing that this one does counts, its sandbox is left alone,
        and there is no verdict here.
        """
        return isinstance(self._log, FencedLog) and self._log.is_relieved

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

    # what a driver calls

    async def open(self) -> None:
        """Make the agent's sandbox and wait for its services. If that fails, the rollout is over and void."""
        state, environment = self._state, self.task.environment
        try:
            if self._open_log is not None:
                self._log = FencedLog(await self._open_log(self._job))
            offered = {"tools": self._toolbox.schemas} if self.task.limits.turns_max > 1 else {}
            self._log.entry("message", {**state.messages[0], **offered})
            template = await self._sandboxes.template(environment)
            state.enter("create")
            sandbox = await self._sandboxes.create("agent", environment, template=template)
            self._enter_sandbox(sandbox)
            state.enter("setup")
            await start_services(sandbox, environment.services, self._log)
            await put_canaries(sandbox, self.task)
            if self._policy_name == ORACLE:
                await put_oracle_files(sandbox, self.task)
        except Exception as error:
            await self.end(verdict_of_error(error, state.stage))
        else:
            state.enter("policy")

    async def resume(self) -> None:
        """Go on with a rollout that was made from a state: with its log opened again and its sandbox found again.

        Raises:
            SandboxLost: The agent's sandbox is no more.
        """
        state = self._state
        if self._open_log is not None:
            self._log = FencedLog(await self._open_log(self._job))
        if state.sandbox_id is None:
            return
        try:
            sandbox = await self._client.attach(state.sandbox_id)
        except NotFound as error:
            raise SandboxLost(f"sandbox {state.sandbox_id} is gone", sandbox_id=state.sandbox_id) from error
        self._enter_sandbox(sandbox)

    async def observe(self) -> Observation:
        """What a policy knows before its next turn."""
        return self._observation(())

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
    ) -> None:
        """Keep a model call. Its text is said in the next turn; its completion tokens count towards the limit, by
        `completion_tokens` where given, else by the ids or log-probs.

        Args:
            wait_ms: How long the completion took.

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
        _check_completion(completion)
        state.completions.append(completion)
        state.meter.tokens += completion.completion_tokens
        state.said = text
        try:
            self._log.entry("model_call", _sampled(completion))
        except BarchanError as error:
            await self.end(verdict_of_error(error, "trajectory"))

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
            return self._observation(())
        if state.over is not None or state.ended is not None or self._workspace is None:
            raise Conflict(f"rollout {self.rollout_id} takes no turn: {state.over or 'it was not opened'}")
        if isinstance(tool_calls, str | Mapping | ToolCall):
            raise InvalidSpec("tool_calls is a list of calls")
        if timeout_s is not None and timeout_s <= 0:
            raise InvalidSpec(f"timeout_s={timeout_s}: a call needs time")
        state.enter("exec")
        calls = parse_calls(tool_calls, state.meter.turns)
        results: list[ToolResult] = []
        try:
            self._say(calls)
            for index, call in enumerate(calls):
                results.append(await self._call(self._workspace, call, index, timeout_s))
            self._end_turn(results)
        except Exception as error:
            await self.end(verdict_of_error(error, state.stage))
        else:
            state.enter("policy")
        return self._observation(tuple(results))

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
        if self._workspace is None:
            raise Conflict(f"rollout {self.rollout_id} was not opened")
        state.over = ended = cause or state.over or "completed"
        state.facts = state.meter.facts(ended)
        try:
            state.enter("exec")
            image = f"artifact-{self.rollout_id}"
            state.image = image if isinstance(self.task.artifact, DiffArtifact) else ""
            taken = await take(self._workspace, self.task, image)
            state.enter("cleanup")
            if isinstance(taken, Artifact):
                state.artifact = replace(taken, sandbox=None)
            if isinstance(taken, Evidence) or taken.sandbox is None:
                await self._end_sandbox()
        except Exception as error:
            await self.end(verdict_of_error(error, state.stage))
            return
        if isinstance(taken, Evidence):
            verdict = ungraded(taken, ended)
            await self.end(replace(verdict, evidence=verdict.evidence + state.facts))
            return
        state.ended = ended
        state.enter("grade")

    async def finish(self, cause: Cause | None = None) -> Verdict:
        """`hand_in`, and grade elsewhere.

        Raises:
            Conflict: It was not opened, or another process goes on with it.
        """
        await self.hand_in(cause)
        state = self._state
        if state.verdict is not None:
            return state.verdict
        if state.ended is None:
            raise Conflict(f"rollout {self.rollout_id} goes on in another process")
        job = GradeJob(
            rollout_id=self.rollout_id,
            task=self.task,
            artifact=self._artifact_to_grade(),
            sandboxes=self._sandboxes,
            log=self._log,
        )
        try:
            verdict = ended_as(await self._graded(job), state.ended)
            verdict = replace(verdict, evidence=verdict.evidence + state.facts)
        except Exception as error:
            verdict = verdict_of_error(error, "grade")
        return await self.end(verdict)

    async def fail(self, error: Exception) -> Verdict:
        """The rollout can't go on because of its driver: void, by the model's fault for a `ModelError`, else by the
        caller's.
        """
        return await self.end(verdict_of_error(error, self._state.stage))

    async def cancel(self, reason: Literal["user", "stale", "surplus"] = "user") -> Verdict:
        """Give the rollout up, at any point; its sandbox is ended."""
        return await self.end(cancelled(self._state.stage, reason))

    async def end(self, verdict: Verdict) -> Verdict:
        """End it with a verdict of the driver's. The first verdict stands; nothing of the rollout lives on."""
        state = self._state
        if state.verdict is not None:
            return state.verdict
        if self.is_relieved:
            return verdict
        if state.stage != "grade":  # whose time is its job's
            state.enter(state.stage)
        state.verdict = verdict
        state.over = state.over or verdict.cause
        await self._end_sandbox()
        if state.image and (state.artifact is None or not self._settings.keep_images):
            await self._sandboxes.remove_image(state.image)
        state.verdict = verdict = replace(verdict, evidence=verdict.evidence + state.sandboxes.notes)
        await self._close_log(verdict)
        return state.verdict

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

    # turns

    async def _call(self, workspace: Workspace, call: ToolCall, index: int, timeout_s: float | None) -> ToolResult:
        """One call of a turn, logged."""
        args = {"id": call.id, "name": call.name, "arguments": call.arguments, "turn": self._state.meter.turns}
        return await logged(
            self._log, "tool_call", args, lambda: self._carry_out(workspace, call, index, timeout_s), _told
        )

    async def _carry_out(self, workspace: Workspace, call: ToolCall, index: int, timeout_s: float | None) -> ToolResult:
        state = self._state
        if state.over is not None:
            return not_run(call, "the attempt is over")
        if index >= CALLS_PER_TURN_MAX:
            return not_run(call, f"a turn has at most {CALLS_PER_TURN_MAX} calls")
        left_s = state.meter.left.agent_s
        call_s = min(self.task.limits.call_s_max, left_s, left_s if timeout_s is None else timeout_s)
        called = await self._toolbox.call(workspace, call, call_s)
        state.calls[call.name if call.name in self._toolbox.names else "(unknown)"] += 1
        state.malformed += called.result.status == "malformed"
        state.meter.agent_s += called.agent_s
        if called.submits:
            state.over = "completed"
        elif state.meter.left.agent_s == 0.0 or (called.result.status == "timed_out" and call_s == left_s):
            state.over = "agent_timeout"
        return called.result

    def _say(self, calls: list[ToolCall]) -> None:
        message: Message = {"role": "assistant", "content": self._state.said}
        if calls:
            message["tool_calls"] = [call.as_message for call in calls]
        self._state.said = ""
        self._state.messages.append(message)

    def _end_turn(self, results: list[ToolResult]) -> None:
        state = self._state
        state.meter.turns += 1
        state.over = state.over or state.meter.reached
        for result in results:
            state.messages.append({"role": "tool", "tool_call_id": result.call_id, "content": result.content})
        if not results and state.over is None:
            state.messages.append({"role": "user", "content": NO_CALL})
            self._log.entry("message", state.messages[-1])

    def _observation(self, results: tuple[ToolResult, ...]) -> Observation:
        state = self._state
        return Observation(
            messages=tuple(state.messages),
            tools=self._toolbox.schemas,
            left=state.meter.left,
            turn=state.meter.turns,
            results=results,
            over=state.over,
        )

    # the end

    def _enter_sandbox(self, sandbox: Sandbox) -> None:
        """From now on it is ended with the rollout."""
        seen = LoggedSandbox(sandbox, self._log) if isinstance(self._log, FencedLog) else sandbox
        self._workspace = Workspace(seen, self.task.limits.output_chars_max, self._state.shell)
        self._workspace.calls = sum(self._state.calls.values())
        self._workspace.first_s = self._state.first_s
        self._state.sandbox_id = sandbox.id

    def _artifact_to_grade(self) -> Artifact:
        assert self._state.artifact is not None
        if self._state.artifact.kind != "shared":
            return self._state.artifact
        assert self._workspace is not None
        return replace(self._state.artifact, sandbox=self._workspace.sandbox)

    async def _graded(self, job: GradeJob) -> Verdict:
        try:
            if self._pipeline is not None:
                return await self._pipeline.grade(job)
            async with GradingPipeline(self._client, self._settings, workers=1, waiting_max=1) as pipeline:
                return await pipeline.grade(job)
        finally:
            state = self._state
            state.enter("grade")
            state.spent_s |= {"grade_queue": job.queue_s, "grade": job.grade_s}

    async def _end_sandbox(self) -> None:
        workspace, self._workspace = self._workspace, None
        if workspace is None:
            return
        self._state.first_s = workspace.first_s
        try:
            await workspace.close()
        except BarchanError as error:
            self._sandboxes.note("closing the agent's shell failed", error)
        finally:
            await self._sandboxes.end(workspace.sandbox, "agent")
            self._state.sandbox_id = None

    async def _close_log(self, verdict: Verdict) -> None:
        """A log that can't be written is told in the verdict, which is on its way to the row."""
        try:
            if verdict.status == "cancelled":
                self._log.entry("cancel", {"reason": verdict.cause})
            self._log.entry("verdict", asdict(verdict))
            self._state.head_hash = self._log.head_hash
            if isinstance(self._log, FencedLog):
                await asyncio.to_thread(self._log.close)  # it waits for the disk
        except BarchanError as error:
            fact = Evidence(source="trajectory", fact="the log is not whole", value=str(error)[:400])
            self._state.verdict = replace(verdict, evidence=(*verdict.evidence, fact))


def _told(result: ToolResult) -> Mapping[str, Any]:
    return {"content": result.content, "status": result.status, "truncated": result.truncated}


def _sampled(completion: Completion) -> Mapping[str, Any]:
    """A model call as the trajectory log has it."""
    usage = {"prompt_tokens": completion.prompt_tokens, "completion_tokens": completion.completion_tokens}
    return {**asdict(completion), "usage": usage}


def _check_completion(completion: Completion) -> None:
    """Better refused here than a line in the results that nobody can read."""
    try:
        msgspec.convert(asdict(completion), Completion)
        completion.text.encode()
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidSpec(f"no record of a model call: {error}") from error
    if not all(map(math.isfinite, completion.logprobs)):
        raise InvalidSpec("log-probs are finite numbers")
