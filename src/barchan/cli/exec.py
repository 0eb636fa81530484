"""`barchan exec`."""

from typing import Annotated, Any

from cyclopts import Parameter

import barchan
from barchan.cli import attached
from barchan.cli.attached import exit_code, follow, print_end
from barchan.cli.common import DEFAULTS, Common, key_values
from barchan.cli.run import Words, start_options
from barchan.errors import InvalidSpec


def exec_(
    sandbox: str,
    /,
    *command: str,
    tty: Annotated[bool, Parameter(name=("--tty", "-t"))] = False,
    timeout_s: float | None = None,
    user: str | None = None,
    cwd: str | None = None,
    env: Words = (),
    common: Common = DEFAULTS,
) -> int:
    """Run a command in a sandbox that is there.

    Input, output and the first Ctrl-C are passed on; a second one kills the
    command. The exit code is the command's.

    For example:

        barchan exec sb_x1 -- ls -l /
        barchan exec sb_x1 --user root --tty -- bash
        tar c . | barchan exec sb_x1 -- tar x -C /tmp

    Args:
        sandbox: Its id.
        command: The program and its arguments; options of its own need a `--` before.
        tty: Give the command a terminal.
        timeout_s: Time for the command; then it is killed, and the exit code is 124.
        user: [default: the sandbox's]
        cwd: [default: the sandbox's working directory]
        env: KEY=VALUE; may be repeated.
    """
    if not command:
        raise InvalidSpec(f"no command (try: barchan exec {sandbox} -- COMMAND)")
    options = start_options(tty, timeout_s)
    options["env"] = {**options.get("env", {}), **key_values(env, "--env")}
    options |= {"user": user, "cwd": cwd}
    return attached.run(_exec(sandbox, command, options, use_tty=tty, common=common))


async def _exec(
    sandbox_id: str, command: tuple[str, ...], options: dict[str, Any], *, use_tty: bool, common: Common
) -> int:
    async with barchan.connect_async(**common.connection) as client:
        sandbox = await client.attach(sandbox_id)
        process = await sandbox.start(command, **options)
        info = await follow(process, use_tty=use_tty, end_line=common.json)
    if common.json:
        print_end(sandbox_id, info)
    return exit_code(info)
