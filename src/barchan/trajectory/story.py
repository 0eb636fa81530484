"""A log told to a person: one line per thing that happened, and the rollout in numbers."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from barchan.trajectory.atif import output_text, sandbox_line
from barchan.trajectory.format import Entry
from barchan.trajectory.reader import Following, Trajectory
from barchan.trajectory.spans import Span, as_text, spans, switches, tokens


class Line(Struct, frozen=True, kw_only=True):
    """One thing that happened.

    Attributes:
        at_s: Since the log's start.
        nested: It happened during the tool call or grading above it.
        text: What it was; `detail` is what it said or gave, whole.
        good: False for what failed or whose end is not known.
    """

    seq: int
    at_s: float
    nested: bool
    text: str
    detail: str = ""
    good: bool = True


class Account(Struct, frozen=True, kw_only=True):
    """A rollout in numbers. A turn is what the policy's model said and the calls in it, however many model calls it
    took, none included; `reward` is None where nothing was scored; `policy_switches` is how often the version of the
    policy changed.
    """

    rollout_id: str
    run_id: str
    task_id: str
    policy: str
    epoch: int
    entries: int
    turns: int
    tool_calls: int
    execs: int
    prompt_tokens: int
    completion_tokens: int
    policy_switches: int
    seconds: float
    status: str
    reward: float | None
    cause: str
    open_intents: tuple[int, ...]
    torn_bytes: int


def account(log: Trajectory) -> Account:
    found = spans(log.entries)
    counts = Counter(span.kind for span in found)
    said = [tokens(span.body) for span in found if span.kind == "model_call" and span.inside is None]
    verdict: dict[str, Any] = next((span.body for span in reversed(found) if span.kind == "verdict"), {})
    reward = verdict.get("reward")
    header = log.header
    return Account(
        rollout_id=header.rollout_id,
        run_id=header.run_id,
        task_id=header.task_id,
        policy=header.policy,
        epoch=header.epoch,
        entries=len(log.entries),
        turns=_turns(found),
        tool_calls=counts["tool_call"],
        execs=counts["exec"],
        prompt_tokens=sum(prompt or 0 for prompt, _ in said),
        completion_tokens=sum(completion or 0 for _, completion in said),
        policy_switches=len(switches(found)),
        seconds=round(max([_started_s(log), *(span.end_ns / 1e9 for span in found)]) - _started_s(log), 6),
        status=as_text(verdict.get("status")) or ("cancelled" if counts["cancel"] else "unfinished"),
        reward=float(reward) if isinstance(reward, int | float) else None,
        cause=as_text(verdict.get("cause")),
        open_intents=tuple(entry.seq for entry in log.open_intents),
        torn_bytes=log.torn_bytes,
    )


def story(log: Trajectory) -> list[Line]:
    """Everything that happened, in order."""
    return lines(spans(log.entries), _started_s(log))


def lines(found: Sequence[Span], started_s: float) -> list[Line]:
    """Spans as lines; a switch of the policy's version is told before the call that shows it.

    Args:
        started_s: The log's start, in unix time.
    """
    changed = {switch.seq: switch for switch in switches(found)}
    told: list[Line] = []
    for span in found:
        at_s = round(span.start_ns / 1e9 - started_s, 6)
        if switch := changed.get(span.seq):
            text = f"policy switch: from version {switch.before} to {switch.after}"
            told.append(Line(seq=span.seq, at_s=at_s, nested=False, text=text))
        told.append(
            Line(
                seq=span.seq,
                at_s=at_s,
                nested=span.inside is not None,
                text=_text(span),
                detail=_detail(span),
                good=span.known and _good(span.body),
            )
        )
    return told


class Teller:
    """Tells a log that is still being written: each thing once, when no later entry can change what is said of it, or
    when something else began after it.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._header: Entry | None = None
        self._started_s = 0.0
        self._untold: list[Entry] = []
        self._before: Entry | None = None  # the entry before those, by whose time some begin
        self._versioned: Span | None = None  # the last model call that was told and says its policy's version

    def tell(self, entries: Sequence[Entry]) -> list[Line]:
        """What is to be said now that these have come, in order."""
        for entry in entries:
            if entry.part == "header":
                self._started_s = self._started_s or entry.unix_ns / 1e9
                self._header = entry
            else:
                self._untold.append(entry)
                self.is_over = self.is_over or entry.kind == "verdict"
        if self._header is None:
            return []
        context = [self._header] if self._before is None else [self._header, self._before]
        found = [span for span in spans([*context, *self._untold]) if span.seq != context[-1].seq]
        outer = [span for span in found if span.inside is None]
        if not self.is_over and outer and not outer[-1].known:
            found = found[: found.index(outer[-1])]
        if not found:
            return []
        last, told = found[-1].seq, {span.seq for span in found}
        done = [entry for entry in self._untold if entry.seq <= last or entry.of in told]
        self._untold = [entry for entry in self._untold if entry.seq > last and entry.of not in told]
        self._before = max(done, key=lambda entry: entry.seq)
        earlier = [] if self._versioned is None else [self._versioned]
        given = lines([*earlier, *found], self._started_s)[len(earlier) :]
        calls = [span for span in found if span.kind == "model_call" and span.inside is None]
        said = [span for span in calls if span.body.get("policy_version") is not None]
        self._versioned = said[-1] if said else self._versioned
        return given


def follow(path: Path, pause: Callable[[], None]) -> Iterator[Line]:
    """A log's lines as they come, until its verdict.

    Args:
        pause: Called where there is nothing new yet.

    Raises:
        NotFound: There is no such log.
        BlobCorrupt: It is broken.
    """
    reading, teller = Following(path), Teller()
    while True:
        entries = reading.new()
        yield from teller.tell(entries)
        if teller.is_over:
            return
        if not entries:
            pause()


def _turns(found: Sequence[Span]) -> int:
    """Calls of one turn have its number; in a log without numbers they follow each other. A turn without calls has the
    model calls before the next message, or before the end.
    """
    turns, is_open, number, before = 0, False, None, ""
    for span in found:
        if span.inside is not None:
            continue
        if span.kind == "tool_call":
            given = span.body.get("turn")
            if given != number if isinstance(given, int) else before != "tool_call":
                turns += 1
            number, is_open = given, False
        elif span.kind == "model_call":
            is_open = True
        elif is_open and span.kind in ("message", "observation"):
            turns, is_open = turns + 1, False
        before = span.kind
    return turns + is_open


def _started_s(log: Trajectory) -> float:
    return log.entries[0].unix_ns / 1e9


def _text(span: Span) -> str:
    body = span.body
    took = f"{span.seconds * 1e3:.1f} ms" if span.known else "no result in the log"
    match span.kind:
        case "message":
            return f"{as_text(body.get('role')) or 'message'}:"
        case "observation":
            return "observation:"
        case "model_call":
            prompt, completion = ("?" if count is None else count for count in tokens(body))
            version = body.get("policy_version")
            policy = "" if version is None else f", policy version {as_text(version)}"
            return f"model: {prompt} tokens in, {completion} out, {took}{policy}"
        case "tool_call":
            return f"tool {as_text(body.get('name'))} {_flat(body.get('arguments'))} -> {_end(body)}{took}"
        case "exec" | "file_write" | "file_read":
            return f"{sandbox_line(span)} -> {_end(body)}{took}"
        case "grade":
            return f"grade: {_end(body)}{took}"
        case "verdict":
            reward = body.get("reward")
            told = f"verdict: {as_text(body.get('status'))}, {as_text(body.get('cause'))}"
            if reward is not None:
                return f"{told}, reward {reward}"
            facts = [fact for fact in body.get("evidence") or () if isinstance(fact, dict)]
            return "; ".join([told, *(f"{fact.get('source')}: {fact.get('value')}" for fact in facts[:3])])
        case "snapshot":
            kept = f"{as_text(body.get('name'))}, with {'memory' if body.get('snapshot_kind') == 'memory' else 'files'}"
            return f"snapshot after turn {body.get('turn')}: {kept} -> {_end(body)}{took}"
        case "sandbox":
            return f"sandbox {as_text(body.get('sandbox_id'))}, of {as_text(body.get('template'))}"
        case "step" | "turn":
            calls = body.get("tool_calls", body.get("calls"))
            named = [as_text(call.get("name")) for call in calls or () if isinstance(call, dict)]
            return f"{span.kind}: {', '.join(named) or 'no calls'}{', the last' if body.get('is_last') else ''}"
        case "restore":
            origin = as_text(body.get("snapshot")) or "the task's own start"
            done = f"{body.get('operations')} operations carried out again"
            return f"restore from {origin}: {done} -> {_end(body)}{took}"
        case _:
            return f"{span.kind}: {_flat(body)}"


def _end(body: dict[str, Any]) -> str:
    facts = [as_text(body["status"])] if body.get("status") else []
    facts += [f"exit code {body['exit_code']}"] if body.get("exit_code") is not None else []
    facts += [name.replace("_", " ") for name in ("timed_out", "oom_killed", "truncated") if body.get(name)]
    if body.get("error"):
        facts.append(f"error {_flat(body['error'])}")
    return "".join(f"{fact}, " for fact in facts)


def _detail(span: Span) -> str:
    body = span.body
    if span.kind == "model_call":
        return as_text(body.get("text"))
    if span.kind in ("message", "observation", "tool_call", "exec", "file_read"):
        return output_text(body)
    return as_text(body.get("data")) if span.kind == "file_write" else ""


def _good(body: dict[str, Any]) -> bool:
    return not any(body.get(name) for name in ("exit_code", "timed_out", "oom_killed", "error"))


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_flat(item)}" for key, item in value.items())
    return as_text(value)
