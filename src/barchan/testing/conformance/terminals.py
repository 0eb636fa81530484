"""Terminals: size, control characters, and the program's own view of them."""

from barchan.testing.check import check
from barchan.testing.expect import equal, holds, until
from barchan.testing.lab import Lab, collected, said_until


@check()
async def a_terminal_has_a_size_and_can_be_resized(lab: Lab) -> None:
    """A program sees the size asked for, and is told of a change."""
    sandbox = await lab.common()
    look = "stty size; test -t 0 && test -t 1 && echo both; trap 'stty size; exit' WINCH; echo ready"
    source = f"{look}; while :; do sleep 0.1; done"
    process = await sandbox.start(source, pty=True, rows=31, cols=97)
    said = await said_until(process, b"ready")
    equal(said.split(b"\r\n")[:2], [b"31 97", b"both"])
    await process.resize(40, 120)
    equal((await process.wait(lab.s(20))).exit_code, 0)
    holds(b"40 120" in await collected(process), "the new size was seen")


@check()
async def ctrl_c_interrupts_what_runs_in_front(lab: Lab) -> None:
    """As typed on a keyboard: the program gets SIGINT, the terminal lives on."""
    sandbox = await lab.common()
    process = await sandbox.start("trap 'echo caught; exit 7' INT; echo ready; while :; do sleep 0.1; done", pty=True)
    await said_until(process, b"ready")
    await process.write_stdin(b"\x03")
    equal((await process.wait(lab.s(20))).exit_code, 7)
    holds(b"caught" in await collected(process), "the trap ran")


@check()
async def ctrl_d_ends_the_input(lab: Lab) -> None:
    """At the beginning of a line; what was typed is echoed."""
    sandbox = await lab.common()
    process = await sandbox.start(["cat"], pty=True)
    await process.write_stdin("typed\n")
    await said_until(process, b"typed\r\ntyped\r\n")
    await process.write_stdin(b"\x04")
    equal((await process.wait(lab.s(20))).exit_code, 0)


@check()
async def output_right_before_the_end_is_not_lost(lab: Lab) -> None:
    """What a program on a terminal writes last is there before its end is told."""
    sandbox = await lab.common()
    for _ in range(5):
        process = await sandbox.start(["seq", "500"], pty=True)
        equal((await collected(process)).count(b"\r\n"), 500, "lines")


@check()
async def an_interactive_shell_draws_its_screen(lab: Lab) -> None:
    """Typed commands run, and what they draw can be looked at."""
    sandbox = await lab.common()
    async with await sandbox.terminal(24, 80, command=["/bin/sh", "-i"]) as terminal:
        await terminal.send("echo $((6 * 7))\n")

        async def is_drawn() -> bool:
            # Behind the prompt, where that came after what was typed.
            return any(row.endswith("42") for row in await terminal.screen(settle_s=0.2))

        await until(is_drawn, "the answer is on the screen", lab.s(20))
