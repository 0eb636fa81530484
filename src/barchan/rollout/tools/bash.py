"""`bash`: commands in one shell that stays."""

from typing import Annotated

from msgspec import Meta, Struct

from barchan.rollout.tools.base import CAPTURE_BYTES_MAX, ToolOutput, Workspace
from barchan.rollout.tools.text import joined, shown


class BashArguments(Struct, frozen=True, forbid_unknown_fields=True):
    command: Annotated[str, Meta(description="The command or commands to run.")]


class BashTool:
    """Runs commands in the agent's one shell; the directory, variables and background jobs stay until the end."""

    name = "bash"
    description = (
        "Run a command in a shell. The directory, variables and background jobs are kept from one call to the next. "
        "Its stdin is empty."
    )
    arguments = BashArguments
    keeps_time = True

    async def call(self, workspace: Workspace, arguments: BashArguments, /, *, timeout_s: float) -> ToolOutput:
        if "\0" in arguments.command:
            return ToolOutput(content="error: a command holds no NUL character", status="failed")
        shell = await workspace.shell()
        result = await shell.run(arguments.command, timeout_s=timeout_s)
        chars_max = workspace.output_chars_max
        out, err = (
            shown(data, chars_max, is_cut=result.truncated and len(data) >= CAPTURE_BYTES_MAX)
            for data in (result.stdout, result.stderr)
        )
        notes = []
        if result.timed_out:
            notes.append(f"[timed out after {timeout_s:g} s; everything that ran in the shell was killed]")
        elif result.exit_code:
            notes.append(f"[exit code {result.exit_code}]")
        if result.restarted:
            notes.append("[the shell has ended; the next command has a new one, without its directory and variables]")
        return ToolOutput(
            content=joined(out.text, f"[stderr]\n{err.text}" if err.text else "", *notes) or "[no output]",
            status="timed_out" if result.timed_out else "failed" if result.exit_code else "ok",
            truncated=out.truncated or err.truncated,
        )
