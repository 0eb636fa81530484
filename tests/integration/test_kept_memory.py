"""Several sandboxes of one memory snapshot, on backends that read a stored memory without changing it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

import barchan
from barchan import AsyncClient
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(240)]
BACKENDS = (
    pytest.param("gvisor", marks=pytest.mark.requires("runsc")),
    pytest.param("microvm", marks=pytest.mark.requires("qemu", "guest-kernel")),
)


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


@pytest.mark.parametrize("backend", BACKENDS)
async def test_what_several_go_on_from_stays_as_it_was(client: AsyncClient, node: NodeProcess, backend: str) -> None:
    """Two at once, each writing, and one after them find the same memory and files; with the snapshot the rest goes."""
    async with AsyncExitStack() as made:
        first = await made.enter_async_context(await client.create("debian", backend=backend, memory_mib=128))
        await first.exec("echo before > /tmp/note; mkdir /dev/shm/x && echo kept > /dev/shm/x/memory")
        snapshot = await first.snapshot(kind="memory")
        two = await asyncio.gather(*(client.create(snapshot, backend=backend, memory_mib=128) for _ in range(2)))
        for number, sandbox in enumerate(two):
            await made.enter_async_context(sandbox)
            assert (await sandbox.exec("cat /tmp/note /dev/shm/x/memory")).text == "before\nkept\n"
            await sandbox.exec(f"echo {number} > /tmp/note; echo {number} > /dev/shm/x/memory; sync")
        again = await made.enter_async_context(await client.create(snapshot, backend=backend, memory_mib=128))
        assert (await again.exec("cat /tmp/note /dev/shm/x/memory")).text == "before\nkept\n"
        assert [path.name.partition("-")[0] for path in (node.state_dir / "memory").iterdir()] == ["kept"]
        await snapshot.remove()
        assert list((node.state_dir / "memory").iterdir()) == []
