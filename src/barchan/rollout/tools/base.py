"""The contract of a tool, and what it works with.

A tool's arguments are a msgspec Struct, from which its schema is made and by which a call's arguments are checked, so
that the two can't differ. What a policy does wrong is told to it as the call's result; what the platform does wrong is
raised.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from barchan.errors import (
    BarchanError,
    CallerError,
    Conflict,
    Denied,
    NotFound,
    NotSnapshotable,
    ReadTimeout,
    SandboxExpired,
    SetupFailed,
    SnapshotIncompatible,
)
from barchan.model.sandbox import ExecResult
from barchan.rollout.ports import Sandbox, Shell
from barchan.sdk.aio.shell import ShellPoint

T = TypeVar("T")
CAPTURE_BYTES_MAX = 256 << 10  # per stream; what a policy is shown is far less


class ToolOutput(Struct, frozen=True, kw_only=True):
    """What a tool has to say.

    Attributes:
        content: For the policy.
        agent_s: How long the agent's own work took by the guest's clock; None: all the time of the call.
        submits: The attempt is handed in.
    """

    content: str
    status: Literal["ok", "failed", "timed_out"] = "ok"
    truncated: bool = False
    agent_s: float | None = None
    submits: bool = False


class Workspace:
    """The agent's sandbox as tools see it, with one shell that stays.

    Args:
        point: That of a shell which was begun elsewhere, and goes on here.

    Attributes:
        calls: Calls that tools were given, the one in progress included.
        first_s: From asking for the first program to its start, an upper bound; None while there was none.
    """

    def __init__(self, sandbox: Sandbox, output_chars_max: int, point: ShellPoint | None = None) -> None:
        self.sandbox = sandbox
        self.output_chars_max = output_chars_max
        self.calls = 0
        self.first_s: float | None = None
        self._shell: Shell | None = None
        self._point = point

    async def exec(self, argv: tuple[str, ...], *, stdin: bytes, timeout_s: float) -> ExecResult:
        """Run a program as the agent, both its outputs in one."""
        started = time.monotonic()
        result = await self.sandbox.exec(
            argv, stdin=stdin, merge_stderr=True, timeout_s=timeout_s, max_output_bytes=CAPTURE_BYTES_MAX
        )
        if self.first_s is None:
            self.first_s = max(0.0, time.monotonic() - started - result.usage.wall_s)
        return result

    async def shell(self) -> Shell:
        if self._shell is None:
            started = time.monotonic()
            self._shell = await self.sandbox.shell(max_output_bytes=CAPTURE_BYTES_MAX, point=self._point)
            if self.first_s is None:
                self.first_s = time.monotonic() - started
        return self._shell

    @property
    def point(self) -> ShellPoint | None:
        """Where the shell stands, for whoever goes on with it."""
        return self._shell.point if self._shell is not None else self._point

    async def close(self) -> None:
        """End the shell, so that nothing waits for its output any more."""
        if self._shell is not None:
            await self._shell.close()


def is_guests_doing(error: BarchanError) -> bool:
    """Whether the guest itself can have caused a failure of an operation in it: its files, its limits.

    Errors about the sandbox as a whole are not among them, nor is an operation's process that was killed: it is in no
    guest's memory limit, and no guest's program can signal it. What is missing, forbidden or in the way is the guest's
    only where its kernel says so, or where it is one of its processes.
    """
    if not isinstance(error, CallerError) or isinstance(error, SandboxExpired) or "sandbox_id" in error.details:
        return False
    if isinstance(error, NotFound | Conflict):
        return not {"errno", "process_id"}.isdisjoint(error.details)
    if isinstance(error, NotSnapshotable | SnapshotIncompatible | SetupFailed):
        return False
    return not isinstance(error, Denied) or "errno" in error.details


async def in_time(work: Awaitable[T], timeout_s: float) -> T:
    """What the platform does in a sandbox, with a bound on all of it together."""
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError as error:
        raise ReadTimeout(f"not done in {timeout_s:g} s") from error


class Tool(Protocol):
    """Something a policy can call.

    Attributes:
        arguments: A Struct; its fields are the call's arguments, and `Meta(description=...)` says what they are.
        keeps_time: `call` ends in `timeout_s` by itself; any other tool is cancelled then.
    """

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def arguments(self) -> type[Struct]: ...

    @property
    def keeps_time(self) -> bool: ...

    async def call(self, workspace: Workspace, arguments: Any, /, *, timeout_s: float) -> ToolOutput:
        """Carry a call out.

        Args:
            arguments: An instance of the tool's `arguments`.
        """
        ...


def schema_of(tool: Tool) -> dict[str, Any]:
    """A tool as an OpenAI function."""
    (described,), components = msgspec.json.schema_components([tool.arguments])
    parameters = components.pop(described["$ref"].rpartition("/")[2])
    parameters.pop("title", None)
    parameters.pop("description", None)
    if components:
        parameters["$defs"] = components
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }
