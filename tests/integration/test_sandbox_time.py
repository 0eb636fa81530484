"""Who waits for a program is never kept waiting by the platform's sleep, and no time of a client runs during one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import barchan
from barchan.rollout.ports import NoLog
from barchan.rollout.services import start_services
from barchan.rollout.task import Service
from barchan.sdk.aio import process as process_module
from barchan.sdk.aio import sandbox as sandbox_module
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]
SOON = barchan.Waiting(after_s=0.2, hibernate=False, page_out=False)
# Reads a pipe that nobody writes to, until its timer ends it: what a test runner's time-out does around a deadlock.
DEADLOCK = """python3 -c '
import os, signal, sys
signal.signal(signal.SIGALRM, lambda *_: (print("alarm", flush=True), os._exit(3)))
signal.alarm(2)
os.read(os.pipe()[0], 1)'"""
WAITING_PARENT = """python3 -c '
import os, signal, subprocess
signal.signal(signal.SIGALRM, lambda *_: (child.kill(), print("alarm", flush=True), os._exit(3)))
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
signal.alarm(2)
child.wait()'"""


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[barchan.AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def paused_for(sandbox: barchan.AsyncSandbox, after_s: float, for_s: float) -> None:
    await asyncio.sleep(after_s)
    await sandbox.pause()
    await asyncio.sleep(for_s)
    assert (await sandbox.info()).phase == "paused"  # nobody's waiting woke it
    await sandbox.resume()


@pytest.mark.parametrize("command", [DEADLOCK, WAITING_PARENT], ids=["pipe", "child"])
async def test_a_command_that_waits_for_its_timer_is_not_stopped(client: barchan.AsyncClient, command: str) -> None:
    """Not while somebody waits for it in a shell or listens to it, and not by whoever started it in the background."""
    sandbox = await client.create("debian", waiting=SOON)
    async with await sandbox.shell() as shell:
        result = await shell.run(command, timeout_s=10)
        assert (result.exit_code, result.timed_out, result.text) == (3, False, "alarm\n")
    process = await sandbox.start(command, stdin_open=True)
    assert [data async for _, _, data in process.output(quiet_timeout_s=20)] == [b"alarm\n"]


async def test_a_shell_sleeps_between_its_commands_with_their_jobs_at_work(client: barchan.AsyncClient) -> None:
    """It does once nothing runs; what a command left behind it keeps it awake while that has a time to come."""
    sandbox = await client.create("debian", waiting=SOON)
    async with await sandbox.shell() as shell:
        assert (await shell.run("cd /tmp; x=1")).exit_code == 0
        await asleep(sandbox)
        assert (await shell.run("(sleep 2; touch slept) >/dev/null 2>&1 & echo $x")).text == "1\n"
        await asyncio.sleep(1.0)
        assert (await sandbox.info()).phase == "ready"
        await asyncio.sleep(2.5)
        assert (await sandbox.files.stat("/tmp/slept")).kind == "file"


async def test_what_only_an_alarm_would_end_goes_on_when_somebody_comes(client: barchan.AsyncClient) -> None:
    """Nobody sees that alarm from outside: it sleeps with its sandbox, and goes off at the next request."""
    sandbox = await client.create("debian", waiting=SOON)
    async with await sandbox.shell() as shell:
        await shell.run(f"cd /tmp; ({DEADLOCK}; touch done) >/dev/null 2>&1 &")
        await asleep(sandbox)
        await asyncio.sleep(2.5)
        async with asyncio.timeout(10):
            while (await shell.run("ls")).text != "done\n":
                await asyncio.sleep(0.05)


async def asleep(sandbox: barchan.AsyncSandbox) -> None:
    async with asyncio.timeout(10):
        while (await sandbox.info()).phase != "paused":
            await asyncio.sleep(0.05)


async def test_a_command_of_a_shell_has_its_time_whatever_the_sandbox_sleeps(client: barchan.AsyncClient) -> None:
    """Both limits, and nothing is billed for a sleep."""
    sandbox = await client.create("debian")
    async with await sandbox.shell() as shell, sandbox.clock() as clock:
        before = clock.time()
        sleeping = asyncio.create_task(paused_for(sandbox, 0.3, 2.5))
        result = await shell.run("sleep 1; echo on", timeout_s=2.5, idle_timeout_s=2.4)
        assert (result.timed_out, result.text) == (False, "on\n")
        await sleeping
        assert clock.time() - before < 2.5
        result = await shell.run("echo a; sleep 60", timeout_s=0.5)
        assert (result.timed_out, result.text) == (True, "a\n")


async def test_what_waits_for_a_program_waits_in_the_sandboxs_time(
    client: barchan.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exec, a wait in several polls, and a stream: none gives up for a sleep, and none ends it."""
    monkeypatch.setattr(sandbox_module, "_MARGIN_S", 0.2)
    monkeypatch.setattr(process_module, "_POLL_S", 0.5)
    monkeypatch.setattr(process_module, "CALL_TIMEOUT_S", 1.0)
    sandbox = await client.create("debian")
    program = "sleep 1; echo on"

    async def heard(process: barchan.AsyncProcess) -> list[bytes]:
        return [data async for _, _, data in process.output(quiet_timeout_s=2)]

    one, two = await sandbox.start(program), await sandbox.start(program)
    result, info, output, _ = await asyncio.gather(
        sandbox.exec(program, timeout_s=2), one.wait(2), heard(two), paused_for(sandbox, 0.3, 3)
    )
    assert (result.timed_out, result.text, info.exit_code, output) == (False, "on\n", 0, [b"on\n"])
    late = await sandbox.start("sleep 60")
    with pytest.raises(barchan.ReadTimeout):
        await late.wait(0.6)
    with pytest.raises(barchan.ReadTimeout):
        await anext(late.output(quiet_timeout_s=0.5))


async def test_a_stream_that_children_hold_open_is_told_to_be_silent(
    client: barchan.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is asked for again meanwhile; that the main program has ended is told once."""
    monkeypatch.setattr(process_module, "_PROBE_S", 0.2)
    sandbox = await client.create("debian")
    process = await sandbox.start("sleep 60 & echo left")
    told: list[str] = []
    with pytest.raises(barchan.ReadTimeout):
        async for chunk in process.chunks(0, 0, follow=True, quiet_timeout_s=1.0):
            told.append(chunk.stream)
    assert sorted(told) == ["exit", "stdout"]


async def test_a_clock_wakes_and_hears_of_each_sleep(client: barchan.AsyncClient) -> None:
    """It stands still with the sandbox, and its limits with it; it says how a sandbox ended that it is asked of."""
    sandbox = await client.create("debian")
    await sandbox.pause()
    async with sandbox.clock() as clock:
        assert (await sandbox.info()).phase == "ready"
        async with clock.timeout(1.5):
            await paused_for(sandbox, 0.1, 2)
            await sandbox.pause()
            await asyncio.sleep(0.3)
            at = clock.time()
            await asyncio.sleep(0.2)
            assert clock.time() == at
            await sandbox.resume()
        with pytest.raises(TimeoutError):
            async with clock.timeout(0.1):
                await asyncio.sleep(60)
    await sandbox.kill()
    with pytest.raises(barchan.SandboxExpired):
        async with sandbox.clock():
            pass


async def test_a_service_that_is_waited_for_is_not_stopped(client: barchan.AsyncClient) -> None:
    """Also between two looks at whether it is ready."""
    sandbox = await client.create("debian", waiting=barchan.Waiting(after_s=0.05, hibernate=False, page_out=False))
    service = Service(name="slow", command="sleep 1.5; touch /tmp/up; sleep 60", ready="test -e /tmp/up")
    starting = asyncio.create_task(start_services(sandbox, [service], NoLog()))
    seen: set[str] = set()
    while not starting.done():
        seen.add((await sandbox.info()).phase)
        await asyncio.sleep(0.01)
    await starting
    assert seen == {"ready"}
