"""The `barchan` program: finds the command, runs it, turns what went wrong into one line and an exit code."""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from barchan.cli.common import (
    FAILED,
    GUEST_COMMANDS,
    INTERRUPTED,
    NOT_THE_GUEST,
    OK,
    USAGE,
    hoist_globals,
    print_error,
    print_json,
    report,
)
from barchan.errors import BarchanError, InvalidSpec
from barchan.wire.api import error_body

HELP = """Sandboxes for agentic reinforcement learning.

    barchan doctor                          what this machine can do
    sudo barchan image build debian         make the base image, once
    barchan run debian -- python3 -V        one command in a fresh sandbox
    barchan rollout humaneval --limit 10    the main job
"""
EPILOGUE = """Exit codes: 0 done, 1 what was asked for failed, 2 wrong usage,
3 the platform failed, 4 a run was stopped by its circuit breaker, 5 a run was
preempted, 130 interrupted. "run", "exec" and "call" return the
exit code of the program in the sandbox (128+n after signal n, 124 out of
time); their 125 means that barchan itself failed, for whatever reason."""

# Imported only when used: every command starts as fast as if it were the only one.
COMMANDS = {
    "doctor": ("barchan.cli.doctor:doctor", "What this machine can do, and what to change where it can't."),
    "image": ("barchan.cli.image:app", "Build, move, look at, check and remove images."),
    "run": ("barchan.cli.run:run", "Run a command in a fresh sandbox."),
    "exec": ("barchan.cli.exec:exec_", "Run a command in a sandbox that is there."),
    "call": ("barchan.cli.call:call", "Run Python source in a warm interpreter."),
    "ps": ("barchan.cli.ps:ps", "List sandboxes."),
    "cp": ("barchan.cli.cp:cp", "Copy files into or out of a sandbox."),
    "kill": ("barchan.cli.kill:kill", "End sandboxes."),
    "fork": ("barchan.cli.fork:fork", "Make sandboxes that start as a live one is now."),
    "snapshot": ("barchan.cli.snapshot:app", "Keep sandboxes as they are, and look at what is kept."),
    "pause": ("barchan.cli.pause:pause", "Stop sandboxes until they are needed."),
    "hibernate": ("barchan.cli.pause:hibernate", "Put sandboxes on disk, with their processes."),
    "resume": ("barchan.cli.pause:resume", "Wake sandboxes."),
    "preempt": ("barchan.cli.preempt:preempt", "Put a run's sandboxes aside until it is started again."),
    "screen": ("barchan.cli.screen:app", "Look at a machine's screen, and type and click on it."),
    "pool": ("barchan.cli.pool:pool", "Show what a node keeps ready for sandboxes to come."),
    "up": ("barchan.cli.up:up", "Run a node in the foreground, with an HTTP address."),
    "node": ("barchan.cli.node:app", "End the node of a state directory."),
    "rollout": ("barchan.cli.rollout:rollout", "Run tasks as rollouts and report their verdicts."),
    "regrade": ("barchan.cli.regrade:regrade", "Grade finished rollouts again from what they have left."),
    "export": ("barchan.cli.export:export", "Write a run's rollouts as rows for a trainer, with advantages."),
    "task": ("barchan.cli.task:app", "Check and prepare the tasks of a set."),
    "trajectory": ("barchan.cli.trajectory:app", "Show, check and export the logs of rollouts."),
    "tools": ("barchan.cli.tools:app", "Install what Barchan needs of other projects."),
    "kernel": ("barchan.cli.kernel:app", "Build or install the kernel that microVMs boot."),
    "bench": ("barchan.cli.bench:app", "Measure this machine's sandboxes."),
    "conformance": ("barchan.cli.conformance:conformance", "Check that a backend keeps what is promised for all."),
}


def _version() -> str:
    from importlib import metadata  # slow to import, and no other command wants it

    return metadata.version("barchan")


def build_app(command: str) -> App:
    """The program with every command by name. The invoked one is described by its own docstring, not by the table."""
    app = App(
        name="barchan",
        help=HELP,
        help_format="plaintext",
        help_epilogue=EPILOGUE,
        default_parameter=Parameter(negative=()),
        version=_version,
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for order, (name, (target, help_text)) in enumerate(COMMANDS.items()):
        described = name == command and not target.endswith(":app")
        app.command(target, name=name, help=None if described else help_text, sort_key=order)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code."""
    tokens = hoist_globals(sys.argv[1:] if arguments is None else arguments)
    command = tokens[0] if tokens else ""
    before_guest = tokens[: tokens.index("--")] if "--" in tokens else tokens
    as_json = "--json" in before_guest
    if command and not command.startswith("-") and command not in COMMANDS:
        # Not left to cyclopts, which would import every command to look for a similar one.
        return _usage(f"no command {command!r}; there are: {', '.join(COMMANDS)}", command, as_json=as_json)
    try:
        code = build_app(command)(tokens)
        sys.stdout.flush()
        return code if isinstance(code, int) else OK
    except CycloptsError as error:
        return _usage(str(error), command, as_json=as_json)
    except BarchanError as error:
        return report(error, command=_full_name(before_guest), as_json=as_json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; the interpreter would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _full_name(tokens: Sequence[str]) -> str:
    """The command as it was called, with its subcommand if it has some: `image pull`."""
    has_subcommands = COMMANDS.get(tokens[0], ("", ""))[0].endswith(":app") if tokens else False
    return " ".join(word for word in tokens[: 1 + has_subcommands] if not word.startswith("-"))


def _usage(message: str, command: str, *, as_json: bool) -> int:
    print_error(message, f"barchan {command} --help" if command in COMMANDS else "barchan --help")
    if as_json:
        print_json({"error": error_body(InvalidSpec(message))})
    return NOT_THE_GUEST if command in GUEST_COMMANDS else USAGE


if __name__ == "__main__":
    sys.exit(main())
