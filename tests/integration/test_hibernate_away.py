"""Hibernated sandboxes from node to node, through a blob store: taken by exactly one, and whole."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

import barchan
from barchan.image.blobs import BlobStore
from barchan.node import away
from barchan.node.admission import default_limits
from barchan.node.sandboxes import Sandboxes
from barchan.snapshot import generations
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "criu", "fuse"), pytest.mark.timeout(180)]
COUNTER = """
import sys
count = 41
for line in sys.stdin:
    count += 1
    print(count, flush=True)
"""
Clients = tuple[barchan.AsyncClient, barchan.AsyncClient, barchan.AsyncClient]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def nodes(make_node: Callable[[], NodeProcess], store: Path) -> list[NodeProcess]:
    """Three with one store."""
    made = [make_node() for _ in range(3)]
    for node in made:
        node.start("--store", str(store))
    return made


@pytest.fixture
async def clients(nodes: list[NodeProcess]) -> AsyncIterator[Clients]:
    """Of the three nodes."""
    async with AsyncExitStack() as stack:
        urls = [f"unix://{node.socket}" for node in nodes]
        first, second, third = [await stack.enter_async_context(barchan.connect_async(url)) for url in urls]
        yield first, second, third


async def next_count(process: barchan.AsyncProcess, at: int) -> tuple[str, int]:
    await process.write_stdin("\n")
    async for _, offset, data in process.output(at):
        return data.decode().strip(), offset + len(data)
    raise AssertionError("it said nothing")


async def test_another_node_takes_it_and_goes_on(clients: Clients) -> None:
    """With its processes, files and offsets; the one it came from has it no more; its end is known to the store."""
    home, other, late = clients
    sandbox = await home.create("debian", memory_mib=128, labels={"kept": "yes"})
    await sandbox.files.write("/tmp/kept", b"kept")
    process = await sandbox.start(["python3", "-u", "-c", COUNTER])
    assert (await next_count(process, 0))[0] == "42"
    assert (await sandbox.exec("echo once >> /tmp/asked", process_id="asked")).ok
    with pytest.raises(barchan.Conflict, match="not hibernated"):
        await sandbox.push()
    await sandbox.hibernate()
    await sandbox.push()
    assert (await sandbox.info()).phase == "hibernated"
    with pytest.raises(barchan.NotFound, match=r"try: client\.adopt\(id\)"):
        await other.attach(sandbox.id)
    taken = await other.adopt(sandbox.id)
    assert taken.id == sandbox.id
    assert (await taken.info()).phase == "hibernated"
    node = await other.node_info()
    assert (node.sandboxes_running, node.sandboxes_paused, node.sandboxes_hibernated) == (0, 0, 1)
    assert (await next_count(taken.process(process.id), 3))[0] == "43"
    await taken.pause()
    node = await other.node_info()
    assert (node.sandboxes_running, node.sandboxes_paused, node.sandboxes_hibernated) == (1, 1, 0)
    await taken.resume()
    assert await taken.files.read("/tmp/kept") == b"kept"
    assert (await taken.exec("echo once >> /tmp/asked", process_id="asked")).ok, "the same command, by the same shell"
    assert await taken.files.read("/tmp/asked") == b"once\n"
    assert [info.sandbox_id for info in await other.list(labels={"kept": "yes"})] == [sandbox.id]
    with pytest.raises(barchan.SandboxExpired, match="is with node"):
        await sandbox.exec("true")
    with pytest.raises(barchan.Conflict):
        await late.adopt(sandbox.id)
    await taken.hibernate()
    await taken.push()
    back = await home.adopt(sandbox.id)
    assert (await next_count(back.process(process.id), 6))[0] == "44"
    assert await back.kill()
    with pytest.raises(barchan.Conflict, match="ended"):
        await late.adopt(sandbox.id)
    with pytest.raises(barchan.NotFound):
        await late.adopt("sb_nobody")


async def test_of_two_that_want_it_one_gets_it(clients: Clients) -> None:
    """The other one is told, and has nothing."""
    home, *others = clients
    sandbox = await home.create("debian", memory_mib=64)
    await sandbox.hibernate()
    await sandbox.push()
    results = await asyncio.gather(*(client.adopt(sandbox.id) for client in others), return_exceptions=True)
    assert [type(result).__name__ for result in results if isinstance(result, Exception)] == ["Conflict"]
    (taken,) = [result for result in results if isinstance(result, barchan.AsyncSandbox)]
    assert (await taken.exec("echo on")).text == "on\n"
    assert await taken.kill()


async def test_its_own_node_may_wake_it(clients: Clients) -> None:
    """What was sent is not taken by others then."""
    home, other, _ = clients
    sandbox = await home.create("debian", memory_mib=64)
    await sandbox.hibernate()
    await sandbox.push()
    assert (await sandbox.exec("echo on")).text == "on\n"
    with pytest.raises(barchan.Conflict):
        await other.adopt(sandbox.id)


def on_shelf(node: NodeProcess) -> set[str]:
    """What hibernated sandboxes have in a node's state directory."""
    return {path.name for path in (node.state_dir / "snapshots").iterdir() if path.name.startswith("hib_")}


async def images_of(client: barchan.AsyncClient, sandbox_id: str) -> set[str]:
    """Images of a node that hold what a sandbox wrote before it was hibernated; nodes here share one store."""
    own = f"asleep-{(await client.node_info()).node_id[5:]}-{sandbox_id}-"
    return {image.name for image in await client.images() if image.name.startswith(own)}


async def sent(client: barchan.AsyncClient, text: str) -> barchan.AsyncSandbox:
    """A sandbox with a file, hibernated and in the store."""
    sandbox = await client.create("debian", memory_mib=64)
    await sandbox.files.write("/tmp/work", text.encode())
    await sandbox.hibernate()
    await sandbox.push()
    return sandbox


async def test_what_its_own_node_has_is_old_once_another_stored_newer(clients: Clients, store: Path) -> None:
    """Work that another node has stored is never replaced by what lies where it came from."""
    home, other, _ = clients
    for way in ("wake", "adopt"):
        sandbox = await sent(home, "old")
        taken = await other.adopt(sandbox.id)
        await taken.files.write("/tmp/work", b"new")
        await taken.hibernate()
        await taken.push()
        newest = await generations.current(BlobStore.open(str(store)), sandbox.id)
        assert newest is not None
        if way == "wake":
            with pytest.raises(barchan.SandboxExpired, match="is with node"):
                await sandbox.files.read("/tmp/work")
            assert await generations.current(BlobStore.open(str(store)), sandbox.id) == newest
        back = await home.adopt(sandbox.id)
        assert await back.files.read("/tmp/work") == b"new"
        assert await back.kill()


async def test_who_pulled_something_old_does_not_get_it(clients: Clients, store: Path) -> None:
    """A claim names what this node would resume; what was stored since is not taken for it."""
    home, other, _ = clients
    sandbox = await sent(home, "old")
    blobs = BlobStore.open(str(store))
    seen = await generations.current(blobs, sandbox.id)
    assert seen is not None
    taken = await other.adopt(sandbox.id)
    await taken.hibernate()
    await taken.push()
    newest = await generations.current(blobs, sandbox.id)
    with pytest.raises(barchan.Conflict, match="faster"):
        await generations.claim(blobs, sandbox.id, "node-late", seen=seen)
    assert await generations.current(blobs, sandbox.id) == newest
    assert await taken.kill()


async def test_a_node_killed_once_it_has_claimed_takes_it_again(
    clients: Clients, nodes: list[NodeProcess], store: Path
) -> None:
    """Between the claim and its journal; no other node gets it meanwhile. One that has ended there stays so."""
    home, other, late = clients
    sandbox = await sent(home, "kept")
    node_id = (await other.node_info()).node_id
    blobs = BlobStore.open(str(store))
    await generations.claim(blobs, sandbox.id, node_id)  # all that such a node leaves
    with pytest.raises(barchan.SandboxExpired, match="is with node"):
        await sandbox.exec("true")
    with pytest.raises(barchan.Conflict, match="has it awake"):
        await late.adopt(sandbox.id)
    taken = await other.adopt(sandbox.id)
    assert await taken.files.read("/tmp/work") == b"kept"
    claimed = await generations.current(blobs, sandbox.id)
    assert claimed is not None
    assert await taken.kill()
    (ended,) = (store / "hibernated" / sandbox.id).iterdir()
    assert json.loads(ended.read_bytes())["state"] == "ended"
    older = msgspec.json.encode(claimed)  # as if the store had not been told
    ended.unlink()
    (store / "hibernated" / sandbox.id / f"{claimed.generation:012d}.json").write_bytes(older)
    with pytest.raises(barchan.SandboxExpired):
        await other.adopt(sandbox.id)


async def test_a_node_that_cannot_note_it_gives_it_back(
    clients: Clients, store: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: its own node may wake it again, and nothing of it stays where it did not fit."""

    def full(*_: object) -> None:
        raise barchan.CapacityError("the disk is full", retry_after_ms=1)

    sandbox = await sent(clients[0], "kept")
    (tmp_path / "images").symlink_to(images)
    sandboxes = Sandboxes(tmp_path, default_limits(), "0", store_url=str(store))
    await sandboxes.start()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(sandboxes.journal, "take", full)
            with pytest.raises(barchan.CapacityError):
                await away.adopt(sandboxes, sandbox.id, None)
        assert sandboxes.shelf.entries() == []
    finally:
        await sandboxes.shutdown()
        await sandboxes.close()
    assert await sandbox.files.read("/tmp/work") == b"kept"


async def test_asked_for_twice_at_once_it_comes_once(clients: Clients, nodes: list[NodeProcess]) -> None:
    """And leaves nothing when it has ended."""
    home, other, _ = clients
    before = on_shelf(nodes[1])
    sandbox = await sent(home, "once")
    taken, again = await asyncio.gather(other.adopt(sandbox.id), other.adopt(sandbox.id))
    assert taken.id == again.id
    assert len(on_shelf(nodes[1]) - before) == 1
    assert await taken.files.read("/tmp/work") == b"once"
    assert await taken.kill()
    assert on_shelf(nodes[1]) == before
    assert not await images_of(other, sandbox.id)


async def test_what_was_woken_since_is_not_given_back(clients: Clients, nodes: list[NodeProcess], store: Path) -> None:
    """A wake that fails leaves the store as it was: only what was claimed for it is there for others again."""
    home = clients[0]
    blobs = BlobStore.open(str(store))
    for is_newer in (False, True):
        before = on_shelf(nodes[0])
        sandbox = await sent(home, "old")
        if is_newer:
            await sandbox.files.write("/tmp/work", b"new")
            await sandbox.hibernate()
        (link,) = on_shelf(nodes[0]) - before
        path = nodes[0].state_dir / "snapshots" / link
        target = path.readlink()
        path.unlink()
        with pytest.raises(barchan.BarchanError):
            await sandbox.exec("true")
        found = await generations.current(blobs, sandbox.id)
        assert found is not None
        assert (found.state, found.node_id) == ("claimed" if is_newer else "stored", (await home.node_info()).node_id)
        path.symlink_to(target)
        assert await sandbox.files.read("/tmp/work") == (b"new" if is_newer else b"old")
        assert await sandbox.kill()


async def test_a_node_without_its_store_keeps_what_it_sent(make_node: Callable[[], NodeProcess], store: Path) -> None:
    """It can't know whether another node has it: it says so, and waits for the store."""
    node = make_node()
    sandbox_id = ""
    for turn, options in enumerate([("--store", str(store)), (), ("--store", str(store))]):
        node.start(*options)
        async with barchan.connect_async(f"unix://{node.socket}") as client:
            if turn == 0:
                await client.create("debian", memory_mib=64, detach=True, ttl_s=600)  # so that something holds them up
                sandbox = await client.create("debian", memory_mib=64, detach=True, ttl_s=600)
                await sandbox.hibernate()
                await sandbox.push()
                sandbox_id = sandbox.id
            sandbox = await client.attach(sandbox_id)
            if turn == 1:
                with pytest.raises(barchan.BarchanError, match="no blob store"):
                    await sandbox.exec("true")
            elif turn == 2:
                assert (await sandbox.exec("echo on")).text == "on\n"
                assert await sandbox.kill()
        if turn < 2:
            node.kill()
