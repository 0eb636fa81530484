"""The agent's side of a rollout: its sandbox, and what a policy has done in it, call by call."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from barchan.errors import BarchanError, SandboxExpired, SandboxLost, TaskError, TrajectoryDiverged, TransportError
from barchan.model.verdict import Cause, Evidence
from barchan.rollout.artifact import take
from barchan.rollout.calls import ToolCall
from barchan.rollout.doing import Doing
from barchan.rollout.graders.base import Artifact
from barchan.rollout.limits import Meter
from barchan.rollout.logged import FencedLog, LoggedSandbox
from barchan.rollout.ports import Client, Log, NoLog, Sandbox
from barchan.rollout.replay.restore import restored
from barchan.rollout.replay.snapshots import remove_snapshots, snapshot_after
from barchan.rollout.resuming.bodies import done_body, needs_sandbox, opened_body
from barchan.rollout.resuming.forward import Tail, forward
from barchan.rollout.resuming.operations import OpenCall, Operations, not_begun
from barchan.rollout.rules.causes import RULES
from barchan.rollout.sandboxes import Sandboxes
from barchan.rollout.setting_up import set_up
from barchan.rollout.state import AttemptState, Done, Turn
from barchan.rollout.task import Task
from barchan.rollout.tools import Toolbox, Workspace
from barchan.rollout.tools.spent import Spent
from barchan.rollout.tools.toolbox import Called, not_run
from barchan.rollout.verdict import verdict_of_error
from barchan.trajectory.format import Entry

CALLS_PER_TURN_MAX = 64
RECOVERIES_MAX = 3  # of one rollout, in one process


class Agent:
    """Made with the rollout, and there as long as its sandbox is.

    Attributes:
        workspace: None before the sandbox is there, and after its end.
        log: Set before anything is done.
    """

    def __init__(
        self,
        client: Client,
        task: Task,
        state: AttemptState,
        sandboxes: Sandboxes,
        toolbox: Toolbox,
        policy_name: str,
    ) -> None:
        self.workspace: Workspace | None = None
        self.log: Log = NoLog()
        self._client = client
        self._task = task
        self._state = state
        self._sandboxes = sandboxes
        self._toolbox = toolbox
        self._policy_name = policy_name
        self._doing: Doing | None = None
        self._recoveries = 0

    def tell_policy(self) -> None:
        """Put on record what the policy is told at first."""
        offered = {"tools": self._toolbox.schemas} if self._task.limits.turns_max > 1 else {}
        self.log.entry("message", {**self._state.messages[0], **offered})

    async def go_on(self, entries: list[Entry]) -> Tail:
        """Bring the state to where the log ends, find the sandbox, where it is needed, and finish the turn that was cut
        short. Returns what else the log has left open.
        """
        state = self._state
        tail = forward(state, entries)
        state.shell = tail.shell
        state.go_on(time.time())
        self._sandboxes.begin_grading_anew()
        if tail.was_grading:  # nobody waits for that any more
            await self._sandboxes.end_all("grader")
            await self._sandboxes.end_all("control")
        if state.verdict is not None:
            return tail
        if tail.was_grading and state.artifact is not None and state.artifact.kind == "shared":
            raise TrajectoryDiverged("its grading was cut short in the agent's own sandbox, which is not what it was")
        if not tail.is_told:
            self.tell_policy()
        if not tail.is_open:
            await self.set_up_again()
        elif needs_sandbox(state, tail):
            await self.find(entries, tail)
        else:
            await self._end_unneeded()
        if state.turn is not None:
            await self.carry_on(state.turn, tail.call)
        return tail

    async def set_up(self) -> None:
        """All of it can be done again: by its create id there is one sandbox, with one of each service."""
        state, environment = self._state, self._task.environment
        template = await self._sandboxes.template(environment)
        state.enter("create")
        sandbox = await self._sandboxes.create("agent", environment, template=template)
        self.enter(sandbox)
        state.enter("setup")
        await set_up(sandbox, self._task, self._policy_name, self.log)
        self.log.entry("sandbox", opened_body(state))
        state.enter("policy")

    async def set_up_again(self) -> None:
        """Nothing of the policy's has run: a sandbox that has ended meanwhile gives way to another."""
        try:
            await self.set_up()
        except (SandboxExpired, SandboxLost) as error:
            self._sandboxes.state.ids["agent"].append(str(error.details.get("sandbox_id", "")))
            await self.set_up()

    async def find(self, entries: list[Entry], tail: Tail) -> None:
        """The agent's, as it is; or one like it, where it is gone.

        Raises:
            SandboxLost, SandboxExpired: It is gone, and can't be made again.
        """
        state = self._state
        assert state.sandbox_id is not None
        try:
            self.enter(await self._sandboxes.again(state.sandbox_id, self._task.environment))
            self._expect(tail)
        except (SandboxExpired, SandboxLost) as error:
            await self.restore(error, entries, tail)

    async def _end_unneeded(self) -> None:
        """The artifact has left the agent's sandbox, and whoever was to end that was killed before."""
        try:
            self.enter(await self._sandboxes.again(self._state.sandbox_id or "", self._task.environment))
        except (SandboxExpired, SandboxLost):
            return
        await self.end()

    async def restore(self, error: BarchanError, entries: list[Entry], tail: Tail) -> None:
        """Go on in a sandbox that was made like the one that is gone, unless the policy itself has ended that.

        Raises:
            SandboxLost, SandboxExpired: The error, where there can't be one; the evidence is among the rollout's.
        """
        state = self._state
        if verdict_of_error(error, "exec").status == "scored":
            raise error
        made = await restored(
            self._client, self._task, self._sandboxes, entries, log=self.log, policy_name=self._policy_name
        )
        if isinstance(made, Evidence):
            self._sandboxes.state.notes += (made,)
            raise error
        state.shell = made.shell
        self.enter(made.sandbox)
        for item in tail.take_open():
            self.log.result(item.seq, not_begun(error))
        note = Evidence(source="resume", fact="sandbox lost and restored, operations repeated", value=made.operations)
        self._sandboxes.state.notes += (note,)
        self.log.entry("sandbox", {**opened_body(state), "shell": made.shell, "restored": note})
        self._expect(tail)

    def _expect(self, tail: Tail) -> None:
        """What was cut short is asked for again, and is given what it had done."""
        if self._doing is not None:
            self._doing.earlier = Operations(tail.begun)

    async def carry_on(self, turn: Turn, begun: OpenCall | None = None) -> None:
        """Carry out what is left of a turn.

        Args:
            begun: The call that was cut short.
        """
        state = self._state
        while not turn.is_over:
            state.take(turn, await self._call(turn, begun))
            begun = None
        told = state.end_turn(turn)
        if told is not None:
            self.log.entry("message", told)
        if state.over is None and self.workspace is not None:
            await snapshot_after(self.workspace, self.log, self._sandboxes, state.meter.turns)
        state.enter("policy")

    async def _call(self, turn: Turn, begun: OpenCall | None) -> Done:
        """The next call of a turn, logged; where the way to its sandbox is lost meanwhile, it goes on."""
        call, index = turn.calls[len(turn.results)], len(turn.results)
        if begun is None:
            left_s = self._state.meter.left.agent_s
            call_s = min(self._task.limits.call_s_max, left_s, left_s if turn.timeout_s is None else turn.timeout_s)
            said = {"id": call.id, "name": call.name, "arguments": call.arguments}
            args = {**said, "turn": self._state.meter.turns, "index": index, "timeout_s": call_s}
            begun = OpenCall(seq=self.log.intent("tool_call", args), timeout_s=call_s)
        while True:
            try:
                done = await self._carry_out(call, index, begun)
            except (TransportError, SandboxLost) as error:
                if "stalled" in error.details:  # run again, its time-out would pass for the agent's
                    raise
                tail = await self._recovered(error)
                if tail.call is None or tail.call.seq != begun.seq:
                    raise
                begun = tail.call
            else:
                self.log.result(begun.seq, self._told(done))
                return done

    async def _recovered(self, error: BarchanError) -> Tail:
        """Find the sandbox again after an error of the platform's, or make another. Returns what the log has left open;
        raises that error where nothing helps.
        """
        state = self._state
        self.log.check()
        self._recoveries += 1
        can_go_on = RULES[verdict_of_error(error, state.stage).cause].retry == "resume"
        if not can_go_on or self._recoveries > RECOVERIES_MAX or not isinstance(self.log, FencedLog):
            raise error
        entries = await asyncio.to_thread(self.log.entries)
        tail = forward(AttemptState(meter=Meter(self._task.limits), messages=[]), entries)
        state.shell = tail.shell
        if isinstance(error, SandboxLost):
            await self.restore(error, entries, tail)
        else:
            await self.find(entries, tail)
        return tail

    async def take(self, image: str) -> Artifact | Evidence:
        """The artifact, or why there is none; where the way to its sandbox is lost meanwhile, from the beginning.

        Args:
            image: Name for the image that a `diff` becomes.
        """
        while True:
            assert self.workspace is not None
            try:
                taken = await take(self.workspace, self._task, image)
            except (TransportError, SandboxLost) as error:
                await self._recovered(error)
            else:
                self._end_earlier()
                return taken

    def to_grade(self) -> Artifact:
        """The artifact; one that is `shared` with the sandbox that it is in."""
        artifact = self._state.artifact
        assert artifact is not None
        if artifact.kind != "shared":
            return artifact
        assert self.workspace is not None
        return replace(artifact, sandbox=self.workspace.sandbox)

    async def _carry_out(self, call: ToolCall, index: int, begun: OpenCall) -> Done:
        state, workspace, call_s = self._state, self.workspace, begun.timeout_s
        if state.over is not None:
            return Done(result=not_run(call, "the attempt is over"))
        if index >= CALLS_PER_TURN_MAX:
            return Done(result=not_run(call, f"a turn has at most {CALLS_PER_TURN_MAX} calls"))
        assert workspace is not None
        left_s = state.meter.left.agent_s
        spent = Spent(begun.spent_s, lambda spent_s: self._note_spent(begun, spent_s))
        called = await self._called(workspace, call, call_s, spent)
        self._end_earlier()
        over: Cause | None = None
        if called.submits:
            over = "completed"
        elif called.agent_s >= left_s or (called.result.status == "timed_out" and call_s == left_s):
            over = "agent_timeout"
        counts_as = call.name if call.name in self._toolbox.names else "(unknown)"
        return Done(result=called.result, agent_s=called.agent_s, counts_as=counts_as, over=over)

    def _note_spent(self, begun: OpenCall, spent_s: float) -> None:
        self.log.entry("note", {"of": begun.seq, "agent_s": spent_s})

    async def _called(self, workspace: Workspace, call: ToolCall, call_s: float, spent: Spent) -> Called:
        """Run the tool. One that has caught what the platform failed at, or made it a failure of its own, tells nothing
        of the agent: that error is raised all the same.
        """
        try:
            called = await self._toolbox.call(workspace, call, call_s, spent)
        except TaskError:
            self._check_sandbox()
            raise
        self._check_sandbox()
        return called

    def _check_sandbox(self) -> None:
        if self._doing is not None:
            self._doing.check()

    def _end_earlier(self) -> None:
        """What was cut short is over, and has asked for all that it had done."""
        if self._doing is not None:
            self._doing.earlier.end()
            self._state.answered += self._doing.earlier.answered
            self._doing.earlier = Operations()

    def _told(self, done: Done) -> Mapping[str, Any]:
        """A call's result as the log has it: all that the rollout's state comes from."""
        first_s = self.workspace.first_s if self.workspace is not None else None
        return done_body(done, first_s if self._state.first_s is None else None)

    def enter(self, sandbox: Sandbox) -> None:
        """From now on it is ended with the rollout."""
        seen: Sandbox = sandbox
        if isinstance(self.log, FencedLog):
            logging = LoggedSandbox(sandbox, self.log)
            seen, self._doing = logging, logging.doing
        self.workspace = Workspace(seen, self._task.limits.output_chars_max, self._state.shell)
        self.workspace.calls = sum(self._state.calls.values())
        self.workspace.first_s = self._state.first_s
        self._state.sandbox_id = sandbox.id

    async def end(self) -> None:
        workspace, self.workspace = self.workspace, None
        if workspace is None:
            await remove_snapshots(self._sandboxes)
            return
        self._state.first_s = workspace.first_s
        try:
            await workspace.close()
        except BarchanError as error:
            self._sandboxes.note("closing the agent's shell failed", error)
        finally:
            await self._sandboxes.end(workspace.sandbox, "agent")
            self._state.sandbox_id = None
            await remove_snapshots(self._sandboxes)
