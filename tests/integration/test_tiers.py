"""Tiers of waiting, with real sandboxes: what sleeps, what wakes it, and which clocks stand still meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

import barchan
from barchan.errors import BarchanError
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]
AWAKE = barchan.Waiting(pause=False)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[barchan.AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def test_a_paused_sandbox_stands_still_and_a_request_wakes_it(client: barchan.AsyncClient) -> None:
    """Its programs make no step while it is paused, and go on where they were; info and list wake nothing."""
    sandbox = await client.create("debian")
    await sandbox.start("while :; do echo x >> /tmp/steps; sleep 0.01; done")
    while (await sandbox.exec("wc -l < /tmp/steps 2>/dev/null || echo 0")).text.strip() == "0":
        await asyncio.sleep(0.02)
    info = await sandbox.pause()
    assert (info.phase, info.tier) == ("paused", "paused")
    cpu_s = info.age_s
    assert cpu_s >= 0
    await asyncio.sleep(0.3)
    assert (await sandbox.info()).phase == "paused"
    assert [item.phase for item in await client.list() if item.sandbox_id == sandbox.id] == ["paused"]
    first = await sandbox.exec("wc -l < /tmp/steps; sleep 0.2; wc -l < /tmp/steps")
    before, after = (int(line) for line in first.text.split())
    assert before < after
    info = await sandbox.info()
    assert (info.phase, info.tier) == ("ready", "running")


async def test_whatever_is_asked_wakes_it(client: barchan.AsyncClient) -> None:
    """Bytes of a file, a write, a stream, a signal, stats, a snapshot: asked of a paused one as of one awake."""
    sandbox = await client.create("debian")
    await sandbox.files.write("/tmp/a", b"one")
    process = await sandbox.start("cat")

    async def read() -> object:
        return await sandbox.files.read("/tmp/a")

    async def output() -> object:
        await process.write_stdin("hello\n")
        async for _, _, data in process.output():
            return data
        return None

    for ask, expected in (
        (read, b"one"),
        (lambda: sandbox.files.write("/tmp/a", b"two"), None),
        (output, b"hello\n"),
        (lambda: process.signal("CONT"), 1),
    ):
        await sandbox.pause()
        assert expected == await ask()
        assert (await sandbox.info()).phase == "ready"
    await sandbox.pause()
    assert (await sandbox.stats()).pids >= 1
    assert (await sandbox.info()).phase == "ready"
    await sandbox.pause()
    assert (await sandbox.snapshot()).name
    assert (await sandbox.info()).phase == "ready"


async def test_requests_at_once_share_a_wake(client: barchan.AsyncClient) -> None:
    """Fifty execs of a paused sandbox, sent together, all answer."""
    sandbox = await client.create("debian")
    for _ in range(3):
        await sandbox.pause()
        results = await asyncio.gather(*(sandbox.exec(["echo", str(number)]) for number in range(50)))
        assert [f"{number}\n" for number in range(50)] == [result.text for result in results]


async def test_pauses_and_requests_that_cross_each_other_lose_nothing(client: barchan.AsyncClient) -> None:
    """Whoever comes first: a pause may be turned round, and an exec always ends as it should."""
    sandbox = await client.create("debian")

    async def pauses() -> None:
        for _ in range(40):
            with suppress(barchan.Conflict):  # turned round
                await sandbox.pause()
            await asyncio.sleep(0.005)
        await sandbox.resume()  # an exec that was paused waits until somebody asks for something

    async def execs() -> None:
        for number in range(40):
            assert f"{number}\n" == (await sandbox.exec(["echo", str(number)])).text

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(pauses())
        for _ in range(3):
            group.create_task(execs())


async def test_an_exec_that_is_paused_goes_on_with_what_was_left_of_its_time(client: barchan.AsyncClient) -> None:
    """Deadlines of the node stand still, and so does the wall time of the result."""
    sandbox = await client.create("debian")
    program = "i=0; while [ $i -lt 20 ]; do sleep 0.05; i=$((i+1)); done; echo done"
    running = asyncio.create_task(sandbox.exec(program, timeout_s=2))
    await asyncio.sleep(0.2)
    await sandbox.pause()
    await asyncio.sleep(2.1)
    assert not running.done()
    await sandbox.resume()
    result = await running
    assert (result.timed_out, result.text) == (False, "done\n")
    assert result.usage.wall_s < 2.2


async def test_a_ttl_stands_still(client: barchan.AsyncClient) -> None:
    """Time asleep is no part of a sandbox's life; the rest of its life is as long as it would have been."""
    sandbox = await client.create("debian", ttl_s=1)
    await sandbox.pause()
    await asyncio.sleep(1.2)
    assert (await sandbox.info()).phase == "paused"
    assert (await sandbox.exec("echo on")).text == "on\n"
    async with asyncio.timeout(10):
        while (await sandbox.info()).phase == "ready":
            await asyncio.sleep(0.05)
    assert (await sandbox.info()).end_cause == "ttl"


async def test_a_sleeping_sandbox_is_killed_without_a_wake(client: barchan.AsyncClient) -> None:
    """And says how it ended."""
    sandbox = await client.create("debian")
    await sandbox.pause()
    assert await sandbox.kill()
    with pytest.raises(barchan.SandboxExpired, match="killed"):
        await sandbox.exec("true")


async def test_a_run_may_have_them_stopped_at_once_or_never(client: barchan.AsyncClient) -> None:
    """`after_s` stops a sandbox whose programs wait for input, however soon; `pause=False` none, ever."""
    soon = await client.create("debian", waiting=barchan.Waiting(after_s=0.2, hibernate=False, page_out=False))
    never = await client.create("debian", waiting=AWAKE)
    for sandbox in (soon, never):
        shell = await sandbox.shell()
        assert (await shell.run("x=1; echo $x")).text == "1\n"
        async with asyncio.timeout(10):
            while sandbox is soon and (await sandbox.info()).phase != "paused":
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.5 if sandbox is never else 0)
        assert ("paused" if sandbox is soon else "ready") == (await sandbox.info()).phase
        assert (await shell.run("echo $x")).text == "1\n"
        await shell.close()


@pytest.mark.parametrize(
    ("left", "stops"),
    [
        ("coproc { exec python3 -c 'input()'; }", True),
        ("python3 -c 'import socket; socket.create_server((\"127.0.0.1\", 0)).accept()' &", True),
        ("sleep 1000 &", False),
    ],
)
async def test_what_a_command_has_left_may_be_stopped_beside_its_shell(
    client: barchan.AsyncClient, left: str, stops: bool
) -> None:
    """If it waits for an event, without a limit of time; and the shell's next command finds it as it was."""
    waiting = barchan.Waiting(after_s=0.2, page_out=False, hibernate=False)
    sandbox = await client.create("debian", waiting=waiting)
    shell = await sandbox.shell()
    assert (await shell.run(left)).exit_code == 0
    for _ in range(200 if stops else 30):
        phase = (await sandbox.info()).phase
        if phase == "paused":
            break
        await asyncio.sleep(0.05)
    assert phase == ("paused" if stops else "ready")
    assert (await shell.run("jobs -r | wc -l")).text == "1\n"
    await shell.close()


async def test_what_runs_for_somebody_is_not_stopped(client: barchan.AsyncClient) -> None:
    """An exec that sleeps, and a program whose end somebody waits for, both longer than the policy waits."""
    waiting = barchan.Waiting(after_s=0.2, hibernate=False, page_out=False)
    sandbox = await client.create("debian", waiting=waiting)
    assert (await sandbox.exec("sleep 0.9; echo done")).text == "done\n"
    process = await sandbox.start("sleep 0.9; echo done")
    assert (await process.wait(timeout_s=20)).exit_code == 0
    process = await sandbox.start("sleep 0.9; echo done")
    assert [data async for _, _, data in process.output()] == [b"done\n"]


async def test_a_storm_is_told_one_by_one(client: barchan.AsyncClient) -> None:
    """Sixty sandboxes paused and woken in one request each; the node answers others meanwhile."""
    made = [item async for item in client.create_many("debian", n=60, memory_mib=64, labels={"storm": "a"})]
    assert not [item for item in made if isinstance(item, BarchanError)]
    paused = {change.sandbox_id: change for change in await client.pause_many(labels={"storm": "a"})}
    assert len(paused) == 60
    assert {("paused", "")} == {(change.tier, change.refused) for change in paused.values()}
    assert {"paused"} == {info.phase for info in await client.list(labels={"storm": "a"})}
    woken = await client.resume_many(sandbox_ids=list(paused)[:30])
    assert {("running", "")} == {(change.tier, change.refused) for change in woken}
    assert sum(info.phase == "paused" for info in await client.list(labels={"storm": "a"})) == 30
    await client.kill(labels={"storm": "a"})
    with pytest.raises(barchan.NotFound):
        await client.resume_many(sandbox_ids=["sb_none"])


async def test_a_killed_node_leaves_them_as_they_were(make_node: Callable[[], NodeProcess], tmp_path: Path) -> None:
    """The next node has the paused one paused, its life not shorter; the other one runs."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        asleep = await client.create("debian", ttl_s=600, detach=True, memory_mib=64)
        awake = await client.create("debian", ttl_s=600, detach=True, memory_mib=64)
        process = await asleep.start("while :; do echo x; sleep 0.01; done", timeout_s=500)
        await asleep.pause()
        node.kill()
        node.start()
        assert [(await sandbox.info()).phase for sandbox in (asleep, awake)] == ["paused", "ready"]
        before = time.monotonic()
        assert (await process.info()).running
        assert time.monotonic() - before < 60
        assert (await asleep.info()).phase == "ready"
        await client.kill(labels={})
