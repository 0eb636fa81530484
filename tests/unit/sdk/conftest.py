"""A fake node for each test that asks for one, and a client of it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from barchan.sdk.aio.client import AsyncClient, connect_async
from barchan.sdk.aio.sandbox import AsyncSandbox
from tests.unit.sdk.fake_node import FakeNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    fake = FakeNode(tmp_path)
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture
async def client(node: FakeNode) -> AsyncIterator[AsyncClient]:
    async with connect_async(node.url) as connected:
        yield connected


@pytest.fixture
async def sandbox(client: AsyncClient) -> AsyncSandbox:
    return await client.create("debian")
