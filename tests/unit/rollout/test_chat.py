"""The chat policy against a small server of our own: what is kept, what is retried, and whose fault a failure is."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from barchan.errors import ModelError
from barchan.rollout.calls import Observation
from barchan.rollout.limits import Left, Limits
from barchan.rollout.policies import ChatPolicy, ChatSettings, Step
from barchan.rollout.prompts import opening
from barchan.rollout.task import PatchArtifact, Task
from barchan.rollout.tools import Toolbox
from tests.unit.rollout.fakes import task

pytestmark = pytest.mark.timeout(30)

Handler = Callable[[dict[str, Any], int], Awaitable[web.StreamResponse]]
CODE = "```python\ndef f():\n    return 0\n```"


def completion(content: str | None = CODE, **choice: Any) -> web.Response:
    message = {"role": "assistant", "content": content, **choice.pop("message", {})}
    usage = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
    body = {"id": "x", "model": "tiny", "choices": [{"index": 0, "message": message, **choice}], "usage": usage}
    return web.json_response(body)


class Server:
    """Records what it is asked; answers by a handler of (body, how many requests came before)."""

    def __init__(self, handler: Handler) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._handler = handler

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        return await self._handler(self.bodies[-1], len(self.bodies) - 1)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[Server, str]]:
    server = Server(handler)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


ONE_TURN, MANY_TURNS = (task(limits=Limits(turns_max=turns, tokens_max=99)) for turns in (1, 5))
SCHEMAS = Toolbox(MANY_TURNS).schemas


def seen(of: Task, *more: dict[str, Any], turn: int = 0, tokens: int = 99) -> Observation:
    """What a policy sees after `turn` turns, `more` being what was said in them."""
    left = Left(turns=of.limits.turns_max - turn, tokens=tokens, agent_s=9.0)
    return Observation(messages=(*opening(of), *more), tools=SCHEMAS, left=left, turn=turn)


async def ask(base_url: str, of: Task = ONE_TURN, observation: Observation | None = None, **settings: Any) -> Step:
    fast: dict[str, Any] = {"wait_s_first": 0.01, "wait_s_max": 0.02, "request_timeout_s": 5.0, **settings}
    async with aiohttp.ClientSession() as session:
        policy = ChatPolicy(session, ChatSettings(base_url=base_url, model="tiny", **fast))
        return await policy.step(of, 0, observation or seen(of))


def solution(step: Step) -> str:
    """The program that a turn hands in."""
    (call,) = step.tool_calls
    assert (call.name, step.is_last) == ("submit", True)
    return str(json.loads(call.arguments)["solution"])


async def fault_of(base_url: str, **settings: Any) -> tuple[object, str]:
    """The cause and message of the failure of an attempt."""
    with pytest.raises(ModelError) as caught:
        await ask(base_url, **settings)
    return caught.value.details["cause"], str(caught.value)


async def test_what_was_sampled_is_kept() -> None:
    """Program, text, tokens, ids, log-probs and usage come back; the request carries the settings."""

    async def answer(body: dict[str, Any], before: int) -> web.StreamResponse:
        content = [
            {"id": 7, "token": "```", "logprob": -0.5, "bytes": [96], "top_logprobs": []},
            {"id": 9, "token": "py", "logprob": -0.25},
        ]
        return completion(finish_reason="stop", logprobs={"content": content})

    async with serving(answer) as (server, base_url):
        got = await ask(base_url, temperature=0.7, api_key="k3y")
    assert solution(got).endswith("def f():\n    return 0\n")
    assert got.cause is None
    kept = got.completion
    assert kept is not None
    assert (kept.text, kept.model, kept.finish_reason, kept.requests) == (CODE, "tiny", "stop", 1)
    assert (kept.tokens, kept.completion_ids, kept.logprobs) == (("```", "py"), (7, 9), (-0.5, -0.25))
    assert (kept.prompt_tokens, kept.completion_tokens) == (12, 3)
    (body,) = server.bodies
    assert (body["model"], body["temperature"], body["max_tokens"], body["logprobs"]) == ("tiny", 0.7, 99, True)
    assert ONE_TURN.stub.prompt in body["messages"][0]["content"]
    assert not {"tools", "tool_choice", "seed"} & set(body)
    assert server.headers[0]["Authorization"] == "Bearer k3y"


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        ({"token_ids": [1, 2]}, (1, 2)),
        ({"logprobs": {"content": [{"token": "token_id:5", "logprob": -1.0}]}}, (5,)),
        ({"logprobs": {"content": [{"token": "a", "logprob": -1.0}]}}, ()),
        ({"logprobs": None}, ()),
    ],
)
async def test_token_ids_in_each_servers_way(choice: dict[str, Any], ids: tuple[int, ...]) -> None:
    """A list beside the message, or spelled in the token's text; a server that gives none gives none."""

    async def answer(body: dict[str, Any], before: int) -> web.StreamResponse:
        return completion(**choice)

    async with serving(answer) as (_, base_url):
        got = await ask(f"{base_url}/v1/")
    assert got.completion is not None
    assert got.completion.completion_ids == ids


@pytest.mark.parametrize(
    ("choice", "cause"),
    [
        ({"finish_reason": "length"}, "output_limit"),
        ({"finish_reason": "content_filter"}, "refusal"),
        ({"content": None, "message": {"refusal": "No."}}, "refusal"),
        ({"content": ""}, None),
        ({"content": "I would rather not."}, None),
    ],
)
async def test_a_poor_answer_is_the_policys(choice: dict[str, Any], cause: str | None) -> None:
    """Cut off, refused, empty or without code: an answer all the same, to be graded."""

    async def answer(body: dict[str, Any], before: int) -> web.StreamResponse:
        return completion(**choice)

    async with serving(answer) as (_, base_url):
        got = await ask(base_url)
    assert got.cause == cause
    assert solution(got).startswith(ONE_TURN.stub.prompt)


async def test_an_answer_cut_at_the_tasks_limit_says_so() -> None:
    """A reply that used up the tokens left ran into the task's limit, not the server's."""

    async def answer(body: dict[str, Any], before: int) -> web.StreamResponse:
        return completion(finish_reason="length")

    async with serving(answer) as (server, base_url):
        got = await ask(base_url, observation=seen(ONE_TURN, tokens=3))
    assert (server.bodies[0]["max_tokens"], got.cause) == (3, "context_limit")


async def test_overload_and_broken_connections_are_retried() -> None:
    """503, 429 and a connection cut in mid-answer are asked again; how often is recorded."""

    async def answer(body: dict[str, Any], before: int) -> web.StreamResponse:
        if before == 0:
            return web.Response(status=503)
        if before == 1:
            return web.Response(status=429, headers={"Retry-After": "1"})
        if before == 2:
            raise web.HTTPInternalServerError
        return completion()

    async with serving(answer) as (server, base_url):
        got = await ask(base_url)
    assert got.completion is not None
    assert (len(server.bodies), got.completion.requests) == (4, 4)


async def test_retries_have_a_bound() -> None:
    """A server that stays down is given up after so many requests, as unreachable."""

    async def down(body: dict[str, Any], before: int) -> web.StreamResponse:
        return web.Response(status=502, text="bad gateway")

    async with serving(down) as (server, base_url):
        cause, message = await fault_of(base_url, attempts_max=3)
    assert (cause, len(server.bodies)) == ("model_unreachable", 3)
    assert "HTTP 502" in message


async def test_patience_has_a_bound_in_time() -> None:
    """No further request is made once the waits pass the bound, however many are left."""

    async def down(body: dict[str, Any], before: int) -> web.StreamResponse:
        return web.Response(status=503)

    async with serving(down) as (server, base_url):
        cause, _ = await fault_of(base_url, attempts_max=1000, patience_s=0.1)
    assert cause == "model_unreachable"
    assert 2 <= len(server.bodies) < 30


async def test_nobody_listening_is_unreachable() -> None:
    """A refused connection is a fault of the model, not an answer."""
    async with serving(lambda body, before: asyncio.sleep(0, completion())) as (_, base_url):
        pass
    cause, _ = await fault_of(base_url, attempts_max=2)
    assert cause == "model_unreachable"


async def test_a_server_that_hangs_times_out() -> None:
    """No answer within the request's time is a time-out of the model."""

    async def hang(body: dict[str, Any], before: int) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError("not reached")

    async with serving(hang) as (_, base_url):
        cause, _ = await fault_of(base_url, request_timeout_s=0.1, attempts_max=2)
    assert cause == "model_timeout"


CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


async def test_tools_are_offered_when_there_are_turns() -> None:
    """With several turns the request has the schemas, the model's calls come back as they were made."""

    async def answer(body: dict[str, Any], before: int) -> web.StreamResponse:
        return completion(None, message={"tool_calls": [CALL, {"function": 3}]}, finish_reason="tool_calls")

    async with serving(answer) as (server, base_url):
        got = await ask(base_url, MANY_TURNS)
    (body,) = server.bodies
    assert (body["tools"], body["tool_choice"]) == (list(SCHEMAS), "auto")
    first, second = got.tool_calls
    assert (first.id, first.name, first.arguments) == ("c1", "bash", '{"command": "ls"}')
    assert second.name == ""
    assert (got.is_last, got.completion is not None) == (False, True)


async def test_code_in_place_of_calls_is_handed_in() -> None:
    """A model that calls no tool in its first turn has answered: its fenced code is the attempt."""
    async with serving(lambda body, before: asyncio.sleep(0, completion())) as (_, base_url):
        got = await ask(base_url, MANY_TURNS)
    assert solution(got).endswith("def f():\n    return 0\n")


async def test_words_after_calls_are_no_answer() -> None:
    """Once it has used tools, a turn without calls hands nothing in and ends nothing."""
    said = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    told = {"role": "tool", "tool_call_id": "c1", "content": "[no output]"}
    async with serving(lambda body, before: asyncio.sleep(0, completion())) as (server, base_url):
        got = await ask(base_url, MANY_TURNS, seen(MANY_TURNS, said, told, turn=1))
    assert (got.tool_calls, got.is_last) == ((), False)
    assert server.bodies[0]["messages"][1:] == [said, told]


async def test_a_seed_differs_by_attempt_and_turn_and_repeats() -> None:
    """The same place in a run has the same seed, another turn another one."""
    async with serving(lambda body, before: asyncio.sleep(0, completion())) as (server, base_url):
        for turn in (0, 0, 1):
            await ask(base_url, MANY_TURNS, seen(MANY_TURNS, turn=turn), seed=7)
    first, again, later = (body["seed"] for body in server.bodies)
    assert first == again != later
    assert 0 <= first < 1 << 31


@pytest.mark.parametrize(
    "text",
    [
        '{"error": {"code": "context_length_exceeded"}}',
        '{"error": {"type": "exceed_context_size_error"}}',
        "This model's maximum context length is 4096 tokens.",
        "the request exceeds the available context size",
    ],
)
async def test_a_full_context_is_a_limit(text: str) -> None:
    """A server that can't take so long a conversation ends the attempt, which is graded as it stands."""

    async def full(body: dict[str, Any], before: int) -> web.StreamResponse:
        return web.Response(status=400, text=text)

    async with serving(full) as (_, base_url):
        got = await ask(base_url, MANY_TURNS)
    assert (got.is_last, got.cause, got.tool_calls) == (True, "context_limit", ())


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_refused_request_is_not_repeated(status: int) -> None:
    """A request the server rejects is not sent again, and never becomes a zero."""

    async def refuse(body: dict[str, Any], before: int) -> web.StreamResponse:
        return web.Response(status=status, text="no such model")

    async with serving(refuse) as (server, base_url):
        cause, message = await fault_of(base_url)
    assert (cause, len(server.bodies)) == ("model_refused", 1)
    assert "no such model" in message


@pytest.mark.parametrize(
    "text", ["<html>", "{}", '{"choices": []}', '{"choices": [{"message": 3}]}', '"\\ud800"', "\xff"]
)
async def test_what_is_no_completion_is_garbage(text: str) -> None:
    """An answer of another form is the server's fault: void, never a zero."""

    async def garbage(body: dict[str, Any], before: int) -> web.StreamResponse:
        return web.Response(body=text.encode("latin-1"), content_type="application/json")

    async with serving(garbage) as (_, base_url):
        cause, _ = await fault_of(base_url)
    assert cause == "model_garbage"


async def test_an_endless_answer_is_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer beyond the bound is not kept in memory."""
    monkeypatch.setattr("barchan.rollout.endpoint.REPLY_BYTES_MAX", 1000)

    async def long(body: dict[str, Any], before: int) -> web.StreamResponse:
        return web.Response(body=b" " * 5000)

    async with serving(long) as (_, base_url):
        cause, _ = await fault_of(base_url)
    assert cause == "model_garbage"


async def test_words_of_a_task_without_an_answer_file_hand_nothing_in() -> None:
    """Where the work itself is the attempt, a first answer without calls is none: the model is asked to go on."""
    of = task(limits=Limits(turns_max=5), artifact=PatchArtifact(repo="/repo", base="HEAD"))
    async with serving(lambda body, before: asyncio.sleep(0, completion())) as (_, base_url):
        got = await ask(base_url, of)
    assert (got.tool_calls, got.is_last) == ((), False)


async def test_one_answer_can_have_a_bound() -> None:
    """`turn_tokens_max` bounds what one request asks for, and what the limits leave bounds it, too."""
    async with serving(lambda body, before: asyncio.sleep(0, completion())) as (server, base_url):
        await ask(base_url, MANY_TURNS, turn_tokens_max=20)
        await ask(base_url, MANY_TURNS, seen(MANY_TURNS, tokens=7), turn_tokens_max=20)
    assert [body["max_tokens"] for body in server.bodies] == [20, 7]


async def test_the_wait_for_the_server_is_kept() -> None:
    """From the first request to the answer, refusals in between included."""

    async def slowly(body: dict[str, Any], before: int) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return web.Response(status=503) if before == 0 else completion()

    async with serving(slowly) as (_, base_url):
        got = await ask(base_url)
    assert got.completion is not None
    assert got.completion.requests == 2
    assert got.completion.wait_ms is not None
    assert got.completion.wait_ms >= 100.0


async def test_tools_in_text() -> None:
    """With `text` the request has no tools but their description, and blocks of the answer are ordinary tool calls."""
    said = {"role": "assistant", "content": "```bash\nls\n```", "tool_calls": [CALL]}
    told = {"role": "tool", "tool_call_id": "c1", "content": "a.py"}
    answer = "I see.\n```sh\ncat a.py\n```"
    async with serving(lambda body, before: asyncio.sleep(0, completion(answer))) as (server, base_url):
        got = await ask(base_url, MANY_TURNS, seen(MANY_TURNS, said, told, turn=1), tool_format="text")
    (body,) = server.bodies
    assert not {"tools", "tool_choice"} & set(body)
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert "- ```bash: Run a command" in body["messages"][0]["content"]
    assert body["messages"][0]["content"].endswith(MANY_TURNS.instruction)
    assert body["messages"][2]["content"] == "Output of bash:\na.py"
    assert [(call.name, json.loads(call.arguments)) for call in got.tool_calls] == [("bash", {"command": "cat a.py"})]
    assert got.completion is not None
    assert (got.completion.text, got.is_last, got.cause) == (answer, False, None)


@pytest.mark.parametrize(
    ("reply", "is_last", "cause"),
    [
        ({"content": "Well."}, False, None),
        ({"content": "```bash\nrm -r /tmp", "finish_reason": "length"}, False, None),
        ({"content": None, "message": {"refusal": "I won't."}}, True, "refusal"),
        ({"content": "```bash\nls\n```", "finish_reason": "content_filter"}, True, "refusal"),
    ],
)
async def test_answers_in_text_that_call_nothing(reply: dict[str, Any], is_last: bool, cause: str | None) -> None:
    """Talk and a block cut short take a turn without calls; a refusal ends the policy's part."""
    async with serving(lambda body, before: asyncio.sleep(0, completion(**reply))) as (_, base_url):
        got = await ask(base_url, MANY_TURNS, tool_format="text")
    assert (got.tool_calls, got.is_last, got.cause) == ((), is_last, cause)


async def test_one_turn_in_text_asks_for_the_answer() -> None:
    """With one turn there are no tools to describe: the answer itself is asked for, whatever the tools' format."""
    async with serving(lambda body, before: asyncio.sleep(0, completion())) as (server, base_url):
        got = await ask(base_url, ONE_TURN, tool_format="text")
    assert solution(got).endswith("def f():\n    return 0\n")
    assert server.bodies[0]["messages"] == list(opening(ONE_TURN))
