"""Signals and deadlines: who gets them, and that nothing is left of what they end."""

import asyncio

from barchan.errors import InvalidSpec
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.testing.check import check
from barchan.testing.conformance.kills import WAYS_TO_KILL
from barchan.testing.expect import equal, holds, raises, until
from barchan.testing.lab import Lab, collected, said_until, text

# Its own session, deaf to signals, no descriptor of its starter's: it writes as long as it lives.
DAEMON = """
setsid sh -c ': 4242; trap "" TERM HUP INT QUIT; while :; do echo x >> %s; sleep 0.1; done' </dev/null >/dev/null 2>&1 &
until [ -s %s ]; do sleep 0.05; done; echo up
"""


def daemon(path: str) -> str:
    return DAEMON % (path, path)


async def grows(sandbox: AsyncSandbox, path: str) -> bool:
    before, after = (await text(sandbox, f"wc -c < {path}; sleep 0.5; wc -c < {path}")).split()
    return before != after


async def alive(sandbox: AsyncSandbox) -> int:
    """How many programs of the guest's have 4242 among their arguments; those that look for it are not counted."""
    return int(await text(sandbox, "grep -las '424[2]' /proc/[0-9]*/cmdline | wc -l"))


async def all_dead(sandbox: AsyncSandbox) -> bool:
    return await alive(sandbox) == 0


@check()
async def a_signal_goes_to_the_group(lab: Lab) -> None:
    """To the program and those that it started; a handler decides what comes of it."""
    sandbox = await lab.common()
    process = await sandbox.start("trap 'echo got; exit 5' TERM; sleep 4242 & echo up; wait")
    await said_until(process, b"up\n")
    holds(await process.signal("TERM") >= 1, "it reached somebody")
    equal((await process.wait(lab.s(20))).exit_code, 5)
    equal(await collected(process), b"up\ngot\n")


@check()
async def a_signal_can_go_to_one_or_to_the_others(lab: Lab) -> None:
    """`process` is the main one alone, `children` all but that."""
    sandbox = await lab.common()
    process = await sandbox.start("sleep 4242 & sleep 4242 & echo up; wait; echo done")
    await said_until(process, b"up\n")
    equal(await process.signal("KILL", scope="children"), 2)
    equal((await process.wait(lab.s(20))).exit_code, 0)
    process = await sandbox.start("sleep 4242 & echo $!; wait")
    pid = int(await said_until(process, b"\n"))
    equal(await process.signal(9, scope="process"), 1)
    equal((await process.wait(lab.s(20))).exit_code, 137)
    equal(await text(sandbox, f"kill -0 {pid} && echo lives"), "lives\n")
    equal(await process.kill(), 1, "what was left")


@check()
async def a_signal_that_is_none_or_comes_late_does_no_harm(lab: Lab) -> None:
    """A name that is none is refused; one to a program that has ended reaches nobody."""
    sandbox = await lab.common()
    process = await sandbox.start(["true"])
    await process.wait()
    equal(await process.signal("TERM"), 0)
    await raises(InvalidSpec, process.signal("NOSUCH"))


@check()
async def stopped_programs_go_on_when_told(lab: Lab) -> None:
    """SIGSTOP and SIGCONT, as to any program."""
    sandbox = await lab.create()
    process = await sandbox.start("while :; do echo x >> /tmp/steps; sleep 0.05; done")

    async def has_begun() -> bool:
        return await sandbox.files.exists("/tmp/steps")

    await until(has_begun, "it writes", lab.s(20))
    await process.signal("STOP")
    holds(not await grows(sandbox, "/tmp/steps"), "it stands still")
    await process.signal("CONT")
    holds(await grows(sandbox, "/tmp/steps"), "it goes on")
    holds(await process.kill() >= 1, "it was killed")


@check()
async def a_kill_leaves_nothing_of_a_program(lab: Lab) -> None:
    """Not a daemon in a session of its own either, which hears no other signal."""
    sandbox = await lab.create()
    process = await sandbox.start(daemon("/tmp/beat") + "exec sleep 4242")
    await said_until(process, b"up\n")
    holds(await process.kill() >= 2, "more than the main process was killed")
    equal((await process.wait(lab.s(20))).exit_code, 137)
    await until(lambda: all_dead(sandbox), "nothing of it runs", lab.s(10))
    holds(not await grows(sandbox, "/tmp/beat"), "the daemon writes no more")


@check()
async def a_time_out_is_told_with_what_was_written(lab: Lab) -> None:
    """The output until then is there, whoever ignores signals is killed, and it is no exception."""
    sandbox = await lab.common()
    result = await sandbox.exec("trap '' TERM INT; echo early; sleep 4242", timeout_s=1)
    equal((result.timed_out, result.ok, result.text), (True, False, "early\n"))
    equal((result.exit_code, result.signal), (137, 9))
    equal(await text(sandbox, "echo on"), "on\n")


@check()
async def a_time_out_ends_all_that_a_program_has_started(lab: Lab) -> None:
    """Daemons, stopped ones and those in the background, of an exec and of a start."""
    sandbox = await lab.create()
    source = "sleep 4242 & sh -c ': 4242; kill -STOP $$' & exec sleep 4242"
    result = await sandbox.exec(daemon("/tmp/one") + source, timeout_s=lab.s(1))
    equal((result.timed_out, result.text), (True, "up\n"))
    await until(lambda: all_dead(sandbox), "nothing of it runs", lab.s(10))
    holds(not await grows(sandbox, "/tmp/one"), "the daemon writes no more")
    process = await sandbox.start(daemon("/tmp/two") + source, timeout_s=lab.s(1))
    ended = await process.wait(lab.s(30))
    equal((ended.timed_out, ended.exit_code), (True, 137))
    await until(lambda: all_dead(sandbox), "nothing of it runs", lab.s(10))


@check()
async def a_time_out_of_one_program_leaves_the_others(lab: Lab) -> None:
    """Another program, and its own deadline, go on."""
    sandbox = await lab.common()
    waiting = lab.spawn(sandbox.exec("read x < /dev/null; sleep 2; echo whole", timeout_s=lab.s(60)))
    late = await sandbox.exec("sleep 4242", timeout_s=0.5)
    holds(late.timed_out, "the other one was out of time")
    equal((await waiting).text, "whole\n")


@check()
async def a_cancelled_exec_leaves_nothing_running(lab: Lab) -> None:
    """When the cancellation is seen, all that it had started is gone."""
    sandbox = await lab.create()
    call = lab.spawn(sandbox.exec("sleep 4242 & setsid sleep 4242 & sleep 4242"))

    async def runs() -> bool:
        return await alive(sandbox) >= 3

    await until(runs, "it runs", lab.s(20))
    call.cancel()
    await raises(asyncio.CancelledError, call)
    await until(lambda: all_dead(sandbox), "nothing of it runs", lab.s(10))


@check()
async def a_restrained_program_has_no_way_to_a_sigkill(lab: Lab) -> None:
    """It and what it starts: so one that it gets is known to come from outside. Others have most of these ways."""
    sandbox = await lab.common()
    free, held = await asyncio.gather(
        text(sandbox, ["python3", "-c", WAYS_TO_KILL], timeout_s=lab.s(30)),
        text(sandbox, ["python3", "-c", WAYS_TO_KILL], timeout_s=lab.s(30), restrained=True),
    )
    holds({"by_kill", "by_tgkill", "by_limit", "by_child"} <= set(free.split()), f"others can: {free}")
    equal(held, "\n", "what has killed")
    equal(
        await text(sandbox, "sleep 9 & kill $!; wait $!; echo $?", restrained=True),
        "143\n",
        "it can end what it started",
    )
