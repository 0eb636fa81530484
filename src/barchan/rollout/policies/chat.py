"""A policy behind any OpenAI-compatible `/v1/chat/completions`.

With several turns it offers the task's tools, and carries the whole conversation. With one, or when the model calls no
tool in its first turn, the answer's text is the attempt: its code is handed in.

Transport faults and overload are retried with growing waits, within a bound; a server that stays down, refuses, or
answers with something that is no completion is the model's fault (`ModelError`), and never a zero. What a model says,
however poor, is the policy's doing and is graded.
"""

import asyncio
import random
import re
import zlib
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from barchan.errors import ModelError
from barchan.model.verdict import Cause
from barchan.rollout.calls import Observation, call_to, parse_calls
from barchan.rollout.policies.base import Step
from barchan.rollout.policies.extract import solution_of
from barchan.rollout.record import Completion
from barchan.rollout.task import Task

REPLY_BYTES_MAX = 64 << 20
RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})

# How servers say that the conversation no longer fits their context: a limit that the policy ran into, no fault.
_CONTEXT_FULL = re.compile(
    rb"context_length_exceeded|exceed_context_size|maximum context length|exceeds? the (?:available )?context",
    re.IGNORECASE,
)


class ChatSettings(Struct, frozen=True, kw_only=True):
    """Where the model is, and how it is asked.

    Attributes:
        base_url: With or without the trailing `/v1`.
        request_timeout_s: For one request, generation included.
        seed: With it, each request has a seed of its own made from this one, the task, the attempt and the turn.
        attempts_max: Requests per answer, the first included.
        patience_s: Once this long has passed since the first request, no further one is made.
        wait_s_max: Longest wait between two requests.
    """

    base_url: str
    model: str
    temperature: float = 0.0
    seed: int | None = None
    api_key: str | None = None
    request_timeout_s: float = 600.0
    attempts_max: int = 6
    patience_s: float = 120.0
    wait_s_first: float = 0.5
    wait_s_max: float = 15.0


class _Token(Struct, frozen=True):
    token: str
    logprob: float
    id: int | None = None


class _Logprobs(Struct, frozen=True):
    content: list[_Token] | None = None


class _Message(Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Reply(Struct, frozen=True):
    choices: list[_Choice]
    model: str = ""
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


class _Transient(Exception):
    """Worth asking again: (cause, message, seconds the server asked to wait)."""


class _ContextFull(Exception):
    """The conversation does not fit the model's context."""


class ChatPolicy:
    """Asks a chat model once a turn. The session is the caller's and stays open."""

    name = "chat"

    def __init__(self, session: aiohttp.ClientSession, settings: ChatSettings) -> None:
        self._session = session
        self._settings = settings
        base = settings.base_url.rstrip("/")
        self._url = f"{base.removesuffix('/v1')}/v1/chat/completions"

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        try:
            reply, requests = await self._ask_patiently(self._body(task, sample_index, observation))
        except _ContextFull:
            return Step(is_last=True, cause="context_limit")
        return step_of(reply, task, observation, requests)

    def _body(self, task: Task, sample_index: int, observation: Observation) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._settings.model,
            "messages": observation.messages,
            "temperature": self._settings.temperature,
            "max_tokens": observation.left.tokens,
            "logprobs": True,
            "top_logprobs": 1,  # 0 makes some servers leave out the sampled token's own
        }
        if task.limits.turns_max > 1:
            body |= {"tools": observation.tools, "tool_choice": "auto"}
        if self._settings.seed is not None:
            place = f"{self._settings.seed}/{task.task_id}/{sample_index}/{observation.turn}"
            body["seed"] = zlib.crc32(place.encode()) >> 1  # 31 bits: servers take signed ones
        return body

    async def _ask_patiently(self, body: dict[str, Any]) -> tuple[_Reply, int]:
        settings = self._settings
        loop = asyncio.get_running_loop()
        give_up = loop.time() + settings.patience_s
        wait_s = settings.wait_s_first
        for attempt in range(1, settings.attempts_max + 1):
            try:
                return await self._ask(body), attempt
            except _Transient as fault:
                cause, message, asked_s = fault.args
                pause_s = min(settings.wait_s_max, max(asked_s, wait_s * random.uniform(0.5, 1.0)))
                if attempt == settings.attempts_max or loop.time() + pause_s > give_up:
                    raise ModelError(f"{self._url}: {message}", cause=cause, requests=attempt) from fault
                wait_s *= 2
                await asyncio.sleep(pause_s)
        raise AssertionError("attempts_max is at least 1")

    async def _ask(self, body: dict[str, Any]) -> _Reply:
        headers = {"Authorization": f"Bearer {self._settings.api_key}"} if self._settings.api_key else {}
        timeout = aiohttp.ClientTimeout(total=self._settings.request_timeout_s, sock_connect=10)
        try:
            async with self._session.post(self._url, json=body, headers=headers, timeout=timeout) as response:
                data = await _read(response)
                status, asked_s = response.status, _seconds(response.headers.get("Retry-After", ""))
        except TimeoutError as error:
            raise _Transient("model_timeout", f"no answer in time: {error}", 0.0) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Transient("model_unreachable", f"{type(error).__name__}: {error}", 0.0) from error
        if status in RETRIED_STATUSES:
            raise _Transient("model_unreachable", f"HTTP {status}: {data[:200]!r}", asked_s)
        if status in (400, 413, 422) and _CONTEXT_FULL.search(data):
            raise _ContextFull
        if status != 200:
            raise ModelError(f"{self._url}: HTTP {status}: {data[:400]!r}", cause="model_refused", status=status)
        try:
            reply = msgspec.json.decode(data, type=_Reply)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ModelError(
                f"{self._url}: not a completion ({error}): {data[:200]!r}", cause="model_garbage"
            ) from error
        if not reply.choices:
            raise ModelError(f"{self._url}: a completion without choices", cause="model_garbage")
        return reply


async def _read(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > REPLY_BYTES_MAX:
            raise ModelError(f"{response.url}: the answer passes {REPLY_BYTES_MAX} bytes", cause="model_garbage")
    return bytes(data)


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.isdecimal() else 0.0


def step_of(reply: _Reply, task: Task, observation: Observation, requests: int) -> Step:
    """What a reply wants done, and what was sampled."""
    choice = reply.choices[0]
    completion = completion_of(reply, choice, requests)
    refused = bool(choice.message.refusal) or completion.finish_reason == "content_filter"
    calls = parse_calls(choice.message.tool_calls or (), observation.turn)
    if calls and not refused:
        return Step(tool_calls=tuple(calls), completion=completion)
    if not refused and any("tool_calls" in message for message in observation.messages):
        return Step(completion=completion)
    text = choice.message.content or ""
    cause: Cause | None = None
    if refused:
        cause = "refusal"
    elif completion.finish_reason == "length":
        cause = "context_limit" if completion.completion_tokens >= observation.left.tokens else "output_limit"
    solution = solution_of(text, task.stub.prompt, task.stub.entry_point) if task.stub is not None else text
    return Step(tool_calls=(call_to("submit", solution=solution),), completion=completion, is_last=True, cause=cause)


def completion_of(reply: _Reply, choice: _Choice, requests: int) -> Completion:
    sampled = (choice.logprobs.content if choice.logprobs else None) or []
    usage = reply.usage or _Usage()
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
    )


def _token_ids(choice: _Choice, sampled: list[_Token]) -> tuple[int, ...]:
    """Ids by the three ways servers give them: per token, as one list, or spelled `token_id:N` in place of the text."""
    if choice.token_ids is not None and (not sampled or len(choice.token_ids) == len(sampled)):
        return tuple(choice.token_ids)
    if sampled and all(token.id is not None for token in sampled):
        return tuple(token.id for token in sampled if token.id is not None)
    spelled = [token.token.removeprefix("token_id:") for token in sampled if token.token.startswith("token_id:")]
    if sampled and len(spelled) == len(sampled) and all(word.isdecimal() for word in spelled):
        return tuple(int(word) for word in spelled)
    return ()
