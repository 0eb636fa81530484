"""Logs as ATIF, the Agent Trajectory Interchange Format that Harbor reads (version 1.8)."""

from datetime import UTC, datetime
from typing import Any

import msgspec

from barchan.trajectory.reader import Trajectory
from barchan.trajectory.spans import Span, as_text, plain, spans, tokens

SCHEMA_VERSION = "ATIF-v1.8"
ON_THE_SANDBOX = frozenset(("exec", "file_write", "file_read"))
SOURCES = {"system": "system", "user": "user", "developer": "system", "assistant": "agent"}


def atif(log: Trajectory) -> dict[str, Any]:
    """One rollout as an ATIF document.

    A model call and the tool calls after it, with what they gave, are one step. What the platform did in the sandbox on
    its own is a `system` step; what tool calls and graders did to do their work is left out. The verdict, and what
    identifies the rollout, stand in the root's `extra`.
    """
    steps = _Steps()
    for span in spans(log.entries):
        steps.add(span)
    header = log.header
    agent = {
        "name": header.policy or "barchan",
        "version": header.barchan_version,
        "model_name": steps.model_name,
        "tool_definitions": steps.tools,
    }
    extra = {
        "run_id": header.run_id,
        "task_id": header.task_id,
        "group_index": header.group_index,
        "sample_index": header.sample_index,
        "verdict": steps.verdict,
        "cancel": steps.cancel,
        "open_intents": [entry.seq for entry in log.open_intents] or None,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": header.rollout_id,
        "trajectory_id": header.rollout_id,
        "agent": _given(agent),
        "steps": steps.numbered(),
        "final_metrics": steps.totals(),
        "extra": _given(extra),
    }


class _Steps:
    def __init__(self) -> None:
        self.model_name: str | None = None
        self.tools: list[Any] | None = None
        self.verdict: dict[str, Any] | None = None
        self.cancel: dict[str, Any] | None = None
        self._steps: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the agent's step that tool calls and observations belong to
        self._prompt_tokens = self._completion_tokens = 0

    def add(self, span: Span) -> None:
        if isinstance(span.body.get("tools"), list):
            self.tools = self.tools or [tool for tool in plain(span.body["tools"]) if isinstance(tool, dict)]
        if span.inside is not None:
            return
        if span.kind == "message":
            self._message(span)
        elif span.kind == "model_call":
            self._model_call(span)
        elif span.kind == "tool_call":
            self._tool_call(span)
        elif span.kind == "observation":
            self._observe(call_id_of(span.body), output_text(span.body), span)
        elif span.kind in ON_THE_SANDBOX:
            step = self._step(span, "system", sandbox_line(span))
            step["observation"] = {"results": [{"content": output_text(span.body), "extra": _ending(span)}]}
        elif span.kind == "verdict":
            self.verdict = plain(span.body)
        elif span.kind == "cancel":
            self.cancel = plain(span.body)

    def numbered(self) -> list[dict[str, Any]]:
        steps = self._steps or [{"source": "system", "message": "the rollout ended before its first step"}]
        return [{"step_id": number, **step} for number, step in enumerate(steps, 1)]

    def totals(self) -> dict[str, Any]:
        return {
            "total_prompt_tokens": self._prompt_tokens,
            "total_completion_tokens": self._completion_tokens,
            "total_steps": max(1, len(self._steps)),
        }

    def _step(self, span: Span, source: str, message: str) -> dict[str, Any]:
        stamp = datetime.fromtimestamp(span.start_ns / 1e9, UTC).isoformat(timespec="milliseconds")
        step: dict[str, Any] = {"timestamp": stamp, "source": source, "message": message}
        self._steps.append(step)
        return step

    def _message(self, span: Span) -> None:
        role, content = as_text(span.body.get("role")), _content(span.body.get("content"))
        if role == "tool":
            self._observe(call_id_of(span.body), content, span)
            return
        source = SOURCES.get(role, "user")
        step = self._step(span, source, content)
        self._turn = step if source == "agent" else None
        if self._turn is not None:
            self._calls(self._turn, span.body)

    def _model_call(self, span: Span) -> None:
        body = span.body
        step = self._turn = self._step(span, "agent", as_text(body.get("text")))
        model = as_text(body.get("model")) or None
        self.model_name = self.model_name or model
        if model != self.model_name:
            step["model_name"] = model
        if body.get("reasoning"):
            step["reasoning_content"] = as_text(body["reasoning"])
        prompt_tokens, completion_tokens = tokens(body)
        self._prompt_tokens += prompt_tokens or 0
        self._completion_tokens += completion_tokens or 0
        metrics = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "prompt_token_ids": _numbers(body.get("prompt_ids"), {int}),
            "completion_token_ids": _numbers(body.get("completion_ids"), {int}),
            "logprobs": _numbers(body.get("logprobs"), {int, float}),
        }
        step["metrics"] = _given(metrics)
        step["llm_call_count"] = 1
        kept = {name: plain(body.get(name)) for name in ("policy_version", "finish_reason", "sampling", "error")}
        step["extra"] = _given({"seq": span.seq, "known": span.known, **kept})
        self._calls(step, body)

    def _tool_call(self, span: Span) -> None:
        turn = self._turn
        if turn is None:  # nobody sampled it: a script's or an oracle's
            turn = self._turn = self._step(span, "agent", "")
            turn["llm_call_count"] = 0
        call_id = call_id_of(span.body) or f"call_{span.seq}"
        self._call(turn, call_id, span.body.get("name"), span.body.get("arguments"))
        if span.known and ("content" in span.body or "stdout" in span.body):
            self._observe(call_id, output_text(span.body), span)

    def _calls(self, step: dict[str, Any], body: dict[str, Any]) -> None:
        """The calls that a model's answer holds: ours, or in the form of OpenAI's chat completions."""
        calls = body.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, dict):
                function = call.get("function")
                inner = function if isinstance(function, dict) else call
                self._call(step, as_text(call.get("id")), inner.get("name"), inner.get("arguments"))

    def _call(self, step: dict[str, Any], call_id: str, name: Any, arguments: Any) -> None:
        calls = step.setdefault("tool_calls", [])
        call_id = call_id or f"call_{len(calls)}"
        if all(call["tool_call_id"] != call_id for call in calls):
            function = as_text(name)
            calls.append({"tool_call_id": call_id, "function_name": function, "arguments": _arguments(arguments)})

    def _observe(self, call_id: str, content: str, span: Span) -> None:
        """What the policy saw of a call. An observation in the log replaces the tool's own, which may have been cut."""
        turn = self._turn
        if turn is None:
            self._step(span, "system", "observation")["observation"] = {"results": [{"content": content}]}
            return
        results = turn.setdefault("observation", {"results": []})["results"]
        if not call_id or all(call["tool_call_id"] != call_id for call in turn.get("tool_calls", ())):
            results.append({"content": content})
            return
        result = {"source_call_id": call_id, "content": content, "extra": _ending(span)}
        for index, known in enumerate(results):
            if known.get("source_call_id") == call_id:
                results[index] = {**known, "content": content}
                return
        results.append(result)


def sandbox_line(span: Span) -> str:
    """What was done in the sandbox, in one line."""
    if span.kind == "exec":
        command = span.body.get("command")
        words = command if isinstance(command, list) else [command]
        return f"exec: {' '.join(as_text(word) for word in words)}"
    return f"{span.kind}: {as_text(span.body.get('path'))}"


def call_id_of(body: dict[str, Any]) -> str:
    """The id of a tool call; messages in OpenAI's form name it otherwise."""
    return next((as_text(body[key]) for key in ("id", "call_id", "tool_call_id") if body.get(key)), "")


def output_text(body: dict[str, Any]) -> str:
    """What a call or a command gave: its content, or its output with the errors behind it."""
    if "content" in body:
        return _content(body["content"])
    texts = [as_text(body.get(stream)) for stream in ("stdout", "stderr", "data")]
    return "\n".join(text.removesuffix("\n") for text in texts if text)


def _ending(span: Span) -> dict[str, Any]:
    names = ("status", "exit_code", "signal", "timed_out", "oom_killed", "truncated", "error")
    facts = {name: plain(span.body[name]) for name in names if span.body.get(name) is not None}
    return {"seq": span.seq, "known": span.known, "seconds": round(span.seconds, 6), **facts}


def _content(content: Any) -> str:
    """Text of a message; of a list of parts, the text of those that are text."""
    if isinstance(content, list):
        return "".join(as_text(part.get("text")) if isinstance(part, dict) else as_text(part) for part in content)
    return as_text(content)


def _arguments(arguments: Any) -> dict[str, Any]:
    """Arguments as ATIF wants them, a mapping; what the model sent that is none stands under `raw`."""
    value = plain(arguments)
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return {"raw": value}
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"raw": value}


def _numbers(values: Any, types: set[type]) -> list[Any] | None:
    """A list of such numbers only; a log-prob that was no number is `null` in the log, and ATIF has no place for it."""
    return values if isinstance(values, list) and values and set(map(type, values)) <= types else None


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
