"""Forks: siblings with the same files from one cut, apart from then on, to any depth; and nothing left of them."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

import barchan
from barchan import AsyncClient, AsyncSandbox, BarchanError
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]

WAIT_S = 30.0


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
    assert await nothing_remains(node) == []


def pool(node: NodeProcess) -> dict[str, list[str]]:
    """What lies in the pool's directories, seen through the node's descriptors of them."""
    assert node.process is not None
    found = {}
    for fd in Path(f"/proc/{node.process.pid}/fd").iterdir():
        try:
            name = os.readlink(fd)
            if name in ("/cut", "/upper"):
                found[name] = os.listdir(fd)
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


async def nothing_remains(node: NodeProcess) -> list[str]:
    """Wait until no cut, no writable layer and no directory of a fork is left; what still is after a while."""
    deadline = time.monotonic() + WAIT_S
    while True:
        found = [f"{folder}/{name}" for folder, names in pool(node).items() for name in names]
        found += [str(path) for path in (node.state_dir / "memory").glob("*")]
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.05)


async def text(sandbox: AsyncSandbox, script: str) -> str:
    return (await sandbox.exec(script, user="root")).check().text


def made(children: list[AsyncSandbox | BarchanError]) -> list[AsyncSandbox]:
    assert [child for child in children if not isinstance(child, AsyncSandbox)] == []
    return [child for child in children if isinstance(child, AsyncSandbox)]


async def test_children_start_from_one_cut_and_are_apart(client: AsyncClient) -> None:
    """All have the parent's files as at one moment, none of its processes, and each its own name and files."""
    async with await client.create("debian", memory_mib=128) as parent:
        await text(parent, "echo same > /tmp/state; rm /etc/motd")
        counter = await parent.start("cd /tmp; i=0; while :; do i=$((i+1)); echo $i > next; mv next count; done")
        while not (await parent.exec("cat /tmp/count 2>/dev/null")).text:
            await asyncio.sleep(0.05)
        children = made(await parent.fork(6))
        counts = {await text(child, "cat /tmp/count") for child in children}
        assert len(counts) == 1 and 0 < int(counts.pop()) <= int(await text(parent, "cat /tmp/count"))
        for number, child in enumerate(children):
            assert await text(child, "cat /tmp/state") == "same\n"
            assert (await child.exec("ls /etc/motd")).exit_code != 0
            assert not any(process.running for process in await child.processes())
            await text(child, f"echo {number} > /tmp/state")
        assert [await text(child, "cat /tmp/state") for child in children] == [f"{number}\n" for number in range(6)]
        assert await text(parent, "cat /tmp/state") == "same\n"
        assert (await counter.info()).running
        infos = [await child.info() for child in children]
        names = [await text(child, "hostname") for child in children]
        assert names == [f"sandbox-{child.id[-6:]}\n" for child in children]
        assert {info.spec.lease_id for info in infos} == {(await parent.info()).spec.lease_id}
        assert all(info.spec.memory_mib == 128 for info in infos)


async def test_a_child_differs_as_it_is_told(client: AsyncClient) -> None:
    """Labels and variables are added to the parent's; limits and lives are its own; what it is made of can't change."""
    async with await client.create("debian", env={"A": "a"}, labels={"one": "1"}, ttl_s=600) as parent:
        (child,) = made(
            await parent.fork(env={"B": "b"}, labels={"two": "2"}, memory_mib=96, ttl_s=None, hostname="h" * 63)
        )
        spec = (await child.info()).spec
        assert (spec.env, spec.memory_mib, spec.ttl_s) == ({"A": "a", "B": "b"}, 96, None)
        assert {"one", "two"} <= set(spec.labels)
        assert await text(child, "echo $A$B; hostname") == f"ab\n{'h' * 56}-{child.id[-6:]}\n"
        for wrong in ({"create_id": "mine"}, {"layers": ["debian"]}, {"memory_mib": 1}, {"network": "allow"}):
            with pytest.raises(barchan.InvalidSpec):
                await parent.fork(2, **wrong)  # type: ignore[arg-type]
        for wrong_n in (0, 1025, True):
            with pytest.raises(barchan.InvalidSpec):
                await parent.fork(wrong_n)
        with pytest.raises(barchan.NotFound):
            await parent.fork(lease_id="le_none")


async def test_a_child_is_forked_again_to_any_depth_and_outlives_its_parent(client: AsyncClient) -> None:
    """Twelve generations, each parent ended once its child is there; every one's file is in the last."""
    current = await client.create("debian", memory_mib=64)
    for depth in range(12):
        await text(current, f"echo {depth} >> /root/depths; mkdir /srv/{depth}; rm -rf /srv/{depth - 1}")
        (child,) = made(await current.fork())
        await current.kill()
        current = child
    assert await text(current, "cat /root/depths | tr '\\n' ' '; ls /srv") == f"{' '.join(map(str, range(12)))} 11\n"
    await current.kill()


async def test_each_child_succeeds_or_fails_alone(client: AsyncClient, node: NodeProcess) -> None:
    """Of more than the lease's budget allows, those that fit are made, and the others say why not."""
    async with client.run("budget", budget=barchan.Budget(sandboxes_max=3)) as run:
        lease_id = run.lease_id
        parent = await client.create("debian", memory_mib=64)
        children = await parent.fork(5, lease_id=lease_id)
        failed = [child for child in children if isinstance(child, BarchanError)]
        assert [type(error) for error in failed] == [barchan.CapacityError] * 2
        assert len(node.sandboxes()) == 4
        for child in children:
            if isinstance(child, AsyncSandbox):
                assert await text(child, "echo here") == "here\n"
        await parent.kill()


async def test_an_open_network_is_each_childs_own(client: AsyncClient) -> None:
    """A child of a sandbox with a way out has its own way out, and a listener of the same port."""
    async with await client.create("debian", network="allow", allow_hosts=("example.org",), memory_mib=96) as parent:
        children = made(await parent.fork(2))
        for child in children:
            server = await child.start(["python3", "-m", "http.server", "8000"], cwd="/tmp")
            assert (await server.info()).running
            got = await child.exec("python3 -c 'import os; print(os.environ[\"http_proxy\"])'")
            assert "3128" in got.check().text


async def test_a_client_that_gives_up_leaves_no_child(client: AsyncClient, node: NodeProcess) -> None:
    """At whatever moment the fork is cancelled."""
    async with await client.create("debian", memory_mib=64) as parent:
        for delay_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04):
            task = asyncio.create_task(parent.fork(4))
            await asyncio.sleep(delay_s)
            task.cancel()
            try:
                await asyncio.gather(*(child.kill() for child in made(await task)))  # it was done before
            except asyncio.CancelledError:
                assert task.cancelled()
            assert node.sandboxes() == [parent.id]
        assert await text(parent, "echo goes on") == "goes on\n"


KILLS = [
    ("fs", (0.004, 0.03)),
    pytest.param("memory", (0.05, 0.15), marks=pytest.mark.requires("criu")),
]


@pytest.mark.parametrize(("kind", "delays_s"), KILLS)
async def test_a_node_that_is_killed_in_a_fork_leaves_nothing(
    make_node: Callable[[], NodeProcess], kind: Literal["fs", "memory"], delays_s: tuple[float, ...]
) -> None:
    """SIGKILL at any moment: afterwards each child is whole and the client's, or is not there; and no cut is left."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        parent = await client.create("debian", memory_mib=64)
        await text(parent, "echo kept > /root/kept")
        program = await parent.start("while :; do date +%N > /tmp/now; sleep 0.05; done")
        for delay_s in delays_s:
            task = asyncio.create_task(parent.fork(4, kind=kind))
            await asyncio.sleep(delay_s)
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)
            try:
                children = await task
            except BarchanError:
                children = []
            for child in children:
                if isinstance(child, AsyncSandbox):
                    assert await text(child, "cat /root/kept") == "kept\n"
                    await child.kill()
            assert await text(parent, "cat /root/kept") == "kept\n"
            assert (await program.info()).running
            assert await text(parent, "cat /tmp/now; sleep 0.2") != await text(parent, "cat /tmp/now")
        assert await asyncio.to_thread(node.wait_empty, 1.0) == [parent.id]
        await parent.kill()
        assert await nothing_remains(node) == []
    assert node.end() == []


# with memory

# Draws from generators that were open, or had been used, before the fork: a line for each time it is asked.
DRAWS = r"""
import os, random, secrets, sys, time, uuid
opened = open("/dev/urandom", "rb", buffering=0)
buffered = open("/dev/urandom", "rb")
def draw():
    return [os.urandom(16).hex(), opened.read(16).hex(), secrets.token_hex(16), uuid.uuid4().hex,
            os.getrandom(16).hex(), random.SystemRandom().getrandbits(128)]
draw()
value = ["kept"] * 3
while True:
    line = sys.stdin.readline()
    if not line:
        break
    print(value, time.time(), *draw(), random.random(), flush=True)
"""


async def start_program(sandbox: AsyncSandbox, program: str) -> barchan.AsyncProcess:
    return await sandbox.start(["python3", "-c", program], process_id="program", stdin_open=True)


async def asked(process: barchan.AsyncProcess, offset: int = 0) -> str:
    """The next line of a program that answers each line."""
    await process.write_stdin("\n")
    found = b""
    async for stream, _, data in process.output(offset, quiet_timeout_s=WAIT_S):
        if stream == "stdout":
            found += data
        if b"\n" in found:
            break
    return found.decode()


@pytest.mark.requires("criu")
async def test_children_go_on_with_the_parents_memory_and_never_share_a_random_byte(client: AsyncClient) -> None:
    """A program answers in each child as it would have in the parent: its variables, its open files, the right time."""
    async with await client.create("debian", memory_mib=128) as parent:
        await text(parent, "echo same > /tmp/state")
        program = await start_program(parent, DRAWS)
        first = await asked(program)
        children = made(await parent.fork(3, kind="memory"))
        lines = [await asked(program, len(first))]
        for child in children:
            lines.append(await asked(child.process("program"), len(first)))
            seen = time.time()
            assert abs(float(lines[-1].split("] ")[1].split()[0]) - seen) < 5
            assert await text(child, "hostname; cat /tmp/state") == f"sandbox-{child.id[-6:]}\nsame\n"
        assert all(line.startswith("['kept', 'kept', 'kept'] ") for line in lines)
        drawn = [word for line in (first, *lines) for word in line.split()[4:-1]]
        assert len(set(drawn)) == len(drawn) == 5 * 6
        # What a language's own generator knows is memory like all other: docs/state.md says so.
        assert len({line.split()[-1] for line in lines}) == 1
        (grandchild,) = made(await children[0].fork(kind="memory"))
        await children[0].kill()
        assert (await asked(grandchild.process("program"), len(first) + len(lines[1]))).startswith("['kept'")


HOLDS_A_QUEUE = r"""
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
queue = libc.mq_open(b"/queue", os.O_CREAT | os.O_RDWR, 0o600, None)
assert queue >= 0, ctypes.get_errno()
open("/tmp/ready", "w").close()
time.sleep(1000)
"""


@pytest.mark.requires("criu")
async def test_what_can_not_be_copied_is_refused_before_any_child(client: AsyncClient, node: NodeProcess) -> None:
    """The sandbox goes on; and what its processes were made with can't change."""
    async with await client.create("debian", memory_mib=128) as parent:
        await start_program(parent, HOLDS_A_QUEUE)
        await parent.exec("until test -e /tmp/ready; do sleep 0.05; done")
        with pytest.raises(barchan.NotSnapshotable):
            await parent.fork(2, kind="memory")
        with pytest.raises(barchan.InvalidSpec):
            await parent.fork(kind="memory", network="open")
        assert node.sandboxes() == [parent.id]
        assert (await parent.process("program").info()).running


@pytest.mark.requires("criu")
async def test_what_runs_goes_on_in_the_parent_and_in_each_child(client: AsyncClient) -> None:
    """An exec that somebody waits for, forks and snapshots of all kinds at once, and one of a sandbox on disk."""
    async with await client.create("debian", memory_mib=96) as parent:
        loop = "for i in 1 2 3 4 5; do echo $i; sleep 0.2; done; exit 3"
        waited = asyncio.create_task(parent.exec(loop, process_id="loop"))
        made(await parent.fork(kind="memory"))  # while it is being started
        while not await parent.processes():
            await asyncio.sleep(0.01)
        children = made(await parent.fork(2, kind="memory"))
        for process in (parent.process("loop"), *(child.process("loop") for child in children)):
            assert (await process.wait(WAIT_S)).exit_code == 3
            said = [data async for _, _, data in process.output()]
            assert b"".join(said).split() == [b"1", b"2", b"3", b"4", b"5"]
        assert (await waited).exit_code == 3
        files, memory, *snapshots = await asyncio.gather(
            parent.fork(2), parent.fork(2, kind="memory"), parent.snapshot(), parent.snapshot(kind="memory")
        )
        assert len({child.id for child in (*made(files), *made(memory))}) == 4
        for snapshot in snapshots:
            await snapshot.remove()
        await parent.hibernate()
        (child,) = made(await parent.fork(kind="memory"))
        assert (await child.process("loop").info()).exit_code == 3
