"""A registry that a test makes up as it goes."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from barchan.image.oci import Descriptor, sha256
from barchan.image.registry import Registry
from barchan.image.registry_rules import Retries, new_session

QUICK = Retries(attempts=3, first_s=0.001, longest_s=0.002, retry_after_max_s=2)
DATA = bytes(range(256)) * 4096  # 1 MiB
BLOB = Descriptor("application/octet-stream", sha256(DATA), len(DATA))
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """One handler for everything, on a port that the kernel chose; it notes what was asked for."""

    def __init__(self) -> None:
        self.handler: Handler = self.nothing
        self.seen: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.host = ""

    @staticmethod
    async def nothing(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(f"{request.method} {request.path}")
        self.headers.append(dict(request.headers))
        return await self.handler(request)

    async def start(self) -> web.ServerRunner:
        runner = web.ServerRunner(web.Server(self.handle))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.host = f"127.0.0.1:{runner.addresses[0][1]}"
        return runner


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    runner = await made.start()
    yield made
    await runner.cleanup()


@pytest.fixture
async def other() -> AsyncIterator[Server]:
    made = Server()
    runner = await made.start()
    yield made
    await runner.cleanup()


@pytest.fixture
async def open_registry(server: Server) -> AsyncIterator[Callable[..., Registry]]:
    async with new_session() as session:
        yield lambda credentials=None, host=None: Registry(
            host or server.host, session, credentials=credentials, retries=QUICK
        )


OpenRegistry = Callable[..., Registry]


async def fetched(registry: Registry, blob: Descriptor = BLOB) -> bytes:
    return b"".join([chunk async for chunk in registry.blob("a/b", blob)])
