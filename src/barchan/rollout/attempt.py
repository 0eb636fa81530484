"""One rollout as whoever drives it sees it: observe, record, act, finish or cancel.

Our own runner and a trainer with generation of its own drive it by the same five methods. What fails on the platform's
side is no exception here: the rollout is then over, and `finish` gives the void verdict with its evidence.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from msgspec.structs import asdict, replace

from barchan.errors import BarchanError, CallerError, Conflict, InvalidSpec
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.calls import Message, Observation, ToolCall, ToolResult, parse_calls
from barchan.rollout.ending import limit_facts, take_artifact, ungraded
from barchan.rollout.grading import Grader
from barchan.rollout.limits import Meter
from barchan.rollout.logged import LoggedSandbox, logged
from barchan.rollout.ports import Client, Log, NoLog
from barchan.rollout.prompts import NO_CALL, opening
from barchan.rollout.record import Completion, RolloutRecord, Timings
from barchan.rollout.sandboxes import Sandboxes
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Task
from barchan.rollout.tools import Toolbox, Workspace
from barchan.rollout.tools.toolbox import not_run
from barchan.rollout.verdict import TRUNCATING, cancelled, judge, verdict_of_error

CALLS_PER_TURN_MAX = 64
Stage = Literal["create", "policy", "exec", "cleanup", "grade"]


class Job(NamedTuple):
    rollout_id: str
    task: Task
    sample_index: int
    group_index: int = 0


class Rollout:
    """One attempt at one task. `stage` says how far it came; `row` can be made at any point.

    One call at a time; each of `finish`, `fail` and `cancel` ends it, and from then on gives the same verdict. A
    cancelled call leaves a rollout that only `cancel` and `fail` make sense of.
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
    ) -> None:
        self.rollout_id = job.rollout_id
        self.task = job.task
        self.sample_index = job.sample_index
        self.stage: Stage = "create"
        self._settings = settings
        self._job = job
        self._policy_name = policy_name
        self._toolbox = toolbox or Toolbox(job.task)
        self._open_log = open_log
        self._log: Log = NoLog()
        self._sandboxes = Sandboxes(client, settings, job.rollout_id)
        self._workspace: Workspace | None = None
        self._first_s: float | None = None
        self._meter = Meter(job.task.limits)
        self._messages: list[Message] = list(opening(job.task))
        self._said = ""
        self._over: Cause | None = None
        self._verdict: Verdict | None = None
        self._artifact: str | None = None
        self._completions: list[Completion] = []
        self._calls: Counter[str] = Counter()
        self._malformed = 0
        self._started = self._since = time.monotonic()
        self._started_unix_s = time.time()
        self._spent_s: dict[str, float] = defaultdict(float)

    # what a driver calls

    async def open(self) -> None:
        """Make the agent's sandbox. If that fails, the rollout is over and void."""
        try:
            if self._open_log is not None:
                self._log = await self._open_log(self._job)
            offered = {"tools": self._toolbox.schemas} if self.task.limits.turns_max > 1 else {}
            self._log.entry("message", {**self._messages[0], **offered})
            sandbox = await self._sandboxes.create("agent")
        except Exception as error:
            await self._end(verdict_of_error(error, self.stage))
            return
        seen = sandbox if self._open_log is None else LoggedSandbox(sandbox, self._log)
        self._workspace = Workspace(seen, self.task.limits.output_chars_max)
        self.stage, self._since = "policy", time.monotonic()

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
    ) -> None:
        """Keep a model call. Its text is said in the next turn; its completion tokens count towards the limit, by
        `completion_tokens` where given, else by the ids or log-probs.

        Raises:
            InvalidSpec: Ids and log-probs of different lengths.
            Conflict: The rollout has ended.
        """
        if self._verdict is not None:
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
        )
        self._completions.append(completion)
        self._meter.tokens += completion.completion_tokens
        self._said = text
        try:
            self._log.entry("model_call", _sampled(completion))
        except BarchanError as error:
            await self._end(verdict_of_error(error, "trajectory"))

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
        if self._verdict is not None and self._verdict.status == "void":
            return self._observation(())
        if self._over is not None or self._workspace is None:
            raise Conflict(f"rollout {self.rollout_id} takes no turn: {self._over or 'it was not opened'}")
        if timeout_s is not None and timeout_s <= 0:
            raise InvalidSpec(f"timeout_s={timeout_s}: a call needs time")
        self._enter("exec")
        calls = parse_calls(tool_calls, self._meter.turns)
        results: list[ToolResult] = []
        try:
            self._say(calls)
            for index, call in enumerate(calls):
                results.append(await self._call(self._workspace, call, index, timeout_s))
            self._end_turn(results)
        except Exception as error:
            await self._end(verdict_of_error(error, self.stage))
        else:
            self._enter("policy")
        return self._observation(tuple(results))

    async def finish(self, cause: Cause | None = None) -> Verdict:
        """Take the artifact out, end the agent's sandbox, grade elsewhere.

        Args:
            cause: How the policy's part ended, where its driver knows more than the rollout: `refusal`, or a limit that
                it ran into.
        """
        if self._verdict is not None:
            return self._verdict
        if self._workspace is None:
            raise Conflict(f"rollout {self.rollout_id} was not opened")
        self._over = ended = cause or self._over or "completed"
        facts = limit_facts(self._meter, ended)
        try:
            self._enter("exec")
            data = await take_artifact(self._workspace, self.task)
            self._enter("cleanup")
            await self._end_sandbox()
            verdict = ungraded(data, ended, facts)
            if verdict is None and isinstance(data, bytes):
                self._enter("grade")
                self._artifact = data.decode("utf-8", "replace")
                verdict = await self._grade(self._artifact, ended, facts)
        except Exception as error:
            verdict = verdict_of_error(error, self.stage)
        assert verdict is not None
        return await self._end(verdict)

    async def fail(self, error: Exception) -> Verdict:
        """The rollout can't go on because of its driver: void, by the model's fault for a `ModelError`, else by the
        caller's.
        """
        return await self._end(verdict_of_error(error, self.stage))

    async def cancel(self, reason: Literal["user", "stale"] = "user") -> Verdict:
        """Give the rollout up, at any point; its sandbox is ended."""
        return await self._end(cancelled(self.stage, reason))

    # turns

    async def _call(self, workspace: Workspace, call: ToolCall, index: int, timeout_s: float | None) -> ToolResult:
        """One call of a turn, logged."""
        args = {"id": call.id, "name": call.name, "arguments": call.arguments, "turn": self._meter.turns}
        return await logged(
            self._log, "tool_call", args, lambda: self._carry_out(workspace, call, index, timeout_s), _told
        )

    async def _carry_out(self, workspace: Workspace, call: ToolCall, index: int, timeout_s: float | None) -> ToolResult:
        if self._over is not None:
            return not_run(call, "the attempt is over")
        if index >= CALLS_PER_TURN_MAX:
            return not_run(call, f"a turn has at most {CALLS_PER_TURN_MAX} calls")
        left_s = self._meter.left.agent_s
        call_s = min(self.task.limits.call_s_max, left_s, left_s if timeout_s is None else timeout_s)
        called = await self._toolbox.call(workspace, call, call_s)
        self._calls[call.name if call.name in self._toolbox.names else "(unknown)"] += 1
        self._malformed += called.result.status == "malformed"
        self._meter.agent_s += called.agent_s
        if called.submits:
            self._over = "completed"
        elif self._meter.left.agent_s == 0.0 or (called.result.status == "timed_out" and call_s == left_s):
            self._over = "agent_timeout"
        return called.result

    def _say(self, calls: list[ToolCall]) -> None:
        message: Message = {"role": "assistant", "content": self._said}
        if calls:
            message["tool_calls"] = [call.as_message for call in calls]
        self._said = ""
        self._messages.append(message)

    def _end_turn(self, results: list[ToolResult]) -> None:
        self._meter.turns += 1
        self._over = self._over or self._meter.reached
        for result in results:
            self._messages.append({"role": "tool", "tool_call_id": result.call_id, "content": result.content})
        if not results and self._over is None:
            self._messages.append({"role": "user", "content": NO_CALL})
            self._log.entry("message", self._messages[-1])

    def _observation(self, results: tuple[ToolResult, ...]) -> Observation:
        return Observation(
            messages=tuple(self._messages),
            tools=self._toolbox.schemas,
            left=self._meter.left,
            turn=self._meter.turns,
            results=results,
            over=self._over,
        )

    def _enter(self, stage: Stage) -> None:
        """Go on to a stage; the time since the last one is that one's."""
        now = time.monotonic()
        self._spent_s[self.stage] += now - self._since
        self.stage, self._since = stage, now

    # the end

    async def _grade(self, source: str, ended: Cause, facts: tuple[Evidence, ...]) -> Verdict:
        queued_s = self._sandboxes.queue_s
        grader = Grader(self._sandboxes, self._settings, self.task)
        try:
            grading = await logged(
                self._log,
                "grade",
                {"grader": "functions", "artifact": source},
                lambda: grader.grade(source),
                lambda grading: {
                    "report": grading.report,
                    "control": grading.control,
                    "sandbox_ids": self._sandboxes.ids["grader"],
                },
            )
        finally:
            self._spent_s["grade"] -= self._sandboxes.queue_s - queued_s
        verdict = judge(grading, cause=ended, truncated=ended in TRUNCATING)
        return replace(verdict, evidence=verdict.evidence + facts)

    async def _end_sandbox(self) -> None:
        workspace, self._workspace = self._workspace, None
        if workspace is None:
            return
        self._first_s = workspace.first_s
        try:
            await workspace.close()
        except BarchanError as error:
            self._sandboxes.note("closing the agent's shell failed", error)
        finally:
            await self._sandboxes.end(workspace.sandbox, "agent")

    async def _end(self, verdict: Verdict) -> Verdict:
        """The first verdict stands; nothing of the rollout lives on."""
        if self._verdict is not None:
            return self._verdict
        self._enter(self.stage)
        self._verdict = verdict
        self._over = self._over or verdict.cause
        await self._end_sandbox()
        self._verdict = verdict = replace(verdict, evidence=verdict.evidence + self._sandboxes.notes)
        await self._close_log(verdict)
        return self._verdict

    async def _close_log(self, verdict: Verdict) -> None:
        """A log that can't be written is told in the verdict, which is on its way to the row."""
        try:
            if verdict.status == "cancelled":
                self._log.entry("cancel", {"reason": verdict.cause})
            self._log.entry("verdict", asdict(verdict))
            if self._open_log is not None:
                await asyncio.to_thread(self._log.close)  # it waits for the disk
        except BarchanError as error:
            fact = Evidence(source="trajectory", fact="the log is not whole", value=str(error)[:400])
            self._verdict = replace(verdict, evidence=(*verdict.evidence, fact))

    def row(self) -> RolloutRecord:
        """The ended rollout as a line of the results."""
        if self._verdict is None:
            raise CallerError(f"rollout {self.rollout_id} has not ended")
        spent_s = {**self._spent_s, "queue": self._sandboxes.queue_s, "total": time.monotonic() - self._started}
        for untold in ("create", "cleanup"):
            spent_s.pop(untold, None)
        if "agent" in self._sandboxes.create_s:
            spent_s["create"] = self._sandboxes.create_s["agent"]
            if self._first_s is not None:
                spent_s["ttfi"] = spent_s["create"] + self._first_s
        agent = self._sandboxes.ids["agent"]
        return RolloutRecord(
            run_id=self._settings.run_id,
            rollout_id=self.rollout_id,
            task_id=self.task.task_id,
            sample_index=self.sample_index,
            policy=self._policy_name,
            verdict=self._verdict,
            timings=Timings(**{f"{stage}_ms": round(seconds * 1e3, 3) for stage, seconds in spent_s.items()}),
            started_unix_s=round(self._started_unix_s, 3),
            agent_sandbox_id=agent[0] if agent else None,
            grader_sandbox_ids=tuple(self._sandboxes.ids["grader"]),
            turns=self._meter.turns,
            tool_calls=dict(self._calls),
            malformed_calls=self._malformed,
            agent_s=round(self._meter.agent_s, 4),
            prompt_tokens=sum(completion.prompt_tokens for completion in self._completions),
            completion_tokens=self._meter.tokens,
            artifact=self._artifact,
            completions=tuple(self._completions),
        )


def _told(result: ToolResult) -> Mapping[str, Any]:
    return {"content": result.content, "status": result.status, "truncated": result.truncated}


def _sampled(completion: Completion) -> Mapping[str, Any]:
    """A model call as the trajectory log has it."""
    usage = {"prompt_tokens": completion.prompt_tokens, "completion_tokens": completion.completion_tokens}
    return {**asdict(completion), "usage": usage}
