"""What the tests of the egress proxy share: proxies, servers, clients, and a world of names and addresses."""

import asyncio
import contextlib
import functools
import inspect
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest
import uvloop

from barchan.core.egress import Address, EgressEvent
from barchan.node.egress import DEFAULT_LIMITS, EgressLimits, EgressProxy

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PUBLIC, PUBLIC_TOO = ip_address("93.184.216.34"), ip_address("2606:2800:220:1::1")
QUICK = EgressLimits(head_s=0.5, resolve_s=0.3, connect_s=0.5, idle_s=1.0)


def on_both_loops(suite: type) -> type:
    """Run each test of a class on asyncio's own loop and on uvloop, which the node uses where there is one."""
    for name, test in list(vars(suite).items()):
        if name.startswith("test_"):
            setattr(suite, name, _on_both_loops(test))
    return suite


def _on_both_loops(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    def run(*args: object, loop: Callable[[], asyncio.AbstractEventLoop], **kwargs: object) -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(test(*args, **kwargs))

    own_signature = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    functools.update_wrapper(run, test)
    del run.__wrapped__  # type: ignore[attr-defined]
    run.__signature__ = own_signature.replace(parameters=[*own_signature.parameters.values(), loop])  # type: ignore[attr-defined]
    loops = [asyncio.new_event_loop, uvloop.new_event_loop]
    return pytest.mark.parametrize("loop", loops, ids=["asyncio", "uvloop"])(run)


async def until(holds: Callable[[], bool]) -> None:
    """Poll: what the tests wait for is only visible in statistics."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("it never came")


class World:
    """Names and addresses as the test wants them: every dial to any address ends at `origin`, and is written down."""

    def __init__(self, origin: int, **names: tuple[Address, ...]) -> None:
        self.origin = origin
        self.names = {name.replace("_", "."): addresses for name, addresses in names.items()}
        self.lookups: list[str] = []
        self.dials: list[tuple[str, int]] = []

    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        self.lookups.append(host)
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.names[host]

    async def dial(self, address: Address, port: int) -> socket.socket:
        self.dials.append((str(address), port))
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.origin))
        return sock


class Turncoat(World):
    """Every name is public until something was dialled, and loopback from then on."""

    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        return (ip_address("127.0.0.1"),) if self.dials else (PUBLIC,)


class Silent(World):
    """slow.example is never resolved, PUBLIC_TOO never connected."""

    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        if host == "slow.example":
            await asyncio.sleep(60)
        return await super().resolve(host, port)

    async def dial(self, address: Address, port: int) -> socket.socket:
        if address == PUBLIC_TOO:
            await asyncio.sleep(60)
        return await super().dial(address, port)


class Buggy(World):
    """The first dial meets a bug."""

    async def dial(self, address: Address, port: int) -> socket.socket:
        self.dials.append((str(address), port))
        if len(self.dials) == 1:
            raise ZeroDivisionError("oops")
        return await super().dial(address, port)


class Running:
    """A proxy that serves, what it told, and how to reach it."""

    def __init__(self, proxy: EgressProxy, port: int, events: list[EgressEvent]) -> None:
        self.proxy = proxy
        self.port = port
        self.events = events

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def ask(self, request: bytes) -> bytes:
        """Send bytes and read to the end of file."""
        async with self.client() as (reader, writer):
            writer.write(request)
            return await reader.read()

    @contextlib.asynccontextmanager
    async def tunnel(self, target: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        async with self.client() as (reader, writer):
            writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 Connection established\r\n\r\n"
            yield reader, writer

    def outcomes(self) -> list[tuple[str, str]]:
        return [(event.outcome, event.host) for event in self.events]

    async def told(self, count: int) -> None:
        """Wait for events."""
        await until(lambda: len(self.events) >= count)


@contextlib.asynccontextmanager
async def proxy(
    *allow: str,
    world: World | None = None,
    limits: EgressLimits = DEFAULT_LIMITS,
) -> AsyncIterator[Running]:
    listener = socket.create_server(("127.0.0.1", 0))
    events: list[EgressEvent] = []
    made = (
        EgressProxy(listener, allow, events.append, limits=limits, resolve=world.resolve, dial=world.dial)
        if world
        else EgressProxy(listener, allow, events.append, limits=limits)
    )
    port = listener.getsockname()[1]
    async with made as running:
        yield Running(running, port, events)
    assert running.statistics().connections == 0


@contextlib.asynccontextmanager
async def origin(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server on loopback; yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0.02)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write(b"|end")
    await writer.drain()


class Web:
    """An HTTP server that keeps what it was sent. Answers after `wait` bytes of body, in its own words."""

    def __init__(
        self, answer: bytes = b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok"
    ) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if b"Content-Length: " in head:
            size = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
            self.bodies.append(await reader.readexactly(size))
        elif b"chunked" in head:
            self.bodies.append(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(self.answer)
        await writer.drain()


class EgressSuite:
    """Base of the test classes: what is checked after each test, and TLS."""

    @pytest.fixture(autouse=True)
    def nothing_left(self) -> Iterator[None]:
        """No test leaves a socket open."""
        before = open_sockets()
        yield
        assert open_sockets() - before == set()

    @pytest.fixture
    def certificate(self, tmp_path: Path) -> Path:
        """A self-signed certificate for 127.0.0.1, a.example and b.example, with its key in the same file."""
        if shutil.which("openssl") is None:
            pytest.skip("no openssl (Debian package openssl)")
        made = subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-days", "2", "-subj", "/CN=a.example", "-keyout", "-", "-out", "-",
             "-addext", "subjectAltName=DNS:a.example,DNS:b.example,IP:127.0.0.1"],
            capture_output=True, check=True, timeout=30,
        )  # fmt: skip
        path = tmp_path / "both.pem"
        path.write_bytes(made.stdout)
        return path

    @pytest.fixture
    def server_tls(self, certificate: Path) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        return context


def open_sockets() -> set[str]:
    """This process's sockets, each by its inode."""
    found: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {target for target in found if target.startswith("socket:")}


async def curl(port: int, *args: str | Path, stdin: bytes = b"") -> tuple[int, bytes]:
    """Run curl through the proxy; returns its exit code and output."""
    if shutil.which("curl") is None:
        pytest.skip("no curl (Debian package curl)")
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--max-time", "20", "--noproxy", "", "--proxy", f"http://127.0.0.1:{port}", *args,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, out


def ask_for(url: str, host: str, more: str = "") -> bytes:
    return f"GET {url} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode()


def own(answer: bytes) -> tuple[int, str]:
    """Status and reason of the proxy's own answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nConnection: close" in head
    return int(head.split()[1]), body.decode().removesuffix("\n")
