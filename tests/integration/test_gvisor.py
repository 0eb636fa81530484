"""Sandboxes of gVisor on a real node: what is asked of any sandbox, and how they end."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import barchan
from barchan import AsyncClient, AsyncSandbox, BarchanError, NotSnapshotable, SandboxLost
from barchan.backends.gvisor.handle import OUT_OF_MEMORY
from barchan.backends.gvisor.spec import OVERHEAD_MIB
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "runsc"), pytest.mark.timeout(300)]

MEMORY_MIB = 128
PIDS_MAX = 40
WAIT_S = 30.0
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/next; mv /tmp/next /tmp/count; sleep 0.05; done"
FILL = """
import mmap, sys
memory, at = mmap.mmap(-1, 256 << 20), 0
for line in sys.stdin:
    while at < int(line):
        memory[at] = 1
        at += 4096
    print(sum(memory[:at:4096]) * 4096)
"""
FORK_ALL = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    print(made)
"""


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
    return await client.create("debian", backend="gvisor", memory_mib=MEMORY_MIB, disk_mib=64, pids_max=PIDS_MAX)


async def text(sandbox: AsyncSandbox, script: str, user: str = "root") -> str:
    return (await sandbox.exec(script, user=user)).check().text.strip()


async def count(sandbox: AsyncSandbox) -> int:
    """How far its counter is."""
    return int(await text(sandbox, "until [ -s /tmp/count ]; do sleep 0.02; done; cat /tmp/count"))


async def counts_on(sandbox: AsyncSandbox, before: int) -> None:
    """Its counter goes on from where it was."""
    first = await count(sandbox)
    assert first >= before
    while await count(sandbox) == first:
        await asyncio.sleep(0.05)


def children(found: list[AsyncSandbox | BarchanError]) -> list[AsyncSandbox]:
    assert [child for child in found if not isinstance(child, AsyncSandbox)] == []
    return [child for child in found if isinstance(child, AsyncSandbox)]


def process_of(sandbox: AsyncSandbox, name: bytes) -> int:
    """The host's pid of one of the programs that run a guest."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_its = f"/{sandbox.id}-gvisor/" in (path / "cgroup").read_text()
            if is_its and (path / "cmdline").read_bytes().startswith(name):
                return int(path.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise AssertionError(f"{sandbox.id} has no {name.decode()}")


async def test_programs_see_another_kernel(client: AsyncClient) -> None:
    """Files, users, streams, terminals and time-outs are as in a container; what runs the guest can't be entered."""
    async with await made(client) as sandbox:
        assert await text(sandbox, "uname -r") != os.uname().release
        assert (
            await text(sandbox, "id -un; hostname; ls -la / > /tmp/listed; echo $?", user="agent")
            == "agent\nsandbox\n0"
        )
        for user in ("root", "agent"):
            assert (await sandbox.exec("ls /.barchan", user=user)).exit_code == 2
            assert (await sandbox.exec("kill -9 1", user=user)).exit_code == 1
        await sandbox.files.write("/tmp/data", b"x" * 300_000)
        assert await text(sandbox, "wc -c < /tmp/data") == "300000"
        slow = await sandbox.exec("echo begun; sleep 60", timeout_s=0.5)
        assert (slow.timed_out, slow.text) == (True, "begun\n")
        terminal = await sandbox.start("tty; read line; echo got $line", pty=True)
        await terminal.write_stdin(b"word\n")
        assert (await terminal.wait()).exit_code == 0
        said = b"".join([data async for stream, _, data in terminal.output() if stream == "stdout"])
        assert b"/dev/pts/" in said
        assert b"got word" in said
        lonely = await sandbox.exec(["python3", "-c", "import socket; socket.create_connection(('192.0.2.1', 80))"])
        assert "No route to host" in lonely.error_text


async def test_limits_are_kept_and_told(client: AsyncClient) -> None:
    """Memory, by killing what takes it; processes and disk, by refusing more. The sandbox lives on."""
    async with await made(client) as sandbox:
        grow = "x = []\nwhile True: x.append(b'x' * (1 << 20))"
        hog = await sandbox.exec(["python3", "-c", grow])
        assert (hog.oom_killed, hog.exit_code) == (True, 137)
        assert (await sandbox.stats()).oom_kills == 1
        full = await sandbox.exec("head -c 100000000 /dev/zero > /home/agent/file")
        assert "quota" in full.error_text
        many = await sandbox.exec(["python3", "-c", FORK_ALL], user="agent")
        assert 20 <= int(many.text) <= PIDS_MAX
        assert await text(sandbox, "echo still here", user="root") == "still here"


async def test_a_capable_root_has_the_files_of_others(client: AsyncClient) -> None:
    """And can be them; a plain root has not, and can't."""
    give = "touch /tmp/file && chown 1234 /tmp/file && su -s /bin/sh nobody -c id"
    async with await made(client) as plain:
        assert (await plain.exec(give, user="root")).exit_code != 0
    async with await client.create("debian", backend="gvisor", memory_mib=MEMORY_MIB, root="capable") as capable:
        assert "nobody" in await text(capable, give)


async def test_forks_with_and_without_memory(client: AsyncClient) -> None:
    """Children have the parent's files, or its programs too, which go on where they were."""
    async with await made(client) as parent:
        await text(parent, "echo same > /tmp/state")
        await parent.start(COUNT, user="root")
        await count(parent)
        (child,) = children(await parent.fork(1))
        assert await text(child, "cat /tmp/state; hostname") == f"same\nsandbox-{child.id[-6:]}"
        await child.kill()
        before = await count(parent)
        (forked,) = children(await parent.fork(1, kind="memory"))
        (grandchild,) = children(await forked.fork(1, kind="memory"))
        for sandbox in (forked, grandchild, parent):
            await counts_on(sandbox, before)
        assert await text(grandchild, "hostname") == f"{(await forked.info()).spec.hostname[:56]}-{grandchild.id[-6:]}"
        for sandbox in (forked, grandchild):
            await sandbox.kill()


async def test_it_sleeps_and_wakes(client: AsyncClient) -> None:
    """Paused it costs no processor time; hibernated it is gone, and comes back with its programs and their output."""
    async with await made(client) as sandbox:
        counter = await sandbox.start(COUNT, user="root")
        await count(sandbox)
        await sandbox.pause()
        pid = process_of(sandbox, b"runsc-sandbox")
        used = Path(f"/proc/{pid}/stat").read_text().split()[13:15]
        await asyncio.sleep(0.3)
        assert Path(f"/proc/{pid}/stat").read_text().split()[13:15] == used
        before = await count(sandbox)
        await sandbox.hibernate()
        assert not Path(f"/proc/{pid}").exists()
        await counts_on(sandbox, before)
        assert (await counter.info()).running
        snapshot = await sandbox.snapshot(kind="memory")
        async with await client.create(snapshot.id, backend="gvisor", memory_mib=MEMORY_MIB, disk_mib=64) as again:
            await counts_on(again, before)
        await snapshot.remove()


async def test_a_guest_that_has_filled_its_memory_can_be_stored(client: AsyncClient) -> None:
    """Storing it and bringing it back take memory beside its own: nothing of it is killed for that."""
    async with await made(client) as sandbox:
        filler = await sandbox.start(["python3", "-uc", FILL], user="root", stdin_open=True)
        size = at = 0

        async def fill() -> None:
            nonlocal at
            await filler.write_stdin(b"%d\n" % size)
            said = b""
            async for _, _, data in filler.output(at):
                said += data
                if said.endswith(b"\n"):
                    break
            assert int(said) == size
            at += len(said)

        limit = (MEMORY_MIB + OVERHEAD_MIB) << 20
        while (left := limit - (await sandbox.stats()).memory_bytes) > 2 << 20:
            size += left // 2 & -4096
            await fill()
        await (await sandbox.snapshot(kind="memory")).remove()
        await sandbox.hibernate()
        await fill()
        assert (await sandbox.stats()).oom_kills == 0


async def test_networks(client: AsyncClient) -> None:
    """The egress proxy refuses what is not allowed; the memory of such a sandbox can't be stored, and that is said."""
    fetch = "import urllib.request\nurllib.request.urlopen('http://other.example/')"
    async with await client.create(
        "debian", backend="gvisor", memory_mib=MEMORY_MIB, network="allow", allow_hosts=["example.org"]
    ) as sandbox:
        assert "403" in (await sandbox.exec(["python3", "-c", fetch])).error_text
        with pytest.raises(NotSnapshotable, match="network"):
            await sandbox.snapshot(kind="memory")
        assert await text(sandbox, "echo still here") == "still here"


@pytest.mark.parametrize(
    ("name", "why"), [(b"runsc-sandbox", "the sentry was ended by signal 9"), (b"runsc-gofer", "the gofer was ended")]
)
async def test_a_killed_part_is_a_lost_sandbox(client: AsyncClient, name: bytes, why: str) -> None:
    """It is told at once, and which it was."""
    async with await made(client) as sandbox:
        hog = await sandbox.exec(["python3", "-c", "x = b'x' * (1 << 30)"])  # what the kernel kills itself is no excuse
        assert hog.oom_killed
        os.kill(process_of(sandbox, name), signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        with pytest.raises(SandboxLost):
            while time.monotonic() < deadline:
                await sandbox.exec("true")
        cause = (await sandbox.info()).end_cause or ""
        assert why in cause
        assert "1 out-of-memory kills" in cause
        assert OUT_OF_MEMORY not in cause


async def test_the_next_node_finds_its_guests(make_node: Callable[[], NodeProcess]) -> None:
    """After kill -9 of the node, running programs go on, and their output comes from its offset; so do paused ones."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        sandbox, paused = await made(client), await made(client)
        process = await sandbox.start("for i in $(seq 15); do echo line $i; sleep 0.1; done")
        await paused.start(COUNT, user="root")
        before = await count(paused)
        await paused.pause()
        node.kill()
        await asyncio.sleep(0.5)
        node.start()
        collected = b""
        async for stream, _, data in process.output():
            collected += data if stream == "stdout" else b""
        assert collected == b"".join(b"line %d\n" % number for number in range(1, 16))
        assert await text(sandbox, "echo here") == "here"
        await counts_on(paused, before)
        await sandbox.kill()
        await paused.kill()
    assert node.end() == []
