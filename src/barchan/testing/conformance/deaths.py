"""Deaths: of a guest, of what it runs in, of its node, and of all of them; each is told as what it was."""

import asyncio
import os
import signal

from barchan.errors import BarchanError, SandboxExpired, SandboxLost
from barchan.sdk.aio.client import connect_async
from barchan.testing.check import check
from barchan.testing.conformance.lives import ends_as_lost
from barchan.testing.expect import equal, holds, present, raises, until
from barchan.testing.lab import Lab, Talker, collected, text
from barchan.testing.leaks import processes

# Numbered lines over some seconds, some of them while nobody is there to hear them.
COUNTER = "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i + 1)); [ $((i % 100)) -ne 0 ] || sleep 0.2; done"
COUNTED = b"".join(b"line %d\n" % number for number in range(2000))
# Whatever a guest's root can do to end its own machine.
SELF_DESTRUCTION = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
for magic in (0x4321fedc, 0x01234567, 0xcdef0123):
    libc.reboot(ctypes.c_int(magic - (1 << 32) if magic >> 31 else magic))
for key in "coub":
    try:
        with open("/proc/sysrq-trigger", "w") as file:
            file.write(key)
    except OSError:
        pass
for pid in (1, -1):
    for number in (signal.SIGKILL, signal.SIGSTOP):
        try:
            os.kill(pid, number)
        except OSError:
            pass
"""


@check()
async def a_guest_that_is_killed_from_outside_is_told_as_lost(lab: Lab) -> None:
    """Its init, or what it runs in, gets SIGKILL: readers and callers hear of it, and nothing of it stays."""
    sandbox = await lab.create()
    process = await sandbox.start("echo up; exec sleep 300")
    reading = lab.spawn(collected(process))
    waiting = lab.spawn(sandbox.exec("sleep 300"))

    async def runs() -> bool:
        return len([info for info in await sandbox.processes() if info.running]) == 2

    await until(runs, "both run", lab.s(20))
    holds(await lab.kill_host_processes(sandbox.id), "there was something to kill")
    async with asyncio.timeout(lab.s(30)):
        await raises(SandboxLost, reading)
        await raises(SandboxLost, waiting)
    await raises(SandboxLost, sandbox.files.read("/etc/passwd"))

    async def is_lost() -> bool:
        return (await sandbox.info()).phase == "lost"

    await until(is_lost, "its phase tells of it", lab.s(10))
    await lab.nothing_remains(sandbox.id)
    equal(await text(await lab.create(), "echo on"), "on\n", "the next sandbox")


@check()
async def a_guest_that_tries_to_end_its_machine_harms_itself_only(lab: Lab) -> None:
    """It lives on, or is told as lost; its neighbour answers, and nothing of it stays."""
    sandbox, neighbour = await lab.create(user="root"), await lab.create()
    try:
        await sandbox.exec(["python3", "-c", SELF_DESTRUCTION], timeout_s=lab.s(20))
        equal(await text(sandbox, "echo on", timeout_s=lab.s(20)), "on\n")
    except SandboxLost:
        equal((await sandbox.info()).phase, "lost")
    equal(await text(neighbour, "echo on"), "on\n")
    await sandbox.kill()
    await lab.nothing_remains(sandbox.id)


@check()
async def a_killed_node_loses_no_program_and_no_byte(lab: Lab) -> None:
    """The next one finds the sandbox: streams go on at their offsets, an exec ran once, variables are kept."""
    sandbox = await lab.create()
    talker = await Talker.start(sandbox)
    equal(await talker.ask("x=41; echo $x"), "41")
    process = await sandbox.start(COUNTER)
    reading = lab.spawn(collected(process))
    waiting = lab.spawn(sandbox.exec("echo ran >> /tmp/runs; sleep 3; cat /tmp/runs", timeout_s=lab.s(60)))

    async def runs() -> bool:
        return await sandbox.files.exists("/tmp/runs")

    await until(runs, "the exec runs", lab.s(20))
    await lab.restart_node()
    equal((await waiting).text, "ran\n")
    equal(await reading == COUNTED, True, "whether every byte came, once")
    equal((await process.wait(lab.s(60))).exit_code, 0)
    equal(await talker.ask("x=$((x + 1)); echo $x"), "42")
    equal((await sandbox.info()).phase, "ready")
    holds(await sandbox.kill(), "the next node can end it")
    await lab.nothing_remains(sandbox.id)


@check()
async def a_paused_sandbox_is_paused_for_the_next_node(lab: Lab) -> None:
    """And wakes there, with its files and limits."""
    sandbox = await lab.create(pids_max=40)
    await text(sandbox, "echo kept > /tmp/kept")
    await sandbox.pause()
    await lab.restart_node()
    equal((await sandbox.info()).phase, "paused")
    equal(await text(sandbox, "cat /tmp/kept"), "kept\n")
    equal((await sandbox.info()).spec.pids_max, 40)


@check("memory")
async def a_hibernated_sandbox_outlives_its_node(lab: Lab) -> None:
    """The next one has it, and what runs in it."""
    sandbox = await lab.create()
    talker = await Talker.start(sandbox)
    equal(await talker.ask("x=41; echo $x"), "41")
    await sandbox.hibernate()
    await lab.restart_node()
    equal((await sandbox.info()).phase, "hibernated")
    equal(await talker.ask("x=$((x + 1)); echo $x"), "42")


@check()
async def a_node_that_dies_in_a_create_leaves_nothing_half_made(lab: Lab) -> None:
    """Whoever asks again by the same create id has one whole sandbox, or a typed error, and no second one."""
    for number, delay_s in enumerate((0.0, 0.02, 0.2)):
        call = lab.spawn(lab.create(create_id=f"cut-{number}", labels={"job": "cut"}))
        await asyncio.sleep(delay_s)
        await lab.restart_node()
        try:
            sandbox = await call
        except BarchanError:
            sandbox = None
        if sandbox is not None:
            equal(await text(sandbox, "echo on"), "on\n")
            await sandbox.kill()
        equal(await lab.client.list(labels={"job": "cut"}), [])


@check()
async def a_node_that_dies_with_its_supervisor_says_what_is_lost(lab: Lab) -> None:
    """The guests die with them, and nothing runs on unseen; the next node tells of it, and works."""
    sandbox = await lab.create(detach=True, ttl_s=600)
    await sandbox.start("sleep 300")
    pids = await asyncio.to_thread(lab.node.watch.sandbox_pids, sandbox.id)
    supervisor = present(await asyncio.to_thread(lab.node.watch.supervisor_pid), "supervisor")
    await asyncio.to_thread(lab.node.kill)
    os.kill(supervisor, signal.SIGKILL)

    async def are_gone() -> bool:
        return not {pid for pid, argv in processes() if argv} & set(pids)

    await until(are_gone, "the guest's processes are dead", lab.s(20))
    await asyncio.to_thread(lab.node.start)
    async with connect_async(f"unix://{lab.node.socket}") as client:
        again = await client.attach(sandbox.id)
        equal((await again.info()).phase, "lost")
        await raises(SandboxLost, again.exec("true"))
    equal(await text(await lab.create(), "echo on"), "on\n", "the next sandbox")
    await lab.nothing_remains(sandbox.id)


@check()
async def a_supervisor_that_dies_alone_is_told(lab: Lab) -> None:
    """Its sandboxes are lost by the platform's fault, and the next create works."""
    sandbox = await lab.create()
    supervisor = present(await asyncio.to_thread(lab.node.watch.supervisor_pid), "supervisor")
    os.kill(supervisor, signal.SIGKILL)
    error = await ends_as_lost(sandbox, lab.s(20))
    holds(isinstance(error, SandboxLost) and error.fault == "platform", f"it is the platform's fault: {error!r}")
    equal(await text(await lab.create(), "echo on"), "on\n", "the next sandbox")


@check()
async def what_a_client_made_ends_with_it(lab: Lab) -> None:
    """When it closes: all but what was detached, which another client finds and ends."""
    async with connect_async(f"unix://{lab.node.socket}") as client:
        held = await client.create(lab.template, **lab.options())
        detached = await client.create(lab.template, **lab.options(detach=True, ttl_s=600))
    equal((await (await lab.client.attach(held.id)).info()).phase, "stopped")
    found = await lab.client.attach(detached.id)
    equal(await text(found, "echo on"), "on\n")
    holds(await found.kill(), "it was there")
    await raises(SandboxExpired, found.exec("true"))
