"""A log's entries as what happened, from when to when: an intent and its result are one span."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from barchan.trajectory.format import Entry, Kind
from barchan.trajectory.values import Cut, are_numbers

ENCLOSING = ("tool_call", "grade")


class Span(Struct, frozen=True, kw_only=True):
    """One thing that happened.

    Attributes:
        body: What the intent and the result say together; the result wins.
        known: The result is in the log (or it needs none).
        start_ns, end_ns: Wall time, read through the monotonic clock of the log's segment. For a model call that was
            recorded after the fact: its `wait_ms`, or else all the time since the entry before it.
        inside: Seq of the tool call or grading during which it happened.
    """

    seq: int
    kind: Kind
    body: dict[str, Any]
    known: bool
    start_ns: int
    end_ns: int
    inside: int | None = None

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def spans(entries: Sequence[Entry]) -> list[Span]:
    """The spans of a whole log in the order of their starts; an intent without a result lasts to the log's end."""
    times = _wall_times(entries)
    results = {entry.of: index for index, entry in enumerate(entries) if entry.of is not None}
    found: list[Span] = []
    around: list[tuple[Entry, int | None]] = []  # what encloses the next entry, and the index of its result
    for index, entry in enumerate(entries):
        if entry.kind is None:  # a new writer goes on with no other work than that whose end it tells
            around = [(outer, last) for outer, last in around if last is not None and last > index]
            continue
        if entry.part == "result":
            continue
        around = [(outer, last) for outer, last in around if _encloses(outer, last, entry, index)]
        end = index if entry.part == "entry" else results.get(entry.seq)
        body = entry.body if end in (None, index) else {**entry.body, **entries[end].body}
        found.append(
            Span(
                seq=entry.seq,
                kind=entry.kind,
                body=body,
                known=end is not None,
                start_ns=_start(entry, times, index),
                end_ns=max(times[index], times[-1 if end is None else end]),
                inside=around[-1][0].seq if around else None,
            )
        )
        if entry.kind in ENCLOSING and entry.part == "intent":
            around.append((entry, end))
    return found


def _encloses(outer: Entry, last: int | None, entry: Entry, index: int) -> bool:
    """A tool call whose result never came is over when the model is asked again, or grading begins."""
    if last is not None:
        return index < last
    return outer.kind == "grade" or entry.kind not in ("model_call", "grade")


def _start(entry: Entry, times: list[int], index: int) -> int:
    if entry.kind != "model_call" or entry.part != "entry":
        return times[index]
    wait_ms = entry.body.get("wait_ms")
    if isinstance(wait_ms, int | float):
        return times[index] - int(wait_ms * 1e6)
    return min(times[index], times[max(0, index - 1)])


def _wall_times(entries: Sequence[Entry]) -> list[int]:
    """Each header ties its segment's monotonic clock to the wall clock, so that a step of the latter moves no span."""
    times, offset_ns = [], 0
    for entry in entries:
        if entry.part == "header":
            offset_ns = entry.unix_ns - entry.mono_ns
        times.append(entry.mono_ns + offset_ns)
    return times


class Switch(Struct, frozen=True, kw_only=True):
    """A model call, by its seq, that another version of the policy answered than the one before it."""

    seq: int
    before: str
    after: str


def switches(found: Sequence[Span]) -> list[Switch]:
    """Where the policy's version changed; calls that say no version, and those of a judge, change nothing."""
    seen: list[Switch] = []
    before: str | None = None
    for span in found:
        if span.kind != "model_call" or span.inside is not None or span.body.get("policy_version") is None:
            continue
        version = as_text(span.body["policy_version"])
        if before is not None and version != before:
            seen.append(Switch(seq=span.seq, before=before, after=version))
        before = version
    return seen


def as_text(value: Any) -> str:
    """A logged value for a reader of text: bytes decoded, long values with a mark where their middle is missing."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Cut):
        missing = value.size_bytes - len(value.head) - len(value.tail)
        head, tail = value.head.decode("utf-8", "replace"), value.tail.decode("utf-8", "replace")
        return f"{head}\n[... {missing} bytes are left out here ...]\n{tail}"
    return "" if value is None else str(value)


def plain(value: Any) -> Any:
    """A logged value as plain JSON: what `as_text` says of bytes and long values, everything else as it is."""
    if isinstance(value, bytes | Cut):
        return as_text(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list) and not are_numbers(value):
        return [plain(item) for item in value]
    return value


def tokens(body: dict[str, Any]) -> tuple[int | None, int | None]:
    """Prompt and completion tokens of a model call: as its server counted, else as many as there are ids."""
    usage = body.get("usage")
    counted = usage if isinstance(usage, dict) else {}
    return (
        _count(counted.get("prompt_tokens"), body.get("prompt_ids")),
        _count(counted.get("completion_tokens"), body.get("completion_ids")),
    )


def _count(counted: Any, ids: Any) -> int | None:
    if type(counted) is int:
        return counted
    return len(ids) if isinstance(ids, list) and ids else None
