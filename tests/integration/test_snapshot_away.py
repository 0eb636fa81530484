"""Snapshots from node to node, through a blob store: whole, under one id, on as many nodes as ask."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import msgspec
import pytest

import barchan
from barchan import AsyncClient, AsyncSandbox
from barchan.snapshot.catalog import StoredSnapshot
from barchan.snapshot.memory_file import RECORD, MemoryFile
from barchan.snapshot.pack import pack
from tests.integration.test_snapshot_tree import COUNTER, counted
from tests.integration.test_snapshots import copy_store, make_with
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "fuse"), pytest.mark.timeout(120)]
Clients = tuple[AsyncClient, AsyncClient]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def nodes(
    make_node: Callable[[], NodeProcess], images: Path, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Two with one blob store, and images of their own."""
    made = []
    for name in ("home", "away"):
        copy_store(images, root := tmp_path_factory.mktemp(name))
        made.append(make_with(make_node, root))
        made[-1].start("--store", store.as_uri())
    yield made[0], made[1]
    assert [line for node in made for line in node.end()] == []


@pytest.fixture
async def clients(nodes: tuple[NodeProcess, NodeProcess]) -> AsyncIterator[Clients]:
    async with AsyncExitStack() as stack:
        urls = [f"unix://{node.socket}" for node in nodes]
        home, away = [await stack.enter_async_context(barchan.connect_async(url)) for url in urls]
        yield home, away
        for client in (home, away):
            for snapshot in await client.snapshots():
                await snapshot.remove()


async def test_files_go_to_another_node(clients: Clients) -> None:
    """With id, name and metadata; its children there come of it; a second push sends nothing."""
    home, away = clients
    async with await home.create("debian", memory_mib=64) as sandbox:
        await sandbox.files.write("/tmp/kept", b"kept")
        made = await sandbox.snapshot("job/one:1", metadata={"step": "1"})
    assert (await made.push()).bytes_sent > 0
    assert (await made.push()).bytes_sent == 0
    with pytest.raises(barchan.NotFound):
        await away.create(made)
    pulled, same = await asyncio.gather(away.pull_snapshot(made.id), away.pull_snapshot(made.id))
    assert pulled.info == same.info
    assert (pulled.id, pulled.name, pulled.digest, pulled.metadata) == (made.id, made.name, made.digest, {"step": "1"})
    assert [found.id for found in await away.snapshots(metadata={"step": "1"})] == [made.id]
    await made.remove()
    async with await away.create(pulled, memory_mib=64) as sandbox:
        assert await sandbox.files.read("/tmp/kept") == b"kept"
        child = await sandbox.snapshot()
    assert child.parent == made.id
    await pulled.remove()
    assert (await home.pull_snapshot(made.id, name="elsewhere")).name == "elsewhere"


async def test_what_can_not_be_had_is_refused(clients: Clients, node: NodeProcess) -> None:
    """Ids that nobody sent, names that are another image's, a node without a store: nothing is left of it."""
    home, away = clients
    async with await home.create("debian", memory_mib=64) as sandbox:
        await sandbox.files.write("/tmp/kept", b"kept")
        made = await sandbox.snapshot()
    for wrong in (made.id, "snap_nothing"):
        with pytest.raises(barchan.NotFound):
            await away.pull_snapshot(wrong)
    await made.push()
    with pytest.raises(barchan.Conflict, match="another image"):
        await away.pull_snapshot(made.id, name="debian")
    with pytest.raises(barchan.InvalidSpec):
        await away.pull_snapshot(made.id, name="no name")
    assert await away.snapshots() == []
    assert [image.name for image in await away.images()] == ["debian"]
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        with pytest.raises(barchan.Conflict, match="no blob store"):
            await client.pull_snapshot(made.id)


@pytest.mark.requires("criu")
async def test_processes_go_on_at_another_node(
    clients: Clients, nodes: tuple[NodeProcess, NodeProcess], store: Path
) -> None:
    """In any number of sandboxes, also when the node was killed since, and of one that has pages in another."""
    home, away = clients
    async with await home.create("debian", memory_mib=96, labels={"job": "one"}) as sandbox:
        await sandbox.exec("echo first > /tmp/own")
        await sandbox.start(["python3", "-c", COUNTER], process_id="counter", stdin_open=True)
        said = await counted(sandbox, "")
        base = await sandbox.snapshot(kind="memory")
        assert await counted(sandbox, said) == "2 first\n"
        made = await sandbox.snapshot(kind="memory")
    assert made.info.memory_bytes < base.info.memory_bytes / 2
    await made.push()
    pulled = await away.pull_snapshot(made.id)
    assert (pulled.kind, pulled.info.resident_bytes) == ("memory", made.info.resident_bytes)
    await asyncio.to_thread(nodes[1].kill)
    nodes[1].start("--store", store.as_uri())  # in this thread, whose end is the node's
    again = [item async for item in away.create_many(await away.snapshot(made.id), n=2)]
    for one in again:
        assert isinstance(one, AsyncSandbox)
        assert await counted(one, said + "2 first\n") == "3 first\n"
        assert (await one.info()).spec.memory_mib == 96
        await one.kill()


@pytest.mark.requires("criu")
async def test_memory_of_another_kind_of_host_is_refused(clients: Clients, store: Path, tmp_path: Path) -> None:
    """When a sandbox is to be made of it; what differs is named, and its files still start."""
    home, away = clients
    async with await home.create("debian", memory_mib=64) as sandbox:
        await sandbox.files.write("/tmp/kept", b"kept")
        made = await sandbox.snapshot(kind="memory")
    await made.push()
    entry = store / "snapshots" / f"{made.id}.json"
    stored = msgspec.json.decode(entry.read_bytes(), type=StoredSnapshot)
    with MemoryFile.open(store / "memory" / f"{stored.memory}.mem") as file:
        file.unpack(tmp_path / "memory")
    record = tmp_path / "memory" / RECORD
    told = json.loads(record.read_bytes())
    told |= {"kernel": "5.4.0", "cpu_features": [*told["cpu_features"], "hyperdrive"]}
    record.write_text(json.dumps(told))
    packed = pack(tmp_path / "memory", tmp_path / "packed")
    (tmp_path / "packed").rename(store / "memory" / f"{packed.digest}.mem")
    entry.write_bytes(msgspec.json.encode(msgspec.structs.replace(stored, memory=packed.digest)))
    pulled = await away.pull_snapshot(made.id)
    with pytest.raises(barchan.SnapshotIncompatible, match=r"hyperdrive.*Linux 5\.4\.0"):
        await away.create(pulled)
    async with await away.create(pulled.name, memory_mib=64) as files:
        assert await files.files.read("/tmp/kept") == b"kept"
    with pytest.raises(barchan.Conflict, match="another snapshot"):
        await made.push()


@pytest.mark.requires("criu")
async def test_damage_in_the_store_is_found_and_nothing_made_of_it(
    clients: Clients, nodes: tuple[NodeProcess, NodeProcess], store: Path
) -> None:
    """A flipped bit of the memory, and a description that is cut."""
    home, away = clients
    async with await home.create("debian", memory_mib=64) as sandbox:
        made = await sandbox.snapshot(kind="memory")
    await made.push()
    entry = store / "snapshots" / f"{made.id}.json"
    stored = msgspec.json.decode(entry.read_bytes(), type=StoredSnapshot)
    memory = store / "memory" / f"{stored.memory}.mem"
    whole, told = memory.read_bytes(), entry.read_bytes()
    memory.write_bytes(whole[:-5000] + bytes([whole[-5000] ^ 1]) + whole[-4999:])
    with pytest.raises(barchan.SnapshotCorrupt):
        await away.pull_snapshot(made.id)
    entry.write_bytes(told[:-9])
    with pytest.raises(barchan.BlobCorrupt):
        await away.pull_snapshot(made.id)
    assert await away.snapshots() == []
    assert [image.name for image in await away.images()] == ["debian"]
    assert list((nodes[1].state_dir / "snapshots").iterdir()) == []
    memory.write_bytes(whole)
    entry.write_bytes(told)
    async with await away.create(await away.pull_snapshot(made.id)) as sandbox:
        assert (await sandbox.exec("echo on")).text == "on\n"


@pytest.mark.requires("criu")
async def test_a_node_killed_while_it_has_one_sent_has_it_whole_or_not_at_all(
    clients: Clients, nodes: tuple[NodeProcess, NodeProcess], store: Path
) -> None:
    """SIGKILL at several points of a pull: no snapshot, image or memory of half of one, and the next pull succeeds."""
    home, away = clients
    async with await home.create("debian", memory_mib=64) as sandbox:
        await sandbox.files.write("/tmp/kept", b"kept")
        made = await sandbox.snapshot(kind="memory")
    await made.push()
    for delay_s in (0.001, 0.004, 0.01, 0.02):
        task = asyncio.create_task(away.pull_snapshot(made.id))
        await asyncio.sleep(delay_s)
        nodes[1].kill()
        nodes[1].start("--store", store.as_uri())
        with suppress(barchan.BarchanError):
            await task
        for snapshot in await away.snapshots():
            assert snapshot.id == made.id
            await snapshot.remove()
        assert [image.name for image in await away.images()] == ["debian"]
        assert list((nodes[1].state_dir / "snapshots").iterdir()) == []
    async with await away.create(await away.pull_snapshot(made.id)) as sandbox:
        assert await sandbox.files.read("/tmp/kept") == b"kept"


def test_snapshots_go_from_the_command_line(nodes: tuple[NodeProcess, NodeProcess], store: Path) -> None:
    """Sent from one node, had at the other; a store that the node was not started with is refused."""

    def run(node: NodeProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("BARCHAN_")}
        return subprocess.run(
            [sys.executable, "-m", "barchan.cli", *arguments],
            env={**kept, "BARCHAN_STATE_DIR": str(node.state_dir)},
            capture_output=True,
            check=False,
            timeout=60,
            text=True,
        )

    home, away = nodes
    sandbox = run(home, "run", "debian", "--keep", "--ttl-s", "100", "--", "true").stdout.split()[0]
    made = run(home, "snapshot", "make", sandbox).stdout.strip()
    refused = run(home, "snapshot", "push", made, "--store", str(store.parent / "other"))
    assert (refused.returncode, "not with" in refused.stderr) == (1, True), refused.stderr
    pushed = run(home, "snapshot", "push", made, "--store", str(store))
    assert (pushed.stderr, pushed.stdout.split()[:1]) == ("", [made])
    pulled = run(away, "snapshot", "pull", made, "--name", "from/home")
    assert pulled.stdout.split() == [made, "fs", "from/home"], pulled.stderr
    assert run(away, "snapshot", "pull", made, made, "--name", "two").returncode != 0
    for node in nodes:
        assert run(node, "snapshot", "rm", made).returncode == 0
    assert run(home, "kill", sandbox).returncode == 0
