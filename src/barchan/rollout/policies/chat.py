"""A policy behind any OpenAI-compatible `/v1/chat/completions`.

With several turns it offers the task's tools, and carries the whole conversation: as the server's own tool calls, or as
text for models that have none. With one, or when a model that was offered tools calls none in its first turn, the
answer's text is the attempt: its code is handed in.

A server that stays down, refuses, or answers with something that is no completion is the model's fault (`ModelError`),
and never a zero. What a model says, however poor, is the policy's doing and is graded.
"""

import time
import zlib
from typing import Any, Literal

import aiohttp

from barchan.model.verdict import Cause
from barchan.rollout.calls import Observation, call_to, parse_calls
from barchan.rollout.endpoint import (
    Choice,
    ContextFull,
    Endpoint,
    EndpointSettings,
    Reply,
    ReplyMessage,
    Token,
    Usage,
)
from barchan.rollout.policies.base import Step
from barchan.rollout.policies.extract import solution_of
from barchan.rollout.policies.textual import TextTools
from barchan.rollout.record import Completion
from barchan.rollout.task import FileArtifact, Task

ToolFormat = Literal["openai", "text"]


class ChatSettings(EndpointSettings, frozen=True, kw_only=True):
    """Where the model is, and how it is asked.

    Attributes:
        seed: With it, each request has a seed of its own made from this one, the task, the attempt and the turn.
        tool_format: `text`: tools are described and called in the messages' text, for models without tool calls.
        turn_tokens_max: Completion tokens of one answer, within what the task's limits leave.
    """

    temperature: float = 0.0
    seed: int | None = None
    tool_format: ToolFormat = "openai"
    turn_tokens_max: int | None = None


class ChatPolicy:
    """Asks a chat model once a turn. The session is the caller's and stays open.

    Attributes:
        endpoint: The server's address.
    """

    name = "chat"

    def __init__(self, session: aiohttp.ClientSession, settings: ChatSettings) -> None:
        self._settings = settings
        self._endpoint = Endpoint(session, settings)
        self.endpoint = settings.base_url

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        turns = task.limits.turns_max > 1
        tools = TextTools(observation.tools, task) if turns and self._settings.tool_format == "text" else None
        started = time.monotonic()
        try:
            reply, requests = await self._endpoint.ask(self._body(task, sample_index, observation, tools))
        except ContextFull:
            return Step(is_last=True, cause="context_limit")
        completion = completion_of(reply, requests, wait_ms=(time.monotonic() - started) * 1e3)
        message = reply.choices[0].message
        if tools is not None:
            return textual_step(message, completion, tools)
        return step_of(message, completion, task, observation)

    def _body(self, task: Task, sample_index: int, observation: Observation, tools: TextTools | None) -> dict[str, Any]:
        left, bound = observation.left.tokens, self._settings.turn_tokens_max
        body: dict[str, Any] = {
            "model": self._settings.model,
            "messages": observation.messages if tools is None else tools.conversation(observation.messages),
            "temperature": self._settings.temperature,
            "max_tokens": left if bound is None else min(left, bound),
            "logprobs": True,
            "top_logprobs": 1,  # 0 makes some servers leave out the sampled token's own
        }
        if task.limits.turns_max > 1 and tools is None:
            body |= {"tools": observation.tools, "tool_choice": "auto"}
        if self._settings.seed is not None:
            place = f"{self._settings.seed}/{task.task_id}/{sample_index}/{observation.turn}"
            body["seed"] = zlib.crc32(place.encode()) >> 1  # 31 bits: servers take signed ones
        return body


def is_refused(message: ReplyMessage, completion: Completion) -> bool:
    return bool(message.refusal) or completion.finish_reason == "content_filter"


def textual_step(message: ReplyMessage, completion: Completion, tools: TextTools) -> Step:
    """What an answer in text wants done. One that holds no call takes a turn all the same, and the model is told."""
    if is_refused(message, completion):
        return Step(completion=completion, is_last=True, cause="refusal")
    calls = tools.calls(message.content or "", is_cut=completion.finish_reason == "length")
    return Step(tool_calls=calls, completion=completion)


def step_of(message: ReplyMessage, completion: Completion, task: Task, observation: Observation) -> Step:
    """What an answer with tool calls wants done, or one that is itself the attempt."""
    refused = is_refused(message, completion)
    calls = parse_calls(message.tool_calls or (), observation.turn)
    if calls and not refused:
        return Step(tool_calls=tuple(calls), completion=completion)
    is_answer = isinstance(task.artifact, FileArtifact) and not any(
        "tool_calls" in said for said in observation.messages
    )
    if not refused and not is_answer:
        return Step(completion=completion)
    text = message.content or ""
    cause: Cause | None = None
    if refused:
        cause = "refusal"
    elif completion.finish_reason == "length":
        cause = "context_limit" if completion.completion_tokens >= observation.left.tokens else "output_limit"
    solution = solution_of(text, task.stub.prompt, task.stub.entry_point) if task.stub is not None else text
    return Step(tool_calls=(call_to("submit", solution=solution),), completion=completion, is_last=True, cause=cause)


def completion_of(reply: Reply, requests: int, *, wait_ms: float) -> Completion:
    choice = reply.choices[0]
    sampled = (choice.logprobs.content if choice.logprobs else None) or []
    usage = reply.usage or Usage()
    return Completion(
        model=reply.model,
        text=choice.message.content or choice.message.refusal or "",
        finish_reason=choice.finish_reason or "",
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens or len(sampled),
        prompt_ids=tuple(reply.prompt_token_ids or ()),
        completion_ids=_token_ids(choice, sampled),
        tokens=tuple(token.token for token in sampled),
        logprobs=tuple(token.logprob for token in sampled),
        requests=requests,
        wait_ms=wait_ms,
    )


def _token_ids(choice: Choice, sampled: list[Token]) -> tuple[int, ...]:
    """Ids by the three ways servers give them: per token, as one list, or spelled `token_id:N` in place of the text."""
    if choice.token_ids is not None and (not sampled or len(choice.token_ids) == len(sampled)):
        return tuple(choice.token_ids)
    if sampled and all(token.id is not None for token in sampled):
        return tuple(token.id for token in sampled if token.id is not None)
    spelled = [token.token.removeprefix("token_id:") for token in sampled if token.token.startswith("token_id:")]
    if sampled and len(spelled) == len(sampled) and all(word.isdecimal() for word in spelled):
        return tuple(int(word) for word in spelled)
    return ()
