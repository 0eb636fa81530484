"""`barchan run`."""

import os
import sys
from typing import Annotated, Any, Literal

from cyclopts import Parameter

import barchan
from barchan.cli import attached
from barchan.cli.attached import exit_code, follow, print_end, terminal_size
from barchan.cli.common import DEFAULTS, OK, Common, key_values, print_json
from barchan.errors import InvalidSpec
from barchan.model.sandbox import CpuClass

KEEP_TTL_S = 3600.0
Words = Annotated[tuple[str, ...], Parameter(consume_multiple=False, show_default=False)]


def run(
    template: str,
    /,
    *command: str,
    layer: Words = (),
    backend: str | None = None,
    start_within_s: float | None = None,
    keep: bool = False,
    tty: Annotated[bool, Parameter(name=("--tty", "-t"))] = False,
    memory_mib: int | None = None,
    cpus: float | None = None,
    cpu_class: CpuClass | None = None,
    pids_max: int | None = None,
    disk_mib: int | None = None,
    network: Literal["none", "open"] | None = None,
    allow: Words = (),
    ttl_s: float | None = None,
    timeout_s: float | None = None,
    setup: str | None = None,
    user: str | None = None,
    workdir: str | None = None,
    env: Words = (),
    label: Words = (),
    common: Common = DEFAULTS,
) -> int:
    """Run a command in a fresh sandbox, which is gone afterwards.

    Input, output and the first Ctrl-C are passed on; a second one ends it.
    The exit code is the command's.

    For example:

        barchan run debian -- python3 -c 'print(6 * 7)'
        barchan run debian --tty -- bash
        barchan run debian --memory-mib 256 --timeout-s 10 -- ./prove < data
        barchan run debian --keep --ttl-s 600
        barchan run debian --layer toolkit --layer task -- make test

    Args:
        template: Name or digest of an image.
        command: The program and its arguments; options of its own need a `--` before.
        layer: An image whose own layers go above the template's; may be repeated, the last one is topmost.
        backend: A name from "barchan doctor", or auto: the strongest isolation that fits. [default: container]
        start_within_s: With --backend auto: none that takes longer to start.
        keep: Let the sandbox live on, detached; its id is the last line of stdout.
        tty: Give the command a terminal.
        memory_mib: Memory of the guest. [default: 512]
        cpus: CPU time per wall time. [default: 1]
        cpu_class: batch runs only when no other sandbox wants the processor. [default: latency]
        pids_max: Processes and threads at once. [default: 512]
        disk_mib: What may be written. [default: 1024]
        network: [default: none]
        allow: A host the guest may reach by HTTP and HTTPS; may be repeated.
        ttl_s: Life of the sandbox in seconds. [default with --keep: 3600]
        timeout_s: Time for the command; then it is killed, and the exit code is 124.
        setup: A shell script that runs first; if it fails, the sandbox is gone.
        user: User of the command. [default: the image's]
        workdir: Directory of the command. [default: the image's]
        env: KEY=VALUE; may be repeated.
        label: KEY=VALUE; may be repeated.
    """
    if not command and not keep:
        raise InvalidSpec(f"no command (try: barchan run {template} -- COMMAND, or --keep to create only)")
    options: dict[str, Any] = {
        "layers": layer or None,
        "backend": backend,
        "start_within_s": start_within_s,
        "memory_mib": memory_mib,
        "cpus": cpus,
        "cpu_class": cpu_class,
        "pids_max": pids_max,
        "disk_mib": disk_mib,
        "network": network,
        "allow": allow or None,
        "ttl_s": KEEP_TTL_S if keep and ttl_s is None else ttl_s,
        "setup": setup,
        "user": user,
        "workdir": workdir,
        "env": key_values(env, "--env"),
        "labels": key_values(label, "--label"),
        "detach": keep,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return attached.run(_run(template, command, given, use_tty=tty, timeout_s=timeout_s, common=common))


async def _run(
    template: str,
    /,
    command: tuple[str, ...],
    options: dict[str, Any],
    *,
    use_tty: bool,
    timeout_s: float | None,
    common: Common,
) -> int:
    async with barchan.connect_async(**common.connection) as client:
        sandbox = await client.create(template, **options)
        keep = options["detach"]
        try:
            code = OK
            info = None
            if command:
                process = await sandbox.start(command, **start_options(use_tty, timeout_s))
                info = await follow(process, use_tty=use_tty, end_line=keep or common.json)
                code = exit_code(info)
        finally:
            if not keep:
                await sandbox.kill()
    if common.json and info is not None:
        print_end(sandbox.id, info)
    elif common.json:
        print_json({"sandbox_id": sandbox.id})
    elif keep:
        sys.stdout.write(f"{sandbox.id}\n")
    return code


def start_options(use_tty: bool, timeout_s: float | None) -> dict[str, Any]:
    """How a program on this terminal is started: it waits rather than lose output that we are slow to read."""
    options: dict[str, Any] = {"timeout_s": timeout_s, "overflow": "block"}
    if use_tty:
        rows, cols = terminal_size()
        options |= {"pty": True, "rows": rows, "cols": cols, "env": {"TERM": os.environ.get("TERM", "xterm")}}
    return options
