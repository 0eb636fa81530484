"""Snapshots as a tree: what came of what, what each holds, and that none needs its parent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import barchan
from barchan import AsyncClient, AsyncSandbox
from tests.integration.test_snapshots import copy_store, make_with, nothing_remains
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def store(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    copy_store(images, root)
    return root


@pytest.fixture(scope="module")
def node(make_node: Callable[[], NodeProcess], store: Path) -> Iterator[NodeProcess]:
    node = make_with(make_node, store)
    node.start()
    yield node
    assert node.end() == []


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client
        for snapshot in await client.snapshots():
            await snapshot.remove()


async def write(sandbox: AsyncSandbox, name: str, size: int = 4096) -> None:
    (await sandbox.exec(f"head -c {size} /dev/urandom > /tmp/{name}")).check()


async def names(sandbox: AsyncSandbox) -> list[str]:
    return (await sandbox.exec("cd /tmp; ls")).check().text.split()


async def test_snapshots_form_a_tree_and_none_needs_its_parent(client: AsyncClient) -> None:
    """A snapshot of a sandbox of another one comes of it; where one is removed, its children come of its parent."""
    made: list[barchan.AsyncSnapshot] = []
    template: str | barchan.AsyncSnapshot = "debian"
    for depth in range(4):
        async with await client.create(template, memory_mib=64) as sandbox:
            await write(sandbox, f"f{depth}")
            template = await sandbox.snapshot(metadata={"depth": str(depth), "kind": "chain"})
        made.append(template)
    assert [snapshot.parent for snapshot in made] == ["", *(snapshot.id for snapshot in made[:-1])]
    async with await client.create(made[1].name, memory_mib=64) as sandbox:  # by the name of its image
        (child,) = await sandbox.fork()
        assert isinstance(child, AsyncSandbox)
        branch = await child.snapshot("a/branch:1")
        assert branch.parent == made[1].id
    assert [found.id for found in await client.snapshots()] == [*(snapshot.id for snapshot in made), branch.id]
    assert [found.id for found in await client.snapshots(metadata={"depth": "2", "kind": "chain"})] == [made[2].id]
    for parent in made[:3]:
        await parent.remove()
        with pytest.raises(barchan.NotFound):
            await client.snapshot(parent.id)
        with pytest.raises(barchan.NotFound):
            await parent.remove()
    assert [(found.id, found.parent) for found in await client.snapshots()] == [(made[3].id, ""), (branch.id, "")]
    async with await client.create(made[3], memory_mib=64) as last:
        assert await names(last) == ["f0", "f1", "f2", "f3"]
    async with await client.create(branch, memory_mib=64) as last:
        assert await names(last) == ["f0", "f1"]


async def test_sizes_say_what_goes_with_a_snapshot(client: AsyncClient) -> None:
    """What was written is its own; what lies below is shared, and becomes its own when the other one is gone."""
    base = (await client.image("debian")).size_bytes
    async with await client.create("debian", memory_mib=64) as sandbox:
        await write(sandbox, "big", 4 << 20)
        first = await sandbox.snapshot()
    async with await client.create(first, memory_mib=64) as sandbox:
        await write(sandbox, "small", 1 << 20)
        second = await sandbox.snapshot(metadata={"of": "sizes"})
    told = (await client.snapshot(first.id)).info
    assert (told.own_bytes, told.shared_bytes) == (0, told.image.size_bytes)
    assert told.image.size_bytes >= base + (4 << 20)
    assert (1 << 20) <= second.info.own_bytes < (2 << 20)
    assert second.info.own_bytes + second.info.shared_bytes == second.size_bytes
    assert (await client.snapshot(second.id)).info.own_bytes == second.info.own_bytes
    await first.remove()
    assert (await client.snapshot(second.id)).info.own_bytes >= (5 << 20)


async def test_a_name_that_is_given_again_ends_the_older_snapshot(client: AsyncClient) -> None:
    """As does the removal of its image; nobody sees a snapshot whose files are gone or others."""
    async with await client.create("debian", memory_mib=64) as sandbox:
        older = await sandbox.snapshot("same")
        await write(sandbox, "later")
        newer = await sandbox.snapshot("same")
    assert [found.id for found in await client.snapshots()] == [newer.id]
    with pytest.raises(barchan.NotFound):
        await client.create(older)
    await client.remove_image("same")
    assert await client.snapshots() == []
    with pytest.raises(barchan.NotFound):
        await client.create(newer)


async def test_a_wrong_wish_is_refused(client: AsyncClient) -> None:
    """Ids that are none, and metadata beyond its bounds."""
    for wrong in ("snap_0123456789abcdef", "nothing"):
        with pytest.raises(barchan.NotFound):
            await client.snapshot(wrong)
    with pytest.raises(barchan.NotFound, match="no snapshot"):
        await client.create("snap_0123456789abcdef")
    async with await client.create("debian", memory_mib=64) as sandbox:
        for metadata in ({"a=b": "c"}, {"long": "x" * 5000}, {str(n): "" for n in range(65)}):
            with pytest.raises(barchan.InvalidSpec):
                await sandbox.snapshot(metadata=metadata)
    assert await client.snapshots() == []


async def test_snapshots_survive_their_node_and_half_made_ones_do_not(
    make_node: Callable[[], NodeProcess], store: Path
) -> None:
    """SIGKILL while snapshots are made: afterwards each is whole or gone, with its image; older ones are there."""
    node = make_with(make_node, store)
    node.start()
    before = {path.name for folder in ("templates", "layers", "doubtful") for path in (store / folder).iterdir()}
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        sandbox = await client.create("debian", memory_mib=64)
        await write(sandbox, "kept")
        kept = await sandbox.snapshot(metadata={"kept": "yes"})
        for delay_s in (0.002, 0.006, 0.012, 0.02, 0.03):
            task = asyncio.create_task(sandbox.snapshot())
            await asyncio.sleep(delay_s)
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)
            try:
                await task
            except barchan.BarchanError:
                pass
        whole = await client.snapshots()
        assert whole[0].id == kept.id and whole[0].metadata == {"kept": "yes"}
        images = {image.name for image in await client.images()}
        assert images - {"debian"} == {snapshot.name for snapshot in whole}
        async with await client.create(kept, memory_mib=64) as again:
            assert await names(again) == ["kept"]
        for snapshot in whole:
            await snapshot.remove()
        await sandbox.kill()
        assert await nothing_remains(node, before) == []
    assert node.end() == []


COUNTER = r"""
import sys
count = 0
for line in sys.stdin:
    count += 1
    print(count, open("/tmp/own").read().strip(), flush=True)
"""


async def counted(sandbox: AsyncSandbox, before: str) -> str:
    """What the program says to one more line, after all it has said before."""
    process = sandbox.process("counter")
    await process.write_stdin("\n")
    said = b""
    async for _, _, data in process.output(len(before), quiet_timeout_s=30):
        said += data
        if said.endswith(b"\n"):
            break
    return said.decode()


@pytest.mark.requires("criu")
async def test_a_snapshot_with_memory_is_started_from_any_number_of_times(
    client: AsyncClient, node: NodeProcess
) -> None:
    """Its processes go on from that moment in each; by the name of its image, only the files are there."""
    async with await client.create("debian", memory_mib=96, labels={"job": "one"}) as sandbox:
        await sandbox.exec("echo first > /tmp/own")
        await sandbox.start(["python3", "-c", COUNTER], process_id="counter", stdin_open=True)
        said = await counted(sandbox, "")
        snapshot = await sandbox.snapshot(kind="memory", metadata={"step": "1"})
        assert await counted(sandbox, said) == "2 first\n"
        second = await sandbox.snapshot(kind="memory")
        assert second.info.memory_bytes < snapshot.info.memory_bytes / 2  # the rest it has in common with the first
    assert said == "1 first\n"
    assert snapshot.kind == "memory" and 0 < snapshot.info.memory_bytes < snapshot.info.resident_bytes
    assert snapshot.info.own_bytes > snapshot.info.memory_bytes
    again = [item async for item in client.create_many(snapshot, n=3)]
    for number, one in enumerate(again):
        assert isinstance(one, AsyncSandbox)
        await one.exec(f"echo {number} > /tmp/own")
        assert await counted(one, said) == f"2 {number}\n"
        assert (await one.info()).spec.memory_mib == 96
    (first, *_) = again
    assert isinstance(first, AsyncSandbox)
    child = await first.snapshot(kind="memory")
    assert child.parent == snapshot.id
    await snapshot.remove()
    async with await client.create(child) as one:
        assert await counted(one, said + "2 0\n") == "3 0\n"
    async with await client.create(child.name) as files:
        assert (await files.exec("cat /tmp/own")).text == "0\n"
        assert not any(process.running for process in await files.processes())
    with pytest.raises(barchan.InvalidSpec):
        await client.create(child, network="open")
    for one in again:
        assert isinstance(one, AsyncSandbox)
        await one.kill()
    await child.remove()
    async with await client.create(second) as one:
        assert await counted(one, said + "2 first\n") == "3 first\n"
    await second.remove()
    assert list((node.state_dir / "snapshots").iterdir()) == []
    assert list((node.state_dir / "memory").iterdir()) == []
