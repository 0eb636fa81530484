"""A task's tools by name, and one call carried out whatever it looks like."""

from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import Struct

from barchan.errors import BarchanError, ReadTimeout, TaskError
from barchan.rollout.calls import Status, ToolCall, ToolResult
from barchan.rollout.imports import load_class
from barchan.rollout.ports import Clock
from barchan.rollout.task import ArtifactSpec, FileArtifact, Task
from barchan.rollout.tools.base import Tool, ToolOutput, Workspace, is_guests_doing, schema_of
from barchan.rollout.tools.bash import BashTool
from barchan.rollout.tools.edit import EditTool
from barchan.rollout.tools.python import PythonTool
from barchan.rollout.tools.spent import Spent
from barchan.rollout.tools.submit import AnswerTool, SubmitTool

BUILT_IN: Mapping[str, Tool] = {tool.name: tool for tool in (BashTool(), PythonTool(), EditTool(), SubmitTool())}
TOOLS_PACKAGE = __name__.rpartition(".")[0] + "."
PLATFORM_SLACK_S = 45.0  # beyond a call's own time: more than the SDK gives the node, so that the SDK says what failed


class Called(Struct, frozen=True, kw_only=True):
    """One call's result, the agent's time it took, and whether it ended the attempt."""

    result: ToolResult
    agent_s: float
    submits: bool


def tool_named(name: str, artifact: ArtifactSpec) -> Tool:
    """One of ours, or a task's own by `module:Class`, made without arguments.

    Raises:
        InvalidSpec: There is none.
    """
    if name == "submit" and isinstance(artifact, FileArtifact):
        return AnswerTool(artifact.path)
    found = BUILT_IN.get(name)
    return found if found is not None else cast(Tool, load_class(name, "tool")())


class Toolbox:
    """The tools that one task offers."""

    def __init__(self, task: Task) -> None:
        tools = [tool_named(name, task.artifact) for name in task.tools]
        self._tools = {tool.name: tool for tool in tools}
        self.names = frozenset(self._tools)
        self.schemas: tuple[dict[str, Any], ...] = tuple(schema_of(tool) for tool in tools)

    async def call(self, workspace: Workspace, call: ToolCall, timeout_s: float, spent: Spent | None = None) -> Called:
        """Carry a call out. What the platform fails to do is raised.

        Both the limit and what it took are of the sandbox's own time: no sleep and no wake is the agent's.

        Args:
            spent: What it had taken before, and who is told of that; None: it is new, and nobody.

        Raises:
            TaskError: A tool of the task's own failed.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            return _refused(call, f"there is no tool {call.name[:60]!r}; there are: {', '.join(self._tools)}")
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=tool.arguments)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            return _refused(call, f"the arguments of {call.name} are not right: {str(error)[:400]}")
        workspace.calls += 1
        async with workspace.sandbox.clock() as clock, (spent or Spent()).counted(clock) as now_s:
            started = clock.time()
            output = await _bounded(tool, workspace, arguments, timeout_s, clock)
            spent_s = now_s()
            _check_stall(call.name, output, clock.time() - started, timeout_s, clock.stalled_s)
        return Called(
            result=_result(call, output.content, output.status, truncated=output.truncated),
            agent_s=spent_s if output.agent_s is None else min(spent_s, output.agent_s),
            submits=output.submits,
        )


def _check_stall(name: str, output: ToolOutput, spent_s: float, timeout_s: float, stalled_s: float) -> None:
    """A time limit is the agent's doing only where its programs could run for so long.

    Raises:
        ReadTimeout: The platform stood still for a part of it.
    """
    if output.status == "timed_out" and stalled_s > 0 and spent_s < timeout_s:
        raise ReadTimeout(
            f"tool {name} was ended after {timeout_s:g} s, in which its programs could run for {spent_s:.1f} s: "
            f"the node did not answer for {stalled_s:.1f} s and more",
            stalled=1,
        )


def is_ours(tool: Tool) -> bool:
    return type(tool).__module__.startswith(TOOLS_PACKAGE)


async def _bounded(tool: Tool, workspace: Workspace, arguments: Struct, timeout_s: float, clock: Clock) -> ToolOutput:
    limit_s = timeout_s + PLATFORM_SLACK_S if tool.keeps_time else timeout_s
    try:
        async with clock.timeout(limit_s) as bound:
            return await tool.call(workspace, arguments, timeout_s=timeout_s)
    except TimeoutError as error:
        if bound.expired() and not tool.keeps_time:
            return ToolOutput(content=f"[timed out after {timeout_s:g} s]", status="timed_out")
        why = f"tool {tool.name} did not end in its time"
        # What it ran was killed with it: asked for again, that would pass for the agent's.
        raise (ReadTimeout(why, stalled=1) if is_ours(tool) else TaskError(why)) from error
    except BarchanError as error:
        if is_guests_doing(error):
            return ToolOutput(content=f"error: {error}", status="failed")
        raise
    except Exception as error:
        if is_ours(tool):
            raise
        raise TaskError(f"tool {tool.name}: {type(error).__name__}: {error}") from error


def _refused(call: ToolCall, why: str) -> Called:
    return Called(result=_result(call, f"error: {why}", "malformed"), agent_s=0.0, submits=False)


def not_run(call: ToolCall, why: str) -> ToolResult:
    """The result of a call that is not carried out."""
    return _result(call, f"[not run: {why}]", "not_run")


def _result(call: ToolCall, content: str, status: Status, *, truncated: bool = False) -> ToolResult:
    return ToolResult(call_id=call.id, name=call.name, content=content, status=status, truncated=truncated)
