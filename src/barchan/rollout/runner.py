"""Runs groups of rollouts. An agent's place is free again as soon as its artifact has left; each rollout is scored,
voided or cancelled alone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

from msgspec.structs import asdict, replace

from barchan.errors import InvalidSpec, Preempted, TaskError
from barchan.model.verdict import Cause, Evidence
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.breaker import Trip
from barchan.rollout.calls import Observation, parse_calls
from barchan.rollout.environments import prepare
from barchan.rollout.graders import grader_of
from barchan.rollout.pipeline import GradingPipeline
from barchan.rollout.plan import Member, Plan, Sampling
from barchan.rollout.policies.base import Policy, Step
from barchan.rollout.ports import Client, Log
from barchan.rollout.record import RolloutRecord
from barchan.rollout.resuming.bodies import is_abandoned
from barchan.rollout.rules.control import quarantined
from barchan.rollout.settings import RunSettings
from barchan.rollout.state import Decided
from barchan.rollout.summary import Waits
from barchan.rollout.task import SharedArtifact, Task
from barchan.rollout.tools import Toolbox
from barchan.rollout.verdict import cancelled
from barchan.rollout.watch import Watch
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.recipe import Recipe


async def converse(rollout: Rollout, policy: Policy) -> Cause | None:
    """Let a policy take the turns of an opened rollout; returns how its part ended, where it knows more than the
    rollout.
    """
    observation = await rollout.observe()
    if rollout.is_resumed and rollout.decided is None and not rollout.is_at_end:
        await rollout.note_asked_again()
    while not rollout.is_at_end:
        decided = rollout.decided or await _decided(rollout, policy, observation)
        if decided.is_last and not decided.tool_calls:
            return decided.cause
        observation = await rollout.act(decided.tool_calls)
    return rollout.state.ended_by


async def play(rollout: Rollout, policy: Policy) -> None:
    """Let a policy drive an opened rollout to its end."""
    await rollout.finish(await converse(rollout, policy))


async def _decided(rollout: Rollout, policy: Policy, observation: Observation) -> Decided:
    """The policy's next step, on record before anything of it is done."""
    step = await policy.step(rollout.task, rollout.sample_index, observation)
    if not isinstance(step, Step):  # a user's own class, that no type checker may have seen
        raise InvalidSpec(f"policy {policy.name}: step() gave a {type(step).__name__}, not a Step")
    calls = tuple(parse_calls(step.tool_calls, observation.turn))
    decided = Decided(tool_calls=calls, is_last=step.is_last, cause=step.cause)
    if step.completion is not None:
        await rollout.record(**asdict(step.completion), decided=decided)
    else:
        await rollout.decide(decided)
    return decided


class Earlier(NamedTuple):
    """What a resumed run has already.

    Attributes:
        scored: Places (group_index, sample_index) that have their score.
        rollout_ids: Ids of the rollouts that are over, whatever became of them.
    """

    scored: frozenset[tuple[int, int]] = frozenset()
    rollout_ids: frozenset[str] = frozenset()


class Runner:
    """One run.

    Args:
        sink: Gets each record as soon as its rollout is over, and must not block.
        keep_artifact: Gets the artifact of a rollout that the record can't hold, before the record.
        notice: Told what a person should know at once: a task that can't be set up.

    Attributes:
        rollouts_total: Places in all groups.
        agents: Rollouts that hold an agent's place.
        stopped: Why the run has begun no more rollouts, before all were: its circuit breaker. None: it has not.
        resumed: Rollouts that went on where their logs had left them; `answered`: steps that these logs have given.

    Raises:
        InvalidSpec: A task names a tool that is not there.
        TaskError: It names a grader that is not there.
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
        keep_artifact: Callable[[str, bytes], None] | None = None,
        notice: Callable[[str], None] = lambda text: None,
        earlier: Earlier = Earlier(),  # noqa: B008 (frozen)
    ) -> None:
        self._client = client
        self._tasks = tasks
        self._policy = policy
        self._settings = settings
        self._sink = sink
        self._open_log = open_log
        self._keep_artifact = keep_artifact
        self._notice = notice
        self._earlier = earlier
        for task in tasks:
            grader_of(task.grader)
        self._toolboxes = {(task.tools, task.artifact): Toolbox(task) for task in tasks}
        self._sampling = Sampling(settings.group, settings.over_sample, settings.refill)
        self._plan = Plan(len(tasks), self._sampling, self._first_attempt)
        self.rollouts_total = len(tasks) * self._sampling.started
        self.agents = self.resumed = self.answered = 0
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._graders = GradingPipeline(
            client,
            settings,
            workers=settings.graders,
            waiting_max=settings.graders,  # enough that none is idle; what waits beyond that would only grow old
        )
        self._group = asyncio.TaskGroup()
        self._live: dict[Member, asyncio.Task[None]] = {}
        self._surplus: set[Member] = set()
        self._is_put_aside = False
        # Policies that ask a server say which.
        self._watch = Watch(settings.breaker, settings.template, str(getattr(policy, "endpoint", "")))
        self._preparing: asyncio.Task[None] | None = None
        self.stopped: Trip | None = None
        self._setting_up = 0
        self._changed = asyncio.Event()
        self._waited_s = {"slot": 0.0, "graders": 0.0, "environments": 0.0}

    @property
    def waits(self) -> Waits:
        """What the opening of rollouts has waited for so far."""
        return Waits(**{f"{name}_s": round(seconds, 6) for name, seconds in self._waited_s.items()})

    @property
    def activity(self) -> str:
        """What goes on now, for a person."""
        grading = self._graders.statistics()
        text = f"{self.agents} at work, {grading.waiting} wait for grading, {grading.grading} in grading"
        return f"{text}, {self._setting_up} to set up" if self._setting_up else text

    async def run(self) -> None:
        """Run them all. Cancelling frees the sandboxes of the unfinished ones and records these as cancelled.

        Raises:
            Exception: What the sink raised; it ends the run, like cancelling.
            Preempted: The run was put aside; what is not over stays as it is, without a record.
        """
        try:
            async with self._graders, self._group:
                self._preparing = self._group.create_task(self._set_up())
                await self._open_all()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    # opening

    async def _open_all(self) -> None:
        while self._plan.unfinished:
            with self._timed("slot"):
                await self._slots.acquire()
            with self._timed("graders"):
                await self._graders.room()
            member = self._plan.start()
            if member is not None:
                self.agents += 1
                self._group.create_task(self._attempt(member))
                continue
            self._slots.release()
            if self._plan.unfinished:
                self._changed.clear()
                with self._timed("environments" if self._setting_up else None):
                    await self._changed.wait()

    def _free_place(self) -> None:
        self.agents -= 1
        self._slots.release()

    @contextmanager
    def _timed(self, waits_for: str | None) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            if waits_for is not None:
                self._waited_s[waits_for] += time.monotonic() - started

    async def _set_up(self) -> None:
        tasks = [(index, task) for index, task in enumerate(self._tasks) if self._plan.waits(index)]
        self._setting_up = len(tasks)
        try:
            await prepare(tasks, self._build, self._ready, self._not_set_up)
        except Preempted:
            self._is_put_aside = True
            raise

    async def _build(self, recipe: Recipe) -> None:
        from barchan.sdk.build import build  # with its packing, which runs without recipes don't need

        await build(cast(AsyncClient, self._client), recipe)

    def _ready(self, group_index: int) -> None:
        self._plan.ready(group_index)
        self._setting_up -= 1
        self._changed.set()

    async def _not_set_up(self, group_index: int, error: Exception) -> None:
        members = self._plan.drop(group_index)
        task_id = self._tasks[group_index].task_id
        self._notice(f"task {task_id} can't be set up, its {len(members)} rollouts are void: {error}")
        for member in members:
            rollout = self._rollout(member)
            await rollout.fail(error)
            self._keep_row(rollout.row())
            self._look(member, rollout.row())
        self._setting_up -= 1
        self._changed.set()

    def _first_attempt(self, group_index: int, sample_index: int) -> int | None:
        if (group_index, sample_index) in self._earlier.scored:
            return None
        attempt = 0
        while self._rollout_id(Member(group_index, sample_index, attempt)) in self._earlier.rollout_ids:
            attempt += 1
        return attempt

    def _rollout_id(self, member: Member) -> str:
        count = member.group_index * self._sampling.started + member.sample_index
        name = f"{self._settings.run_id}-{count:06d}"
        return f"{name}-{member.attempt}" if member.attempt else name

    def _rollout(self, member: Member) -> Rollout:
        task = self._tasks[member.group_index]
        return Rollout(
            self._client,
            self._settings,
            Job(self._rollout_id(member), task, member.sample_index, member.group_index, member.attempt),
            policy_name=self._policy.name,
            toolbox=self._toolboxes[task.tools, task.artifact],
            open_log=self._open_log,
            pipeline=self._graders,
        )

    # one rollout

    async def _attempt(self, member: Member) -> None:
        """From its opening to its record; the agent's place, which the caller took, is given back."""
        rollout = self._rollout(member)
        task = asyncio.current_task()
        assert task is not None
        self._live[member] = task
        self._watch.began(rollout.rollout_id, rollout.task)
        try:
            if member in self._surplus:
                self._free_place()
            else:
                await self._play(rollout)
        except Preempted:
            self._is_put_aside = True
            raise
        except asyncio.CancelledError:
            if self._is_put_aside:
                await rollout.leave()
                raise
            if member not in self._surplus:
                await rollout.cancel()
                self._keep_row(rollout.row())
                raise
            task.uncancel()
        except Exception as error:  # the rollout's own boundary: whatever it was becomes its record
            if rollout.is_relieved:
                self._is_put_aside = True
                raise  # somebody else goes on with it, and so with this run
            del self._live[member]  # it is at its end, and whoever finds it surplus leaves it to that
            await rollout.fail(error)
        finally:
            self._live.pop(member, None)
            self.resumed += rollout.is_resumed
            self.answered += rollout.state.answered
        if member in self._surplus:
            await rollout.cancel("surplus")
        self._settle(member, rollout.row())

    async def _play(self, rollout: Rollout) -> None:
        holds_place = True
        try:
            await rollout.open()
            await rollout.hand_in(await converse(rollout, self._policy))
            if not isinstance(rollout.task.artifact, SharedArtifact):  # whose sandbox lives on in the grading
                holds_place = False
                self._free_place()
            await self._keep(rollout)
            await rollout.finish()
        finally:
            if holds_place:
                self._free_place()

    async def _keep(self, rollout: Rollout) -> None:
        artifact = rollout.artifact
        if self._keep_artifact is not None and artifact is not None and artifact.kind == "files":
            await asyncio.to_thread(self._keep_artifact, rollout.rollout_id, artifact.data)

    async def _skip(self, member: Member, reason: Literal["surplus", "group"] = "surplus") -> None:
        """The record of a member that nobody needs to start."""
        rollout = self._rollout(member)
        await rollout.end(cancelled("setup", reason))
        self._keep_row(rollout.row())

    async def _skip_quarantined(self, member: Member, why: str) -> None:
        rollout = self._rollout(member)
        await rollout.fail(TaskError(f"not begun, its task is quarantined: {why}", cause="task_quarantined"))
        self._keep_row(rollout.row())

    def _quarantine(self, group_index: int, why: str) -> None:
        """Begin no further attempts at a task."""
        members = self._plan.drop(group_index)
        if members:
            task_id = self._tasks[group_index].task_id
            self._notice(f"task {task_id} is quarantined, {len(members)} rollouts are not begun: {why}")
        for other in members:
            self._also(self._skip_quarantined(other, why))

    def _keep_row(self, row: RolloutRecord) -> None:
        """Where results can't be kept, what is under way is left as it is, for whoever goes on with the run."""
        try:
            self._sink(row)
        except BaseException:
            self._is_put_aside = True
            raise

    def _settle(self, member: Member, row: RolloutRecord) -> None:
        settled = self._plan.settle(member, row.verdict, again=is_abandoned(row.verdict))
        if not settled.counts:
            row = _too_late(row)
        self._keep_row(row)
        for other in settled.surplus:
            self._surplus.add(other)
            if other in self._live:
                self._live[other].cancel()
        for other in settled.spare:
            self._also(self._skip(other))
        if settled.given_up:
            self._give_up(settled.given_up)
        why = quarantined(row.verdict)
        if why:
            self._quarantine(member.group_index, why)
        self._look(member, row)
        self._changed.set()

    def _also(self, record: Coroutine[Any, Any, None]) -> None:
        """Make the record of one that is not begun; none while the run is cancelled: a resumed one begins it."""
        try:
            self._group.create_task(record)
        except RuntimeError:
            record.close()

    def _look(self, member: Member, row: RolloutRecord) -> None:
        """Whether voids have piled up."""
        trip = self._watch.ended(row, self._tasks[member.group_index])
        if trip is not None and trip.task_id is not None:
            self._quarantine(member.group_index, trip.message)
        elif trip is not None and self.stopped is None:
            self._stop(trip)

    def _give_up(self, members: Sequence[Member]) -> None:
        task_id = self._tasks[members[0].group_index].task_id
        self._notice(
            f"a group of task {task_id} is given up, {len(members)} of its rollouts are not begun: "
            f"fewer than the {self._sampling.min_valid} that advantages take can still be scored"
        )
        for member in members:
            self._also(self._skip(member, "group"))

    def _stop(self, trip: Trip) -> None:
        """Begin nothing more. What is under way comes to its end; what was not begun has no record, so that a resumed
        run begins it.
        """
        self.stopped = trip
        left = self._plan.stop()
        if self._preparing is not None:
            self._preparing.cancel()
        self._notice(f"{trip.message}; {left} rollouts are not begun")


def _too_late(row: RolloutRecord) -> RolloutRecord:
    """A score for a group that had filled up in the meantime."""
    seen = Evidence(source="runner", fact="reward, after its group was full", value=row.verdict.reward)
    verdict = cancelled("finished", "surplus")
    return replace(row, verdict=replace(verdict, evidence=(*verdict.evidence, seen)))
