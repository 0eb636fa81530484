"""Logs as a Chrome trace, for Perfetto or chrome://tracing: one row per rollout."""

from collections.abc import Iterable
from typing import Any

from barchan.trajectory.reader import Trajectory
from barchan.trajectory.spans import Span, as_text, plain, spans
from barchan.trajectory.values import are_numbers

NAMES = {"model_call": "model wait", "file_write": "write", "file_read": "read"}
INSTANTS = frozenset(
    ("message", "observation", "verdict", "cancel", "note", "sandbox", "step", "turn", "hand_in", "artifact")
)
TEXT_MAX = 400  # of an argument: the trace shows when things were, the log what they were


def chrome_trace(trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """The trace of many rollouts. Times are microseconds since the first of their starts.

    A run is a process, a rollout a thread. Spans of a rollout that overlap without one holding the other (parallel
    tool calls) go to further rows of the same name, because a row can only nest them.
    """
    events: list[dict[str, Any]] = []
    runs: dict[str, int] = {}
    row = 0
    for log in trajectories:
        run = runs.setdefault(log.header.run_id, len(runs) + 1)
        title = f"{log.header.rollout_id} {log.header.task_id}"
        found = spans(log.entries)
        lanes = _lanes([span for span in found if span.kind not in INSTANTS]) or [[]]
        events += [_instant(span, run, row + 1) for span in found if span.kind in INSTANTS]
        for lane in lanes:
            row += 1
            events.append(_named("thread_name", run, row, title))
            events += [_span(span, run, row) for span in lane]
    zero_ns = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - zero_ns) / 1e3
    events += [_named("process_name", number, 0, name) for name, number in runs.items()]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lanes(found: list[Span]) -> list[list[Span]]:
    lanes: list[list[Span]] = []
    open_ends: list[list[int]] = []
    for span in sorted(found, key=lambda span: (span.start_ns, -span.end_ns)):
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                lane.append(span)
                ends.append(span.end_ns)
                break
        else:
            lanes.append([span])
            open_ends.append([span.end_ns])
    return lanes


def _span(span: Span, run: int, row: int) -> dict[str, Any]:
    return {**_event(span, run, row), "ph": "X", "dur": (span.end_ns - span.start_ns) / 1e3}


def _instant(span: Span, run: int, row: int) -> dict[str, Any]:
    return {**_event(span, run, row), "ph": "i", "s": "t"}


def _event(span: Span, run: int, row: int) -> dict[str, Any]:
    arguments = {"seq": span.seq, "known": span.known, **_arguments(span.body)}
    return {
        "name": _name(span),
        "cat": span.kind,
        "ts": span.start_ns,  # made relative once all are known
        "pid": run,
        "tid": row,
        "args": arguments,
    }


def _named(what: str, run: int, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": run, "tid": row, "args": {"name": name}}


def _name(span: Span) -> str:
    if span.kind == "tool_call":
        return as_text(span.body.get("name")) or "tool_call"
    return NAMES.get(span.kind, span.kind)


def _arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Small facts only: a list of token ids becomes its length, a long text its start."""
    shown: dict[str, Any] = {}
    for key, value in plain(body).items():
        if isinstance(value, list) and are_numbers(value):
            shown[f"{key}_count"] = len(value)
        elif isinstance(value, str):
            shown[key] = value[:TEXT_MAX]
        elif isinstance(value, dict | list):
            shown[key] = str(value)[:TEXT_MAX]
        else:
            shown[key] = value
    return shown
