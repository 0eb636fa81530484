"""What goes wrong while sandboxes sleep and wake is nobody's loss, and is never taken for their own doing."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager

import pytest

import barchan
from barchan.errors import BackendError
from barchan.rollout.artifact import take
from barchan.rollout.graders.base import Artifact
from barchan.rollout.task import FilesArtifact, ScriptGrader, Task
from barchan.rollout.tools import Workspace
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "criu"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def node(make_node: Callable[[], NodeProcess]) -> Iterator[NodeProcess]:
    """One of this module's own, for its journal and its shelf are broken here."""
    node = make_node()
    node.start()
    yield node
    assert node.wait_empty(15) == []


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


async def _unended(node: NodeProcess) -> int:
    with closing(sqlite3.connect(node.state_dir / "journal.sqlite")) as database:
        (count,) = database.execute("SELECT count(*) FROM sandbox WHERE ended_unix_s IS NULL").fetchone()
    return int(count)
