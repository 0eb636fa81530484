"""Hibernated sandboxes from node to node, through a blob store: taken by exactly one, and whole."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

import barchan
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
def nodes(make_node: Callable[[], NodeProcess], tmp_path_factory: pytest.TempPathFactory) -> list[NodeProcess]:
    """Three with one store."""
    store = tmp_path_factory.mktemp("store")
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
    home, away, late = clients
    sandbox = await home.create("debian", memory_mib=128, labels={"kept": "yes"})
    await sandbox.files.write("/tmp/kept", b"kept")
    process = await sandbox.start(["python3", "-u", "-c", COUNTER])
    assert (await next_count(process, 0))[0] == "42"
    with pytest.raises(barchan.Conflict, match="not hibernated"):
        await sandbox.push()
    await sandbox.hibernate()
    await sandbox.push()
    assert (await sandbox.info()).phase == "hibernated"
    taken = await away.adopt(sandbox.id)
    assert taken.id == sandbox.id
    assert (await taken.info()).phase == "hibernated"
    assert (await next_count(taken.process(process.id), 3))[0] == "43"
    assert await taken.files.read("/tmp/kept") == b"kept"
    assert [info.sandbox_id for info in await away.list(labels={"kept": "yes"})] == [sandbox.id]
    with pytest.raises(barchan.Conflict, match="is with node"):
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
    home, away, _ = clients
    sandbox = await home.create("debian", memory_mib=64)
    await sandbox.hibernate()
    await sandbox.push()
    assert (await sandbox.exec("echo on")).text == "on\n"
    with pytest.raises(barchan.Conflict):
        await away.adopt(sandbox.id)
