"""What a tool had done in its sandbox before it was cut short: given again to the same tool when it is run again.

A tool is one or many operations. Those that the log has a result of are answered from it; the one that has none is
asked of the sandbox by its own id; what comes after is new. Operations are matched by what they ask: a tool that asks
for something else than it did is no repetition, and nobody guesses what it would have done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from barchan.errors import BarchanError, ReadTimeout, TrajectoryDiverged, from_wire
from barchan.model.sandbox import ExecResult
from barchan.sdk.aio.shell import ShellPoint, ShellResult
from barchan.trajectory.format import Entry, Kind
from barchan.trajectory.values import Cut, from_json, to_json

NOT_BEGUN = "not_begun"
STALLED = "stalled_s"
# What says where, when and how an operation was done, and not what it is.
_UNMATCHED = frozenset({"sandbox_id", "timeout_s", "at", "process_id"})


@dataclass(kw_only=True)
class Recorded:
    """One operation of a log. `result` is None where none is known."""

    seq: int
    kind: Kind
    op_id: str
    args: dict[str, Any]
    result: dict[str, Any] | None = None

    @classmethod
    def of(cls, intent: Entry) -> "Recorded":
        assert intent.kind is not None
        return cls(seq=intent.seq, kind=intent.kind, op_id=intent.op_id or "", args=intent.body)

    @property
    def is_whole(self) -> bool:
        """Whether the log holds all of its result."""
        return self.result is not None and not _is_cut(self.result)


@dataclass(kw_only=True)
class OpenCall:
    """A tool call that the log has no result of.

    Attributes:
        timeout_s: Its time, as it was given.
        operations: What it did in the sandbox.
        spent_s: What it had taken of the agent's time when that was last noted.
    """

    seq: int
    timeout_s: float
    spent_s: float = 0.0
    operations: list[Recorded] = field(default_factory=list)


class Operations:
    """Those of one tool call, in their order."""

    def __init__(self, recorded: Sequence[Recorded] = ()) -> None:
        self._left = list(recorded)
        self.answered = 0

    @property
    def is_left(self) -> bool:
        return bool(self._left)

    def take(self, kind: Kind, args: Mapping[str, Any]) -> Recorded | None:
        """The operation that asked for the same; None: all are taken, and it is a new one.

        Raises:
            TrajectoryDiverged: It asks for something else than was done.
        """
        if not self._left:
            return None
        asked = comparable(args)
        for place, item in enumerate(self._left):
            if item.kind == kind and comparable(item.args) == asked:
                self.answered += item.result is not None
                return self._left.pop(place)
        first = self._left[0]
        raise TrajectoryDiverged(
            f"entry {first.seq} of the log is a {first.kind}; when its tool is run again it asks for another {kind}",
            seq=first.seq,
        )

    def end(self) -> None:
        """The tool asks for nothing more.

        Raises:
            TrajectoryDiverged: It had done more.
        """
        if self._left:
            first = self._left[0]
            raise TrajectoryDiverged(
                f"entry {first.seq} of the log is a {first.kind} that its tool does not ask for when it is run again",
                seq=first.seq,
            )


def comparable(args: Mapping[str, Any]) -> Any:
    """What an operation asks for, the same before it was written to a log and after."""
    plain = {name: value for name, value in args.items() if name not in _UNMATCHED}
    return from_json(msgspec.json.decode(msgspec.json.encode(to_json(plain, is_whole=True))))


def require_same(recorded: Recorded, outcome: Mapping[str, Any]) -> None:
    """Check what was asked for again against what the log holds of it: head, tail and digest.

    Raises:
        TrajectoryDiverged: It is something else by now.
    """
    written = from_json(msgspec.json.decode(msgspec.json.encode(to_json(outcome))))
    if written != recorded.result:
        raise TrajectoryDiverged(
            f"entry {recorded.seq} of the log, a {recorded.kind}, gives something else when it is asked for again",
            seq=recorded.seq,
        )


def error_body(error: BaseException) -> dict[str, Any]:
    """How an operation's failure stands in a log."""
    told: dict[str, Any] = {"type": type(error).__name__, "message": str(error)[:1000]}
    if isinstance(error, BarchanError):
        told |= {"code": error.code, "details": dict(error.details)}
    return {"error": told}


def raise_logged(result: Mapping[str, Any]) -> None:
    """Raise what an operation raised then, where it did; and where a time-out of the platform's making ended it.

    Raises:
        ReadTimeout: The latter: it says nothing about the agent.
    """
    if STALLED in result:
        raise ReadTimeout(f"it was ended while the node did not answer, for {result[STALLED]:g} s and more", stalled=1)
    error = result.get("error")
    if isinstance(error, Mapping):
        message, details = str(error.get("message", "")), error.get("details")
        raise from_wire(str(error.get("code", "")), message, dict(details) if isinstance(details, Mapping) else {})


def not_begun(error: BaseException) -> dict[str, Any]:
    """How it stands in a log that an operation has not begun in the sandbox that goes on, whatever became of it in one
    that is gone: it counts for nothing, and is done anew.
    """
    return {NOT_BEGUN: True, **error_body(error)}


def exec_result(result: Mapping[str, Any], op_id: str) -> ExecResult:
    return msgspec.convert({"process_id": op_id, **result}, ExecResult)


def shell_result(result: Mapping[str, Any]) -> ShellResult:
    members = {name: value for name, value in result.items() if name != "point"}
    return msgspec.convert({"stdout": b"", "stderr": b"", **members}, ShellResult)


def point_of(result: Mapping[str, Any]) -> ShellPoint | None:
    """Where a shell stood after a command; None: it had ended."""
    point = result.get("point")
    return msgspec.convert(point, ShellPoint) if point is not None else None


def _is_cut(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_cut, value.values()))
    return isinstance(value, Cut)
