"""From a log to the state of its rollout: what is complete is applied, what is not is told. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from barchan.errors import BlobCorrupt
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.calls import ToolCall, ToolResult
from barchan.rollout.graders.base import Artifact
from barchan.rollout.record import Completion, Resources
from barchan.rollout.resuming.operations import NOT_BEGUN, OpenCall, Recorded, point_of
from barchan.rollout.state import AttemptState, Decided, Done, Turn
from barchan.sdk.aio.shell import ShellPoint
from barchan.trajectory.format import Entry, Kind

_OPERATIONS: frozenset[Kind] = frozenset({"exec", "file_write", "file_read"})


@dataclass(kw_only=True)
class Tail:
    """What a log has left open.

    Attributes:
        is_open: The agent's sandbox was made and set up.
        call: The tool call that has no result.
        ended: How the agent's part ended: its artifact is taken, or about to be.
        taking: Programs by which the artifact was being taken, and that have no result.
        is_told: The policy's opening message is in the log.
        was_grading: A grading was begun.
        untaken: Why there is no artifact, where the log says so.
        shell: Where the agent's shell stood behind the last command that is complete.
    """

    is_open: bool = False
    call: OpenCall | None = None
    ended: Cause | None = None
    taking: list[Recorded] = field(default_factory=list)
    is_told: bool = False
    was_grading: bool = False
    untaken: Evidence | None = None
    shell: ShellPoint | None = None

    @property
    def begun(self) -> list[Recorded]:
        """What was done of what was cut short, and is not done twice: the call, or the taking of the artifact."""
        return self.taking if self.call is None else self.call.operations

    def take_open(self) -> list[Recorded]:
        """Of these, those without a result, which are none of them any more."""
        found = [item for item in self.begun if item.result is None]
        for item in found:
            self.begun.remove(item)
        return found


def forward(state: AttemptState, entries: Iterable[Entry]) -> Tail:
    """Bring a fresh state to where the log's last entry left it.

    Raises:
        BlobCorrupt: An entry is none that a rollout writes.
    """
    reader = _Forward(state)
    for entry in entries:
        try:
            reader.take(entry)
        except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
            raise BlobCorrupt(
                f"entry {entry.seq} of the log, a {entry.kind}, is none: {error}", seq=entry.seq
            ) from error
    return reader.tail


class _Forward:
    def __init__(self, state: AttemptState) -> None:
        self.tail = Tail()
        self._state = state
        self._grading: int | None = None
        self._last_ns = 0
        self._has_newer = False  # a snapshot was just made, and those before it are removed next
        self._applied = {
            "sandbox": self._sandbox,
            "model_call": self._model_call,
            "step": self._step,
            "turn": self._turn,
            "hand_in": self._hand_in,
            "artifact": self._artifact,
            "verdict": self._verdict,
            "note": self._note,
            "message": self._message,
        }

    def take(self, entry: Entry) -> None:
        if entry.part == "header":
            if not self._last_ns:
                self._state.started_unix_s = float(entry.body["created_unix_s"])
            self._last_ns, self._grading = entry.unix_ns, None  # nobody's time, and nobody's grading
            self._has_newer = False  # whoever was to remove those may have been killed before
            return
        if self._has_newer:
            self._has_newer, self._state.sandboxes.snapshots = False, self._state.sandboxes.snapshots[-1:]
        spent_s, self._last_ns = (entry.unix_ns - self._last_ns) / 1e9, entry.unix_ns
        self._state.spent_s[self._state.stage] += max(0.0, spent_s)
        if entry.kind == "grade":
            self._grading = entry.seq if entry.part == "intent" else None
            self.tail.was_grading = True
        elif self._grading is not None and entry.kind != "verdict":
            return  # what a grader or judge does
        elif entry.part == "entry":
            apply = self._applied.get(entry.kind or "")
            if apply is not None:
                apply(entry.body)
        elif entry.kind == "tool_call":
            self._tool_call(entry)
        elif entry.kind in _OPERATIONS:
            self._operation(entry)
        elif entry.kind == "snapshot":
            self._snapshot(entry)
        elif entry.kind == "restore" and entry.part == "intent":  # which may have made one, under the next create id
            self._state.sandboxes.ids["agent"].append("")

    def _sandbox(self, body: Mapping[str, Any]) -> None:
        """Also one that was restored in place of another."""
        state, sandboxes = self._state, self._state.sandboxes
        sandboxes.ids["agent"] = [str(name) for name in body["made"]]
        sandboxes.create_s["agent"] = float(body["create_s"])
        sandboxes.queue_s = float(body["queue_s"])
        sandboxes.agent_template = str(body["template"])
        sandboxes.resources = msgspec.convert(body["resources"], Resources)
        state.sandbox_id = str(body["sandbox_id"])
        if "restored" in body:
            self.tail.shell = msgspec.convert(body["shell"], ShellPoint | None)
            sandboxes.notes += (msgspec.convert(body["restored"], Evidence),)
        self.tail.is_open = True
        state.stage = "policy"

    def _snapshot(self, entry: Entry) -> None:
        if entry.part == "intent":
            self._state.sandboxes.snapshots.append(str(entry.body["name"]))
        self._has_newer = "snapshot_id" in entry.body

    def _model_call(self, body: Mapping[str, Any]) -> None:
        self._state.sampled(msgspec.convert(dict(body), Completion))
        if "step" in body:
            self._step(body["step"])

    def _step(self, body: Mapping[str, Any]) -> None:
        self._state.decided = msgspec.convert(dict(body), Decided)
        self._state.answered += 1

    def _turn(self, body: Mapping[str, Any]) -> None:
        state = self._state
        turn = Turn(calls=msgspec.convert(body["calls"], list[ToolCall]), timeout_s=body.get("timeout_s"))
        state.begin_turn(turn)
        state.stage = "exec"
        self._end_if_over(turn)

    def _tool_call(self, entry: Entry) -> None:
        if entry.part == "intent":
            self.tail.call = OpenCall(seq=entry.seq, timeout_s=float(entry.body["timeout_s"]))
            return
        turn, call = self._state.turn, self.tail.call
        if turn is None or call is None or call.seq != entry.of:
            raise ValueError("it belongs to no turn")
        for item in call.operations:
            self._shell_after(item)
        self.tail.call = None
        told = entry.body
        planned = turn.calls[len(turn.results)]
        result = ToolResult(
            call_id=planned.id,
            name=planned.name,
            content=told["content"],
            status=told["status"],
            truncated=bool(told["truncated"]),
        )
        self._state.first_s = told.get("first_s", self._state.first_s)
        done = Done(
            result=result,
            agent_s=float(told.get("agent_s", 0.0)),
            counts_as=told.get("counts_as"),
            over=cast(Cause | None, told.get("over")),
        )
        self._state.take(turn, done)
        self._end_if_over(turn)

    def _end_if_over(self, turn: Turn) -> None:
        if turn.is_over:
            self._state.end_turn(turn)
            self._state.stage = "policy"

    def _operation(self, entry: Entry) -> None:
        operations = self.tail.begun
        if entry.part == "intent":
            # Outside of a call they are the platform's, which asks anew for what has come to its end.
            if self.tail.call is not None or (self.tail.ended is not None and entry.kind == "exec"):
                operations.append(Recorded.of(entry))
            return
        for place, item in enumerate(operations):
            if item.seq == entry.of and (entry.body.get(NOT_BEGUN) or self.tail.call is None):
                del operations[place]
                return
            if item.seq == entry.of:
                item.result = entry.body
                return

    def _shell_after(self, item: Recorded) -> None:
        if item.result is not None and "point" in item.result:
            self.tail.shell = point_of(item.result)

    def _hand_in(self, body: Mapping[str, Any]) -> None:
        state = self._state
        state.over = self.tail.ended = cast(Cause, body["ended"])
        state.facts = msgspec.convert(body["facts"], tuple[Evidence, ...])
        state.image = str(body["image"])
        state.stage = "exec"

    def _artifact(self, body: Mapping[str, Any]) -> None:
        if "untaken" in body:
            self.tail.untaken = msgspec.convert(body["untaken"], Evidence)
            return
        self._state.artifact = Artifact(
            kind=body["kind"],
            data=body["data"],
            image=body["image"],
            notes=msgspec.convert(body["notes"], tuple[Evidence, ...]),
        )
        self._state.ended = self.tail.ended
        self._state.stage = "grade"

    def _note(self, body: Mapping[str, Any]) -> None:
        self._state.asked_again += bool(body.get("asked_again"))
        if self.tail.call is not None and body.get("of") == self.tail.call.seq:
            self.tail.call.spent_s = float(body["agent_s"])

    def _message(self, body: Mapping[str, Any]) -> None:
        self.tail.is_told = True

    def _verdict(self, body: Mapping[str, Any]) -> None:
        self._state.verdict = msgspec.convert(dict(body), Verdict)
        self._state.over = self._state.over or self._state.verdict.cause
