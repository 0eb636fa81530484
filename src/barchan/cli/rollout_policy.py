"""From the options of `barchan rollout` to the policy that they mean."""

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import aiohttp
from msgspec.structs import replace

from barchan.errors import InvalidSpec
from barchan.rollout.imports import load_class
from barchan.rollout.limits import Limits
from barchan.rollout.policies import (
    ChatPolicy,
    ChatSettings,
    NopPolicy,
    OraclePolicy,
    Policy,
    ScriptPolicy,
    read_scripts,
)
from barchan.rollout.task import Task

ONE_ANSWER = ("oracle", "nop", "chat")  # who needs one turn only, unless asked for more
TURNS_MAX = 50
TOKENS_PER_TURN = 512


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """As given on the command line."""

    policy: str
    base_url: str | None
    model: str | None
    tool_format: Literal["openai", "text"]
    temperature: float
    seed: int | None
    api_key: str | None
    script: Path | None
    max_turns: int | None
    max_tokens: int | None
    turn_tokens: int | None


def limited(tasks: list[Task], options: PolicyOptions) -> list[Task]:
    """The tasks with the limits asked for; else with their own. Those that ask for one function are answered in one
    turn by who can, as their published evaluation wants it.
    """
    return [replace(task, limits=_limits(task, options)) for task in tasks]


def _limits(task: Task, options: PolicyOptions) -> Limits:
    turns, tokens = task.limits.turns_max, task.limits.tokens_max
    if task.stub is not None:
        turns = options.max_turns or (1 if options.policy in ONE_ANSWER else TURNS_MAX)
        tokens = turns * TOKENS_PER_TURN
    return replace(task.limits, turns_max=options.max_turns or turns, tokens_max=options.max_tokens or tokens)


def policy_of(options: PolicyOptions, tasks: list[Task]) -> Callable[[], AbstractAsyncContextManager[Policy]]:
    """What gives the policy, to be entered where the event loop runs.

    Raises:
        InvalidSpec: The options don't fit together, or name something that is not there.
    """
    _check_belonging(options)
    if options.policy == "chat":
        chat = _chat_settings(options)
        return lambda: _chat(chat)
    policy = _without_model(options, tasks)
    return lambda: _ready(policy)


def _check_belonging(options: PolicyOptions) -> None:
    tool_format = None if options.tool_format == "openai" else "text"
    of_chat = (options.base_url, options.model, options.seed, options.turn_tokens, tool_format)
    if options.policy != "chat" and any(value is not None for value in of_chat):
        raise InvalidSpec("--base-url, --model, --seed, --turn-tokens and --tool-format belong to --policy chat")
    if (options.policy == "script") != (options.script is not None):
        raise InvalidSpec("--policy script needs --script FILE, and --script belongs to it")


def _chat_settings(options: PolicyOptions) -> ChatSettings:
    base_url, model = options.base_url, options.model
    if not base_url or not base_url.startswith(("http://", "https://")) or not model:
        raise InvalidSpec("--policy chat needs --base-url http://HOST:PORT and --model NAME")
    return ChatSettings(
        base_url=base_url,
        model=model,
        tool_format=options.tool_format,
        temperature=options.temperature,
        seed=options.seed,
        api_key=options.api_key,
        turn_tokens_max=options.turn_tokens,
    )


def _without_model(options: PolicyOptions, tasks: list[Task]) -> Policy:
    if options.policy == "oracle":
        if missing := [task.task_id for task in tasks if not task.oracle]:
            raise InvalidSpec(f"--policy oracle: task {missing[0]} has no known-good attempt")
        return OraclePolicy()
    if options.policy == "nop":
        return NopPolicy()
    if options.script is not None:
        policy = ScriptPolicy(read_scripts(options.script))
        if missing := [task.task_id for task in tasks if not policy.script_of(task)]:
            raise InvalidSpec(f"script {options.script}: nothing for task {missing[0]}")
        return policy
    return _own(options.policy)


def _own(name: str) -> Policy:
    """A class of the user's, found from the current directory too, as `python -m` would."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    cls = load_class(name, "policy")
    try:
        policy = cls()
    except Exception as error:
        raise InvalidSpec(f"policy {name}: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(policy, "name", None), str) or not callable(getattr(policy, "step", None)):
        raise InvalidSpec(f"policy {name}: it needs a name and an async step()")
    return cast(Policy, policy)


@asynccontextmanager
async def _ready(policy: Policy) -> AsyncIterator[Policy]:
    yield policy


@asynccontextmanager
async def _chat(settings: ChatSettings) -> AsyncIterator[Policy]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield ChatPolicy(session, settings)
