"""What goes wrong while sandboxes sleep and wake is nobody's loss, and is never taken for their own doing."""

import asyncio
import errno
import os
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import barchan
from barchan.backends.container import memory
from barchan.backends.container.cgroup import kill
from barchan.errors import BackendError, CapacityError, SandboxLost
from barchan.model.sandbox import SandboxSpec, StartRequest
from barchan.node import hibernate
from barchan.node.admission import default_limits
from barchan.node.late_memory import Unpacked, unpacked
from barchan.node.sandboxes import Sandboxes
from barchan.rollout.artifact import take
from barchan.rollout.graders.base import Artifact
from barchan.rollout.task import FilesArtifact, ScriptGrader, Task
from barchan.rollout.tools import Workspace
from barchan.snapshot.memory_file import MemoryFile
from tests.integration.memory_lab import Lab
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "criu"), pytest.mark.timeout(120)]
SPEC = SandboxSpec(template="debian", memory_mib=64, detach=True, ttl_s=600)


@pytest.fixture(scope="module")
def node(make_node: Callable[[], NodeProcess]) -> Iterator[NodeProcess]:
    """One of this module's own, for its journal and its shelf are broken here."""
    node = make_node()
    node.start()
    yield node
    assert node.wait_empty(15) == []


@pytest.fixture
async def lab(images: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"), images)
    await lab.open()
    yield lab
    assert await lab.close() == []


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[barchan.AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


@contextmanager
def refused(node: NodeProcess, change: str) -> Iterator[None]:
    """Inside, the node's database refuses a change, `INSERT ON TABLE` say, as it would on a full disk."""
    with closing(sqlite3.connect(node.state_dir / "journal.sqlite", isolation_level=None)) as database:
        database.execute(f"CREATE TRIGGER full BEFORE {change} BEGIN SELECT RAISE(FAIL, 'no room'); END")
        try:
            yield
        finally:
            database.execute("DROP TRIGGER full")


async def test_what_cannot_be_noted_does_not_happen(node: NodeProcess, client: barchan.AsyncClient) -> None:
    """A pause that the journal does not take leaves the sandbox awake; later it goes to disk, and outlives the node."""
    sandbox = await client.create("debian", memory_mib=64)
    with refused(node, "INSERT ON sandbox_rest"):
        with pytest.raises(BackendError, match="journal"):
            await sandbox.pause()
        assert (await sandbox.info()).phase == "ready"
        with pytest.raises(BackendError, match="journal"):
            await sandbox.hibernate()
        assert (await sandbox.exec("echo on")).text == "on\n"
    await sandbox.hibernate()
    node.kill()
    node.start()
    assert (await sandbox.exec("echo on")).text == "on\n"
    assert await sandbox.kill()


async def test_a_store_that_cannot_be_noted_leaves_nothing(node: NodeProcess, client: barchan.AsyncClient) -> None:
    """Neither file nor image: the sandbox stays paused, and is the same as before."""
    sandbox = await client.create("debian", memory_mib=64)
    await sandbox.pause()
    with refused(node, "INSERT ON sandbox_rest"):
        with pytest.raises(BackendError, match="journal"):
            await sandbox.hibernate()
        assert (await sandbox.info()).phase == "paused"
    assert not [path for path in (node.state_dir / "snapshots").iterdir() if path.name.startswith("hib_")]
    assert not list(node.state_dir.glob("hibernating-*"))
    assert not [image for image in await client.images() if sandbox.id in image.name]
    assert (await sandbox.exec("echo on")).text == "on\n"
    await sandbox.hibernate()
    assert await sandbox.kill()


async def test_a_sandbox_ends_though_that_cannot_be_noted(node: NodeProcess, client: barchan.AsyncClient) -> None:
    """By a kill and by its idle time-out; what has been said of it stays said, and the next node knows."""
    killed = await client.create("debian", memory_mib=64)
    idle = await client.create("debian", memory_mib=64, idle_timeout_s=1)
    with refused(node, "UPDATE ON sandbox"):
        assert await killed.kill()
        with pytest.raises(barchan.SandboxExpired, match="killed"):
            await killed.exec("true")
        async with asyncio.timeout(20):
            while (await idle.info()).end_cause is None:
                await asyncio.sleep(0.1)
    async with asyncio.timeout(20):
        while await _unended(node):
            await asyncio.sleep(0.1)


async def test_a_wake_that_fails_is_no_missing_file(node: NodeProcess, client: barchan.AsyncClient) -> None:
    """Its memory is not on the shelf, say: that is about the sandbox, and no artifact is taken to be missing for it."""
    sandbox = await client.create("debian", memory_mib=64)
    await sandbox.files.write("/tmp/kept", b"kept")
    await sandbox.hibernate()
    shelf = node.state_dir / "snapshots"
    (entry,) = [path for path in shelf.iterdir() if path.name.startswith("hib_")]
    entry.rename(shelf / "elsewhere")
    task = Task(
        task_id="t",
        instruction="",
        grader=ScriptGrader(command="true"),
        artifact=FilesArtifact(paths=("/tmp/kept",)),
    )
    with pytest.raises(BackendError, match="can't be woken") as raised:
        await sandbox.files.read("/tmp/kept")
    assert raised.value.details["sandbox_id"] == sandbox.id
    with pytest.raises(BackendError):
        await take(Workspace(sandbox, 1000), task, "image")
    (shelf / "elsewhere").rename(entry)
    taken = await take(Workspace(sandbox, 1000), task, "image")
    assert isinstance(taken, Artifact)
    assert await sandbox.kill()


@pytest.fixture
async def sandboxes(make_node: Callable[[], NodeProcess]) -> AsyncIterator[Sandboxes]:
    """A node without its server, in this process, so that something can be done at one moment of its work."""
    place = make_node()
    sandboxes = Sandboxes(place.state_dir, default_limits(), "test")
    await sandboxes.start()
    place.watch.supervisor_pid()
    yield sandboxes
    await sandboxes.shutdown()
    await sandboxes.close()


async def test_one_whose_init_dies_as_it_comes_back_stays_on_disk(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes count from when they are let go: until then what is on disk does, and the next request has it."""
    live = sandboxes.live[(await sandboxes.create(SPEC)).sandbox_id]
    program = await live.processes.start(StartRequest(shell="read x; exit 7", stdin_open=True))
    await sandboxes.tiers.to(live, "hibernated")

    @asynccontextmanager
    async def killed(*arguments: Any) -> AsyncIterator[Unpacked]:
        async with unpacked(*arguments) as found:
            yield found
        kill(live.handle._counters.guest)  # type: ignore[attr-defined]
        await asyncio.wait([live.handle.ended])

    monkeypatch.setattr(hibernate, "unpacked", killed)
    with pytest.raises(BackendError, match="on disk as it was"):
        await sandboxes.tiers.awake(live)
    assert (live.phase, live.rest.tier, sandboxes.tiers.stored) == ("hibernated", "hibernated", 1)
    monkeypatch.undo()
    async with sandboxes.tiers.busy(live):
        process = await live.handle.guest.find(program.process_id)
        await live.processes.write_stdin(process, 0, b"now\n", eof=True)
        assert os.WEXITSTATUS((await process.ended).wstatus) == 7
    assert (live.rest.tier, sandboxes.tiers.stored) == ("running", 0)


async def test_one_that_cannot_be_let_go_is_lost_and_leaves_nothing(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far it went, nobody knows: it is not begun again from what is on disk."""
    live = sandboxes.live[(await sandboxes.create(SPEC)).sandbox_id]
    await sandboxes.tiers.to(live, "hibernated")
    came_back = sandboxes.journal.came_back

    def then_killed(*arguments: Any) -> None:
        came_back(*arguments)
        kill(live.handle._counters.guest)  # type: ignore[attr-defined]

    monkeypatch.setattr(sandboxes.journal, "came_back", then_killed)
    with pytest.raises(SandboxLost):
        await sandboxes.tiers.awake(live)
    assert live.ending is not None
    await live.ending
    with pytest.raises(SandboxLost, match="init_died"):
        sandboxes.get(live.sandbox_id)
    while list((sandboxes.state_dir / "snapshots").glob("hib_*")):
        await asyncio.sleep(0.01)


async def test_a_wake_waits_for_the_pages_that_are_still_unpacked(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU has begun by then. Where they can't be unpacked that is the error, and the sandbox stays as it was."""
    live = sandboxes.live[(await sandboxes.create(SPEC)).sandbox_id]
    program = await live.processes.start(StartRequest(shell="x=kept; read y; [ $x$y = keptnow ]", stdin_open=True))
    await sandboxes.tiers.to(live, "hibernated")
    unpack_pages, has_failed = MemoryFile.unpack_pages, False

    def late(self: MemoryFile, target: Path, *, leave_lazy: bool = False) -> None:
        nonlocal has_failed
        time.sleep(0.5)
        if not has_failed:
            has_failed = True
            raise CapacityError("no room for pages", retry_after_ms=1)
        unpack_pages(self, target, leave_lazy=leave_lazy)

    monkeypatch.setattr(MemoryFile, "unpack_pages", late)
    with pytest.raises(CapacityError, match="no room for pages"):
        await sandboxes.tiers.awake(live)
    assert live.phase == "hibernated"
    async with sandboxes.tiers.busy(live):
        process = await live.handle.guest.find(program.process_id)
        await live.processes.write_stdin(process, 0, b"now\n", eof=True)
        assert os.WEXITSTATUS((await process.ended).wstatus) == 0
    assert live.rest.before.cpu_s > 0
    assert live.stats().cpu_s >= live.rest.before.cpu_s


async def _unended(node: NodeProcess) -> int:
    with closing(sqlite3.connect(node.state_dir / "journal.sqlite")) as database:
        (count,) = database.execute("SELECT count(*) FROM sandbox WHERE ended_unix_s IS NULL").fetchone()
    return int(count)


@pytest.mark.parametrize("is_asked_first", [True, False])
async def test_a_full_disk_is_not_said_to_be_the_guests(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked_first: bool
) -> None:
    """Neither before a dump begins nor in the middle of it, when CRIU finds no room; the sandbox goes on."""
    handle = await lab.create()
    program = await lab.program(handle)
    assert await program.ask(handle.guest, "1 + 1") == 2  # it has all of its memory
    if not is_asked_first:
        monkeypatch.setattr(memory, "FREE_BYTES_MIN", -(1 << 40))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path], check=True)
    try:
        with pytest.raises(barchan.CapacityError, match="no room"):
            await handle.dump(tmp_path / "memory", keep=True)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert await program.ask(handle.guest, "1 + 1") == 2


async def test_a_node_killed_in_the_middle_of_a_fork_takes_no_time_from_programs(
    node: NodeProcess, client: barchan.AsyncClient
) -> None:
    """As long as it stood still for that, without a node, no deadline of its programs' came nearer."""
    sandbox = await client.create("debian", memory_mib=512, detach=True, ttl_s=600)
    heap = await sandbox.start(
        ["python3", "-c", "x = bytearray(b'01234567' * (25 << 20)); print('on', flush=True); input()"]
    )
    async for _, _, said in heap.output():
        assert said == b"on\n"
        break
    running = asyncio.create_task(sandbox.exec("sleep 2; echo done", timeout_s=3))
    await asyncio.sleep(0.3)
    forking = asyncio.create_task(sandbox.fork(1, kind="memory"))
    while not list(node.state_dir.glob("criu-*")):
        await asyncio.sleep(0.002)
    node.kill()
    await asyncio.sleep(8)
    node.start()
    result = await running
    assert (result.exit_code, result.text) == (0, "done\n")
    (forked,) = await asyncio.gather(forking, return_exceptions=True)
    for child in forked if isinstance(forked, list) else []:
        if isinstance(child, barchan.AsyncSandbox):
            await child.kill()
    assert await sandbox.kill()


async def test_a_hibernation_that_fails_is_no_use_of_the_sandbox(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its idle time goes on: nobody has asked anything of it."""
    live = sandboxes.live[(await sandboxes.create(SPEC)).sandbox_id]

    async def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(live.handle, "pack_cut", full)
    before = live.last_used
    change = await sandboxes.tiers.change(live, "hibernated", is_asked=False)
    assert change.refused
    assert live.last_used == before
