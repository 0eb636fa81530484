"""What a policy asks for and what it gets back: tool calls, their results, observations. No I/O."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from barchan.model.verdict import Cause
from barchan.rollout.limits import Left

Message = dict[str, Any]
Status = Literal["ok", "failed", "timed_out", "malformed", "not_run"]


class ToolCall(Struct, frozen=True, kw_only=True):
    """One call as a model makes it: `arguments` is JSON text, whatever is in it."""

    id: str = ""
    name: str
    arguments: str = "{}"

    @property
    def as_message(self) -> dict[str, Any]:
        """The call as an assistant's message holds it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolResult(Struct, frozen=True, kw_only=True):
    """What came of one call: the text the policy sees, and how it went.

    `status`: `failed` is a program or file operation that did not succeed; `malformed` a call that could not be
    carried out as it was made; `not_run` one that came after the rollout was over. `truncated`: the middle of the
    output was left out, which the text says too.
    """

    call_id: str
    name: str
    content: str
    status: Status = "ok"
    truncated: bool = False


class Observation(Struct, frozen=True, kw_only=True):
    """What a policy knows before its next turn.

    Attributes:
        messages: The whole conversation so far, in the form of OpenAI's chat completions.
        tools: The tools' schemas, in the same form.
        left: What the limits still allow.
        turn: Turns taken.
        results: What came of the calls of the turn before.
        over: Why no turn is left, or None. `completed`: it was submitted. Then `finish` is all that remains.
    """

    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    left: Left
    turn: int
    results: tuple[ToolResult, ...] = ()
    over: Cause | None = None


def call_to(name: str, call_id: str = "", **arguments: Any) -> ToolCall:
    """A call written by a program."""
    return ToolCall(id=call_id, name=name, arguments=msgspec.json.encode(arguments).decode())


def parse_calls(values: Sequence[ToolCall | Mapping[str, Any]], turn: int) -> list[ToolCall]:
    """Calls from whatever a model or its server made of them, each with an id. Never raises: a call that can't be read
    has a name that no tool has, or arguments that no tool takes.
    """
    calls = [value if isinstance(value, ToolCall) else _parse(value) for value in values]
    return [
        call if call.id else ToolCall(id=f"call_{turn}_{index}", name=call.name, arguments=call.arguments)
        for index, call in enumerate(calls)
    ]


def _parse(value: object) -> ToolCall:
    outer: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    function = outer.get("function", outer)
    inner: Mapping[str, Any] = function if isinstance(function, Mapping) else {}
    arguments = inner.get("arguments", "{}")
    return ToolCall(id=_text(outer.get("id")), name=_text(inner.get("name")), arguments=_json(arguments))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _json(arguments: object) -> str:
    """Some servers give the object itself in place of its text."""
    if isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.encode(arguments).decode()
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        return f"{type(arguments).__name__} in place of JSON text"
