"""`submit`: hand the attempt in."""

from typing import Annotated

from msgspec import Meta, Struct

from barchan.errors import BackendError
from barchan.rollout.tools.base import ToolOutput, Workspace

WRITE = ("sh", "-c", 'cat > "$0"')
WRITE_TIMEOUT_S = 60.0


class SubmitArguments(Struct, frozen=True, forbid_unknown_fields=True):
    pass


class AnswerArguments(Struct, frozen=True, forbid_unknown_fields=True):
    solution: Annotated[
        str | None,
        Meta(description="The whole content of the file that is handed in; left out, the file counts as it is."),
    ] = None


class SubmitTool:
    """Ends the attempt, with whatever is there."""

    name = "submit"
    description = "Hand in your work as it is and end the attempt. Nothing can be changed afterwards."
    arguments = SubmitArguments
    keeps_time = True

    async def call(self, workspace: Workspace, arguments: SubmitArguments, /, *, timeout_s: float) -> ToolOutput:
        return ToolOutput(content="[submitted]", submits=True, agent_s=0.0)


class AnswerTool:
    """`submit` of a task whose artifact is one file, which it can write. A program of the agent's does it, so that it
    is bound by what the agent is bound by.
    """

    name = "submit"
    arguments = AnswerArguments
    keeps_time = True

    def __init__(self, path: str) -> None:
        self.description = f"Hand in {path} and end the attempt. Nothing can be changed afterwards."
        self._path = path

    async def call(self, workspace: Workspace, arguments: AnswerArguments, /, *, timeout_s: float) -> ToolOutput:
        if arguments.solution is None:
            return ToolOutput(content="[submitted]", submits=True, agent_s=0.0)
        data = arguments.solution.encode("utf-8", "replace")
        result = await workspace.exec((*WRITE, self._path), stdin=data, timeout_s=min(timeout_s, WRITE_TIMEOUT_S))
        if not result.ok:
            said = f"{self._path} can't be written: exit code {result.exit_code}: {result.text.strip()[-400:]}"
            if workspace.calls == 1:  # in a fresh sandbox it is not the policy that stands in the way
                raise BackendError(said)
            return ToolOutput(content=f"error: nothing is submitted: {said}", status="failed")
        return ToolOutput(content="[submitted]", submits=True, agent_s=result.usage.wall_s)
