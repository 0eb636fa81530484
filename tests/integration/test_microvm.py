"""MicroVMs on a real node: guests with a kernel of their own, which start, are forked, sleep and end like others."""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import barchan
from barchan import AsyncClient, AsyncSandbox, BarchanError, SandboxLost
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "qemu", "guest-kernel"), pytest.mark.timeout(300)]

MEMORY_MIB, DISK_MIB, PIDS_MAX = 96, 256, 48
WAIT_S = 30.0
FORK_ALL = """
import os, signal
children = []
try:
    while True:
        child = os.fork()
        if not child:
            signal.pause()
        children.append(child)
except BlockingIOError:
    print(len(children))
for child in children:
    os.kill(child, 9)
"""
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/next; mv /tmp/next /tmp/count; sleep 0.05; done"


@pytest.fixture(scope="module")
def node(make_node: Callable[[], NodeProcess]) -> Iterator[NodeProcess]:
    node = make_node()
    node.start()
    yield node
    assert node.end() == []


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def made(client: AsyncClient) -> AsyncSandbox:
    return await client.create("debian", backend="microvm", memory_mib=MEMORY_MIB, disk_mib=DISK_MIB, pids_max=PIDS_MAX)


async def text(sandbox: AsyncSandbox, script: str, user: str = "root") -> str:
    return (await sandbox.exec(script, user=user)).check().text.strip()


async def count(sandbox: AsyncSandbox) -> int:
    """How far the counter of a guest is, once it has begun."""
    while not (found := (await sandbox.exec("cat /tmp/count 2>/dev/null")).text):
        await asyncio.sleep(0.05)
    return int(found)


async def counts_on(sandbox: AsyncSandbox, least: int) -> None:
    """The counter goes on, from no less than `least`."""
    first = await count(sandbox)
    assert first >= least
    while await count(sandbox) == first:
        await asyncio.sleep(0.05)


def children(found: list[AsyncSandbox | BarchanError]) -> list[AsyncSandbox]:
    assert [child for child in found if not isinstance(child, AsyncSandbox)] == []
    return [child for child in found if isinstance(child, AsyncSandbox)]


def machine_of(node: NodeProcess, sandbox: AsyncSandbox) -> int:
    """The host's pid of a sandbox's QEMU."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_its = f"/{sandbox.id}-microvm/" in (path / "cgroup").read_text()
            if is_its and b"qemu-system" in (path / "cmdline").read_bytes():
                return int(path.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise AssertionError(f"{sandbox.id} has no QEMU")


async def lost(sandbox: AsyncSandbox) -> str:
    """Wait for its end; how that is told."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            await sandbox.exec("true", timeout_s=10)
        except SandboxLost as error:
            return str(error)
        await asyncio.sleep(0.05)
    raise AssertionError("it lives on")


async def test_a_guest_has_a_kernel_of_its_own(client: AsyncClient) -> None:
    """Programs, files and users are as in a container; limits kill inside, and say so."""
    async with await made(client) as sandbox:
        kernel = await text(sandbox, "uname -r")
        assert kernel != os.uname().release
        assert await text(sandbox, "id -un; hostname", user="agent") == "agent\nsandbox"
        await sandbox.files.write("/tmp/data", b"x" * 300_000)
        assert await text(sandbox, "wc -c < /tmp/data") == "300000"
        hog = await sandbox.exec(["/usr/bin/python3", "-c", "bytearray(400 << 20)"])
        assert (hog.oom_killed, hog.exit_code) == (True, 137)
        assert int(await text(sandbox, f"python3 -c '{FORK_ALL}'")) < PIDS_MAX
        assert await text(sandbox, "echo still here") == "still here"
        assert (await sandbox.stats()).oom_kills > 0


async def test_clones_share_a_boot_and_nothing_else(client: AsyncClient) -> None:
    """Later ones of a kind come from the first one's memory: the same boot, other random numbers, the right time."""
    async with await made(client) as one, await made(client) as two:
        assert await text(one, "cut -d' ' -f22 /proc/1/stat") == await text(two, "cut -d' ' -f22 /proc/1/stat")
        await text(one, "echo mine > /tmp/own")
        assert (await two.exec("cat /tmp/own")).exit_code == 1
        ids = {await text(sandbox, "cat /proc/sys/kernel/random/uuid") for sandbox in (one, two)}
        assert len(ids) == 2
        for sandbox in (one, two):
            assert abs(int(await text(sandbox, "date +%s")) - time.time()) < 5


async def test_forks_with_and_without_memory(client: AsyncClient) -> None:
    """Children have the parent's files, or its programs too, which go on where they were; a clone's clone as well."""
    async with await made(client) as parent:
        await text(parent, "echo same > /tmp/state; rm /etc/motd")
        await parent.start(COUNT, user="root")
        await count(parent)
        (child,) = children(await parent.fork(1))
        assert await text(child, "cat /tmp/state; ls /etc/motd 2>&1; hostname") == (
            f"same\nls: cannot access '/etc/motd': No such file or directory\nsandbox-{child.id[-6:]}"
        )
        assert "next" not in await text(child, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        await child.kill()
        before = await count(parent)
        forked = children(await parent.fork(2, kind="memory"))
        (grandchild,) = children(await forked[0].fork(1, kind="memory"))
        for sandbox in (*forked, grandchild, parent):
            await counts_on(sandbox, before)
        ids = {await text(sandbox, "cat /proc/sys/kernel/random/uuid") for sandbox in (*forked, grandchild, parent)}
        assert len(ids) == 4
        for sandbox in (*forked, grandchild):
            await sandbox.kill()


async def test_it_sleeps_and_wakes(client: AsyncClient, node: NodeProcess) -> None:
    """Paused it costs no processor time; hibernated it is gone, and comes back with its programs and the right time."""
    async with await made(client) as sandbox:
        counter = await sandbox.start(COUNT, user="root")
        await count(sandbox)
        await sandbox.pause()
        pid = machine_of(node, sandbox)
        used = Path(f"/proc/{pid}/stat").read_text().split()[13:15]
        await asyncio.sleep(0.5)
        assert Path(f"/proc/{pid}/stat").read_text().split()[13:15] == used
        before = await count(sandbox)
        await sandbox.hibernate()
        assert not Path(f"/proc/{pid}").exists()
        await counts_on(sandbox, before)
        assert abs(int(await text(sandbox, "date +%s")) - time.time()) < 5
        assert (await counter.info()).running


async def test_snapshots_hold_files_and_memory(client: AsyncClient) -> None:
    """What a running guest has written becomes an image, for containers too; its memory goes on elsewhere."""
    async with await made(client) as sandbox:
        await text(sandbox, "mkdir /srv/new; echo kept > /srv/new/file; rm /etc/motd")
        files = await sandbox.snapshot()
        async with await client.create(files.id, memory_mib=64) as container:
            assert await text(container, "cat /srv/new/file; test -e /etc/motd || echo gone") == "kept\ngone"
        await sandbox.start(COUNT, user="root")
        await count(sandbox)
        memory = await sandbox.snapshot(kind="memory")
        async with await client.create(
            memory.id, backend="microvm", memory_mib=MEMORY_MIB, disk_mib=DISK_MIB, pids_max=PIDS_MAX
        ) as again:
            assert await text(again, "cat /srv/new/file") == "kept"
            await counts_on(again, 1)
        for snapshot in (files, memory):
            await snapshot.remove()


async def test_a_killed_qemu_is_a_lost_sandbox(client: AsyncClient, node: NodeProcess) -> None:
    """It is told at once, and by what."""
    async with await made(client) as sandbox:
        os.kill(machine_of(node, sandbox), signal.SIGKILL)
        assert re.search("(signal|wait status) 9", await lost(sandbox))


async def test_the_next_node_finds_its_machines(make_node: Callable[[], NodeProcess]) -> None:
    """After kill -9 of the node, running programs go on, and their output comes from its offset."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        sandbox = await made(client)
        process = await sandbox.start("for i in $(seq 15); do echo line $i; sleep 0.1; done")
        node.kill()
        await asyncio.sleep(0.5)
        node.start()
        collected = b""
        async for stream, _, data in process.output():
            collected += data if stream == "stdout" else b""
        assert collected == b"".join(b"line %d\n" % number for number in range(1, 16))
        assert await text(sandbox, "echo here") == "here"
        await sandbox.kill()
