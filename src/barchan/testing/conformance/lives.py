"""How sandboxes begin and end: ids, many at once, what makes an end, and that nothing stays."""

import asyncio

from barchan.errors import BarchanError, Conflict, NotFound, SandboxExpired, SetupFailed
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.testing.check import check
from barchan.testing.expect import equal, holds, raises, until
from barchan.testing.lab import CREATE_S, Lab, made, text


@check()
async def a_sandbox_says_what_it_is(lab: Lab) -> None:
    """Its backend, template, phase and limits, as they were asked for."""
    sandbox = await lab.create(labels={"job": "told"}, pids_max=99)
    info = await sandbox.info()
    equal((info.phase, info.tier, info.spec.backend, info.template), ("ready", "running", lab.backend, lab.template))
    equal((info.spec.memory_mib, info.spec.pids_max), (lab.profile.memory_mib, 99))
    equal([item.sandbox_id for item in await lab.client.list(labels={"job": "told"})], [sandbox.id])


@check()
async def a_create_id_names_one_sandbox(lab: Lab) -> None:
    """Asked for at once or again it is the same; for another sandbox it is a conflict, after its end it is gone."""
    first, second = await asyncio.gather(*(lab.create(create_id="once") for _ in range(2)))
    third = await lab.create(create_id="once")
    equal({first.id, second.id, third.id}, {first.id})
    await raises(Conflict, lab.create(create_id="once", pids_max=33))
    await first.kill()
    await raises(SandboxExpired, lab.create(create_id="once"))


@check()
async def eight_creates_at_once_make_eight_sandboxes(lab: Lab) -> None:
    """Each its own, and each answers."""
    sandboxes = await asyncio.gather(*(lab.create(env={"N": str(number)}) for number in range(8)))
    equal(len({sandbox.id for sandbox in sandboxes}), 8)
    said = await asyncio.gather(*(text(sandbox, "echo $N > /tmp/n; cat /tmp/n") for sandbox in sandboxes))
    equal(said, [f"{number}\n" for number in range(8)])


@check()
async def a_killed_sandbox_is_gone(lab: Lab) -> None:
    """With all its programs when the call returns; what is asked of it then says so; a second kill finds nothing."""
    sandbox = await lab.create()
    await sandbox.start("sleep 300 & sleep 300")
    holds(await sandbox.kill(), "there was one to kill")
    equal(await asyncio.to_thread(lab.node.watch.sandbox_pids, sandbox.id), [], "its processes on the host")
    await lab.nothing_remains(sandbox.id)
    for call in (sandbox.exec("true"), sandbox.files.read("/etc/passwd"), sandbox.pause()):
        await raises((SandboxExpired, NotFound), call)
    equal(await sandbox.kill(), False)
    equal((await sandbox.info()).phase, "stopped")


@check()
async def a_kill_interrupts_what_runs(lab: Lab) -> None:
    """Whoever waits for a program or reads its output is told that the sandbox has ended."""
    sandbox = await lab.create()
    waiting = lab.spawn(sandbox.exec("sleep 300"))
    process = await sandbox.start("echo up; exec sleep 300")

    async def read() -> None:
        async for _ in process.output():
            pass

    reading = lab.spawn(read())

    async def runs() -> bool:
        return len([info for info in await sandbox.processes() if info.running]) == 2

    await until(runs, "both run", lab.s(20))
    await sandbox.kill()
    async with asyncio.timeout(lab.s(20)):
        await raises(SandboxExpired, waiting)
        await raises(SandboxExpired, reading)


@check()
async def a_sandbox_ends_by_its_time(lab: Lab) -> None:
    """Even while a program runs in it; the cause is told afterwards."""
    sandbox = await lab.create(ttl_s=lab.s(2))
    await sandbox.start("sleep 300")

    async def is_over() -> bool:
        return (await sandbox.info()).phase == "stopped"

    await until(is_over, "its time is over", lab.s(20))
    error = await raises(SandboxExpired, sandbox.exec("true"))
    equal(error.details.get("cause"), "ttl")
    await lab.nothing_remains(sandbox.id)


@check()
async def a_set_up_runs_first(lab: Lab) -> None:
    """The create returns when it is through; one that fails leaves no sandbox, and says what it said."""
    sandbox = await lab.create(setup="echo ready > /tmp/set-up", user="root")
    equal(await text(sandbox, "cat /tmp/set-up"), "ready\n")
    error = await raises(SetupFailed, lab.create(setup="echo broken >&2; exit 3", labels={"job": "broken"}))
    equal(error.details.get("exit_code"), 3)
    holds("broken" in str(error), "the message has its output")
    equal(await lab.client.list(labels={"job": "broken"}), [])


@check()
async def what_is_not_there_is_not_found(lab: Lab) -> None:
    """A template, a sandbox, a process: each is told as the caller's mistake."""
    options = lab.options()
    await raises(NotFound, lab.client.create("no-such-template", **options))
    await raises(NotFound, lab.client.attach("sb_00000000_000000000000"))
    await raises(NotFound, (await lab.common()).process("never-started").info())


@check()
async def a_cancelled_create_leaves_no_sandbox(lab: Lab) -> None:
    """At whatever moment; nothing is there when the cancellation is seen."""
    for delay_s in (0.0, 0.001, 0.005, 0.02, 0.1):
        call = lab.spawn(lab.create(labels={"job": "cancelled"}))
        await asyncio.sleep(delay_s)
        if call.cancel():
            await raises(asyncio.CancelledError, call)
        else:
            await (await call).kill()
        equal(await lab.client.list(labels={"job": "cancelled"}), [])


@check()
async def many_come_and_go_and_leave_nothing(lab: Lab) -> None:
    """A dozen of them, some of them with programs, files and a pause behind them."""
    timeout_s = lab.s(CREATE_S)
    items = [item async for item in lab.client.create_many(lab.template, n=12, timeout_s=timeout_s, **lab.options())]
    sandboxes = made(items)
    await asyncio.gather(*(sandbox.exec("echo x > /tmp/x; sleep 300 & true") for sandbox in sandboxes))
    for sandbox in sandboxes[:3]:
        await sandbox.pause()
    await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes))
    for sandbox in sandboxes:
        await lab.nothing_remains(sandbox.id)


@check("zygote")
async def a_warm_interpreter_runs_source(lab: Lab) -> None:
    """With what it has imported, and with nothing of what ran before."""
    sandbox = await lab.client.create(lab.client.zygote(lab.template, imports=["json"]), **lab.options())
    source = "import sys; print('json' in sys.modules, globals().get('left')); left = 1"
    for _ in range(2):
        equal((await sandbox.python(source)).check().text, "True None\n")


async def ends_as_lost(sandbox: AsyncSandbox, within_s: float) -> BarchanError:
    """The error that says why a sandbox is lost, as soon as it is told."""
    found: list[BarchanError] = []

    async def is_lost() -> bool:
        try:
            await sandbox.exec("true", timeout_s=within_s)
        except BarchanError as error:
            found.append(error)
        return bool(found)

    await until(is_lost, "the loss is told", within_s)
    return found[-1]
