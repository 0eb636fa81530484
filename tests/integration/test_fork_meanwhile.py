"""What goes on in a sandbox while its memory is stored: whoever feeds, signals or follows its programs only waits."""

import asyncio
import hashlib
import io
import time
from collections.abc import AsyncIterator

import pytest

import barchan
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "criu"), pytest.mark.timeout(120)]
STDIN = bytes(range(256)) * (3 << 12)  # 3 MiB: no pipe takes it at once


class Slow(io.BytesIO):
    """An upload that takes a while, and can't be sent again."""

    def __init__(self) -> None:
        super().__init__(b"x" * 2_000_000)

    def read(self, size: int | None = -1) -> bytes:
        time.sleep(0.02)
        return super().read(min(100_000, size or 0) if size and size > 0 else 100_000)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[barchan.AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def until(sandbox: barchan.AsyncSandbox, path: str) -> None:
    while not [info for info in await sandbox.files.list("/tmp") if info.path == path]:
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("way", ["fork", "hibernate"])
async def test_a_long_stdin_comes_whole(client: barchan.AsyncClient, way: str) -> None:
    """Of a program that reads only after the memory was stored, and has its first bytes before."""
    sandbox = await client.create("debian", memory_mib=128)
    script = "head -c 1000 > /tmp/head; until [ -e /tmp/go ]; do sleep 0.05; done; cat /tmp/head - | sha256sum"
    running = asyncio.create_task(sandbox.exec(script, stdin=STDIN, timeout_s=30))
    await until(sandbox, "/tmp/head")
    if way == "fork":
        (child,) = await sandbox.fork(1, kind="memory")
        assert isinstance(child, barchan.AsyncSandbox)
        assert await child.kill()
    else:
        await sandbox.hibernate()
    await sandbox.files.write("/tmp/go", b"")
    result = await running
    assert (result.exit_code, result.timed_out) == (0, False)
    assert result.text.split()[0] == hashlib.sha256(STDIN).hexdigest()
    assert await sandbox.kill()


async def test_requests_wait_while_its_memory_is_stored(client: barchan.AsyncClient) -> None:
    """Signals, uploads and streams among them: none is lost, none fails, none comes twice."""
    sandbox = await client.create("debian", memory_mib=512)
    program = "import signal\nx, n = bytearray(b'01234567' * (15 << 20)), 0\nhow = {signal.SIGRTMIN}\n"
    program += "signal.pthread_sigmask(signal.SIG_BLOCK, how)\nprint('on', flush=True)\n"
    program += "while True: signal.sigwaitinfo(how); n += 1; print(n, flush=True)\n"
    process = await sandbox.start(["python3", "-c", program])
    said = process.output()
    assert (await anext(said))[2] == b"on\n"
    forking = asyncio.create_task(sandbox.fork(1, kind="memory"))
    sent = 0

    uploads = [asyncio.create_task(sandbox.files.write(f"/tmp/up-{number}", Slow())) for number in range(3)]
    while not forking.done():
        assert await process.signal("RTMIN", scope="process") == 1
        sent += 1
        await asyncio.sleep(0.005)
    (child,) = await forking
    assert isinstance(child, barchan.AsyncSandbox)
    kind = (await child.exec("cat /proc/1/comm")).text
    alike = "for each in /proc/[0-9]*/comm; do read name < $each && echo $name; done"
    assert (await child.exec(alike)).text.count(kind) == 1  # no upload goes on there, for nobody
    await asyncio.gather(*uploads)
    assert [(await sandbox.files.stat(f"/tmp/up-{number}")).size for number in range(3)] == [2_000_000] * 3
    heard = b""
    while heard.count(b"\n") < sent:
        heard += (await anext(said))[2]
    assert heard.split()[-1] == str(sent).encode()
    await said.aclose()
    assert await child.kill()
    assert await sandbox.kill()
