"""`python`: a program run to its end.

Each call has an interpreter of its own. Its end comes from the kernel with the time it used, a time-out ends that
program and nothing else, and all that a later call can depend on lies in files, where the trajectory log shows it. What
should stay alive between calls can stay in `bash`.
"""

from typing import Annotated

from msgspec import Meta, Struct

from barchan.model.sandbox import ExecResult
from barchan.rollout.tools.base import ToolOutput, Workspace
from barchan.rollout.tools.text import joined, shown

INTERPRETER = ("python3", "-")


class PythonArguments(Struct, frozen=True, forbid_unknown_fields=True):
    code: Annotated[str, Meta(description="A whole Python program.")]


class PythonTool:
    """Runs a program from its stdin in the working directory."""

    name = "python"
    description = (
        "Run a Python program in a new interpreter and see what it prints. Files are kept from one call to the next; "
        "variables are not."
    )
    arguments = PythonArguments
    keeps_time = True

    async def call(self, workspace: Workspace, arguments: PythonArguments, /, *, timeout_s: float) -> ToolOutput:
        result = await workspace.exec(INTERPRETER, stdin=arguments.code.encode(), timeout_s=timeout_s)
        return told(result, workspace.output_chars_max, timeout_s)


def told(result: ExecResult, chars_max: int, timeout_s: float) -> ToolOutput:
    """A program's end, for the policy."""
    out = shown(result.stdout, chars_max, bytes_total=result.stdout_bytes, is_cut=result.truncated)
    note = ""
    if result.timed_out:
        note = f"[timed out after {timeout_s:g} s and was killed]"
    elif result.oom_killed:
        note = "[killed: the sandbox's memory is used up]"
    elif result.exit_code:
        note = f"[exit code {result.exit_code}]"
    return ToolOutput(
        content=joined(out.text, note) or "[no output]",
        status="timed_out" if result.timed_out else "ok" if result.ok else "failed",
        truncated=out.truncated,
        agent_s=result.usage.wall_s,
    )
