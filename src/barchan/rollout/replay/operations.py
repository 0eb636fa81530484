"""The agent's operations as a log has them, and whether two results of one are the same. No I/O."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from barchan.trajectory.atif import sandbox_line
from barchan.trajectory.format import Entry, Kind
from barchan.trajectory.spans import as_text, spans
from barchan.trajectory.values import Cut

KINDS = ("exec", "file_write", "file_read")
_NO_CALLS = ("model_call", "turn", "hand_in", "grade")  # a call whose result never came is over with these
# What a result says of its operation; all else in it (times, ids, counters) is another each time.
COMPARED = ("exit_code", "signal", "timed_out", "oom_killed", "truncated", "restarted", "stdout", "stderr", "data")
SHOWN_CHARS_MAX = 200


class Operation(Struct, frozen=True, kw_only=True):
    """One program or file operation of the agent's that came to its end, or that its tool has left.

    Attributes:
        args: What its intent says.
        outcome: What its result says; of one that was left nobody knows.
        is_left: Its call is complete without it: the tool had a time limit of its own, say. It may have run on.
        text: The operation in one line, for a person.
    """

    seq: int
    kind: Kind
    args: dict[str, Any]
    outcome: dict[str, Any]
    text: str
    is_left: bool = False

    @property
    def is_shell(self) -> bool:
        """Whether the agent's one shell ran it."""
        return self.kind == "exec" and self.args.get("shell") == "persistent"


class Difference(Struct, frozen=True, kw_only=True):
    """An operation whose result is another one than the log's.

    Attributes:
        members: What of the result differs.
        expected, got: The first of these, cut.
        why: What the difference is made of, as far as it can be told from the two: `times`, `numbers` (process ids
            among them), `random` (hexadecimal digits, addresses, bytes that are no text), or `content`.
    """

    seq: int
    text: str
    members: tuple[str, ...]
    expected: str
    got: str
    why: str


def operations(entries: Sequence[Entry]) -> list[Operation]:
    """The agent's operations, in order: those of its tool calls, whatever sandbox they were in and whoever drove it
    then. What an open call has begun and not ended is left out, and so are reads that were left: they change nothing.
    """
    lines = {span.seq: sandbox_line(span) for span in spans(entries) if span.kind in KINDS}
    results = {entry.of: entry.body for entry in entries if entry.of is not None}
    found: list[Operation] = []
    call: int | None = None
    for entry in entries:
        if entry.kind == "tool_call":
            call = entry.seq if entry.part == "intent" else None
        elif entry.kind in _NO_CALLS:
            call = None
        if call is None or entry.part != "intent" or entry.kind not in KINDS:
            continue
        outcome = results.get(entry.seq)
        is_left = outcome is None
        if is_left and (call not in results or entry.kind == "file_read"):
            continue
        if outcome is not None and outcome.get("not_begun"):
            continue
        found.append(
            Operation(
                seq=entry.seq,
                kind=entry.kind,
                args=entry.body,
                outcome=outcome or {},
                text=lines[entry.seq],
                is_left=is_left,
            )
        )
    return found


def why_not_again(operation: Operation) -> str:
    """Why an operation can't be carried out again in another sandbox, to the same end; "": it can be tried."""
    if operation.is_left:
        return "its tool did not wait for its end"
    if any(isinstance(value, Cut) for value in operation.args.values()):
        return "the log does not hold all of what it was given"
    if operation.args.get("action") == "upload":
        return "it took files of the client's machine"
    if operation.outcome.get("timed_out"):
        return "its time-out ended it"
    if operation.outcome.get("oom_killed"):
        return "it ran out of memory"
    return ""


def digest(outcome: Mapping[str, Any]) -> str:
    """A result's digest; of long values the log has no more than that."""
    return hashlib.sha256(msgspec.json.encode(_compared(outcome), order="sorted")).hexdigest()


def compare(operation: Operation, outcome: Mapping[str, Any]) -> Difference | None:
    """What is different in another result of the operation; None: nothing."""
    was, now = _compared(operation.outcome), _compared(outcome)
    members = tuple(name for name in (*COMPARED, "error") if was.get(name) != now.get(name))
    if not members:
        return None
    expected, got = (_text(body, members[0]) for body in (operation.outcome, outcome))
    return Difference(
        seq=operation.seq,
        text=operation.text,
        members=members,
        expected=expected[:SHOWN_CHARS_MAX],
        got=got[:SHOWN_CHARS_MAX],
        why="content" if set(members) - {"stdout", "stderr", "data"} else _why(expected, got),
    )


def _compared(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Missing, false and empty say the same: logs leave out what says nothing. Of an error its type counts."""
    found = {name: _plain(outcome[name]) for name in COMPARED if outcome.get(name)}
    error = outcome.get("error")
    if isinstance(error, Mapping):
        found["error"] = as_text(error.get("type"))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return [len(value), hashlib.sha256(value).hexdigest()]
    if isinstance(value, Cut):
        return [value.size_bytes, value.sha256]
    return value


def _text(outcome: Mapping[str, Any], name: str) -> str:
    value = outcome.get(name)
    return as_text(value.get("type")) if name == "error" and isinstance(value, Mapping) else as_text(value)


_TIMES = re.compile(
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|\b(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\w*,? )?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\w* +\d+"
    r"|\b\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d+)?\b|\b1\d{9}(?:[.,]\d+|\d{3}|\d{6}|\d{9})?\b"
    r"|\b\d+(?:\.\d+)? ?(?:ns|us|µs|ms|s|sec|seconds?)\b|\b\d+m\d+(?:\.\d+)?s\b"
)
_RANDOM = re.compile(
    r"\b0x[0-9A-Fa-f]{6,}\b|\b(?=\d*[A-Fa-f])[0-9A-Fa-f]{8,}\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\ufffd+"
)
_NUMBERS = re.compile(r"\d+(?:\.\d+)?")


def _why(expected: str, got: str) -> str:
    """The least that must be left out of both for them to be equal."""
    masked = [expected, got]
    told: list[str] = []
    for name, pattern in (("times", _TIMES), ("random", _RANDOM), ("numbers", _NUMBERS)):
        after = [pattern.sub("#", text) for text in masked]
        if pattern.findall(masked[0]) != pattern.findall(masked[1]):
            told.append(name)
        masked = after
        if masked[0] == masked[1]:
            return ", ".join(told)
    return "random" if "\ufffd" in expected and "\ufffd" in got else "content"
