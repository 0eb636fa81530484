"""Any OpenAI-compatible `/v1/chat/completions`, asked with patience.

Transport faults and overload are retried with growing waits, within a bound; a server that stays down, refuses, or
answers with something that is no completion is the model's fault (`ModelError`).
"""

import asyncio
import random
import re
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from barchan.errors import ModelError

REPLY_BYTES_MAX = 64 << 20
RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})

# How servers say that the conversation no longer fits their context: a limit that the policy ran into, no fault.
_CONTEXT_FULL = re.compile(
    rb"context_length_exceeded|exceed_context_size|maximum context length|exceeds? the (?:available )?context",
    re.IGNORECASE,
)


class EndpointSettings(Struct, frozen=True, kw_only=True):
    """Where a model is, and how patiently it is asked.

    Attributes:
        base_url: With or without the trailing `/v1`.
        request_timeout_s: For one request, generation included.
        attempts_max: Requests per answer, the first included.
        patience_s: Once this long has passed since the first request, no further one is made.
        wait_s_max: Longest wait between two requests.
    """

    base_url: str
    model: str
    api_key: str | None = None
    request_timeout_s: float = 600.0
    attempts_max: int = 6
    patience_s: float = 120.0
    wait_s_first: float = 0.5
    wait_s_max: float = 15.0


class Token(Struct, frozen=True):
    token: str
    logprob: float
    id: int | None = None


class Logprobs(Struct, frozen=True):
    content: list[Token] | None = None


class ReplyMessage(Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class Choice(Struct, frozen=True):
    message: ReplyMessage
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None


class Usage(Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Reply(Struct, frozen=True):
    choices: list[Choice]
    model: str = ""
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class _Transient(Exception):
    """Worth asking again: (cause, message, seconds the server asked to wait)."""


class ContextFull(Exception):
    """The conversation does not fit the model's context."""


class Endpoint:
    """Asks one server. The session is the caller's and stays open."""

    def __init__(self, session: aiohttp.ClientSession, settings: EndpointSettings) -> None:
        self._session = session
        self._settings = settings
        base = settings.base_url.rstrip("/")
        self._url = f"{base.removesuffix('/v1')}/v1/chat/completions"

    async def ask(self, body: dict[str, Any]) -> tuple[Reply, int]:
        """The answer, which has a choice, and how many requests it took.

        Raises:
            ContextFull: The server says that what it was asked is too long for its model.
            ModelError: `details["cause"]` is one of the model's causes of `barchan.rollout.verdict`.
        """
        settings = self._settings
        loop = asyncio.get_running_loop()
        give_up = loop.time() + settings.patience_s
        wait_s = settings.wait_s_first
        for attempt in range(1, settings.attempts_max + 1):
            try:
                return await self._ask_once(body), attempt
            except _Transient as fault:
                cause, message, asked_s = fault.args
                pause_s = min(settings.wait_s_max, max(asked_s, wait_s * random.uniform(0.5, 1.0)))
                if attempt == settings.attempts_max or loop.time() + pause_s > give_up:
                    raise ModelError(f"{self._url}: {message}", cause=cause, requests=attempt) from fault
                wait_s *= 2
                await asyncio.sleep(pause_s)
        raise AssertionError("attempts_max is at least 1")

    async def _ask_once(self, body: dict[str, Any]) -> Reply:
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
            raise ContextFull
        if status != 200:
            raise ModelError(f"{self._url}: HTTP {status}: {data[:400]!r}", cause="model_refused", status=status)
        try:
            reply = msgspec.json.decode(data, type=Reply)
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
