"""The egress proxy against real sockets: honest clients, hostile clients, broken servers. Runs on both event loops."""

import asyncio
import contextlib
import functools
import inspect
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest
import uvloop

from barchan.core.egress import Address, EgressEvent
from barchan.errors import InvalidSpec
from barchan.node.egress import DEFAULT_LIMITS, EgressLimits, EgressProxy, proxy_env
from barchan.node.egress_relay import CHUNK_BYTES

pytestmark = pytest.mark.timeout(60)

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


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a descriptor open."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    left = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - before if _is_open(fd)}
    assert {fd: target for fd, target in left.items() if target.startswith("socket:")} == {}


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 and a.example, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl (Debian package openssl)")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=a.example", "-addext", "subjectAltName=DNS:a.example,DNS:b.example,IP:127.0.0.1",
         "-keyout", "-", "-out", "-"],
        capture_output=True, check=True, timeout=30,
    )  # fmt: skip
    path.write_bytes(made.stdout)
    return path


@pytest.fixture
def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


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


@on_both_loops
class TestHonestClients:
    async def test_curl_over_tls(self, server_tls: ssl.SSLContext, certificate: Path) -> None:
        """HTTPS to an address that the list names, loopback too, with the certificate checked end to end."""
        async with origin(Web(), server_tls) as port, proxy(f"127.0.0.1:{port}") as running:
            got = await curl(running.port, "--cacert", certificate, f"https://127.0.0.1:{port}/")
            assert got == (0, b"ok")
            assert running.events == [EgressEvent(outcome="allowed", host="127.0.0.1", port=port, address="127.0.0.1")]

    async def test_curl_in_the_clear(self) -> None:
        """A plain GET is one request on one connection; nothing tells the server of the proxy's own."""
        web = Web()
        async with origin(web) as port, proxy(f"127.0.0.1:{port}") as running:
            got = await curl(running.port, "-H", "User-Agent: x", f"http://127.0.0.1:{port}/a?b")
            assert got == (0, b"ok")
            assert web.heads == [
                f"GET /a?b HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: */*\r\nUser-Agent: x\r\n"
                "Connection: close\r\n\r\n".encode()
            ]

    async def test_curl_sends_large_bodies(self) -> None:
        """5 MB with a length (after 100 Continue's wait) and in chunks arrive whole."""
        web, data = Web(), os.urandom(5_000_000)
        async with origin(web) as port, proxy(f"127.0.0.1:{port}") as running:
            url = f"http://127.0.0.1:{port}/"
            assert await curl(running.port, "--data-binary", "@-", url, stdin=data) == (0, b"ok")
            assert web.bodies == [data]
        counting = Web()

        async def count_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            counting.heads.append(await reader.readuntil(b"\r\n\r\n"))
            while size := int(await reader.readuntil(b"\r\n"), 16):
                counting.bodies.append((await reader.readexactly(size + 2))[:-2])
            writer.write(counting.answer)

        async with origin(count_chunks) as port, proxy(f"127.0.0.1:{port}") as running:
            url = f"http://127.0.0.1:{port}/"
            assert await curl(running.port, "-T", "-", "-H", "Expect:", url, stdin=data) == (0, b"ok")
            assert b"".join(counting.bodies) == data
            assert b"Transfer-Encoding: chunked" in counting.heads[0]

    async def test_curl_is_told_why(self) -> None:
        """A host outside the list: 403 with one line that names it."""
        async with proxy("a.example") as running:
            code, out = await curl(running.port, "http://evil.example/")
            assert (code, out) == (0, b"evil.example is not in the sandbox's allow_hosts\n")
            code, out = await curl(running.port, "https://evil.example/")
            assert code == 56 and b"403" in out
            assert running.outcomes() == [("denied", "evil.example")] * 2

    async def test_the_variables_lead_programs_here(self) -> None:
        """Both spellings; loopback stays direct."""
        env = proxy_env()
        assert {env[name] for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")} == {
            "http://127.0.0.1:3128"
        }
        assert env["no_proxy"] == env["NO_PROXY"] == "localhost,127.0.0.1,::1"

    async def test_half_close(self) -> None:
        """A guest that has said all still gets the whole answer."""
        async with origin(echo) as port, proxy(f"127.0.0.1:{port}") as running:
            tunnel = running.tunnel(f"127.0.0.1:{port}")
            async with tunnel as (reader, writer):
                writer.write(b"hello")
                writer.write_eof()
                assert await reader.read() == b"hello|end"

    async def test_a_server_may_speak_first(self) -> None:
        """The look at the guest's first bytes holds nothing back that comes the other way."""

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 ready\r\n")
            writer.write(await reader.readline())

        async with origin(greet) as port, proxy(f"127.0.0.1:{port}") as running:
            tunnel = running.tunnel(f"127.0.0.1:{port}")
            async with tunnel as (reader, writer):
                assert await reader.readline() == b"220 ready\r\n"
                writer.write(b"EHLO\r\n")
                assert await reader.read() == b"EHLO\r\n"

    async def test_bytes_right_behind_the_connect(self) -> None:
        """A guest that doesn't wait for the 200 loses nothing."""
        async with origin(echo) as port, proxy(f"127.0.0.1:{port}") as running, running.client() as (reader, writer):
            writer.write(f"CONNECT 127.0.0.1:{port} HTTP/1.0\r\n\r\nearly".encode())
            writer.write_eof()
            assert (await reader.read()).partition(b"\r\n\r\n")[2] == b"early|end"

    async def test_an_answer_before_the_body_is_sent(self) -> None:
        """A server that refuses an upload early: the guest reads why, although it is still sending."""

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")

        async with origin(refuse) as port, proxy(f"127.0.0.1:{port}") as running:
            url = f"http://127.0.0.1:{port}/"
            got = await curl(
                running.port, "-H", "Expect:", "--data-binary", "@-", "-w", "%{http_code}", url, stdin=bytes(20_000_000)
            )
            assert got == (0, b"413")

    @pytest.mark.parametrize("host", ["127.0.0.1", "evil.example"])
    async def test_a_guest_that_sends_all_before_it_reads(self, host: str) -> None:
        """A refusal, the server's or the proxy's own, breaks no sending: the answer is still there afterwards."""

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        async with origin(refuse) as port, proxy(f"127.0.0.1:{port}") as running:
            loop = asyncio.get_running_loop()
            with socket.create_connection(("127.0.0.1", running.port)) as client:
                client.setblocking(False)
                head = f"POST http://{host}:{port}/ HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 200000\r\n\r\n"
                await loop.sock_sendall(client, head.encode())
                for _ in range(20):
                    await asyncio.sleep(0.02)
                    await loop.sock_sendall(client, bytes(10_000))
                assert (await loop.sock_recv(client, 4096)).startswith(b"HTTP/1.1 403 Forbidden\r\n")

    async def test_interim_answers_pass(self) -> None:
        """100 Continue reaches the guest before the final answer, which closes."""

        async def expect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert await reader.readexactly(2) == b"hi"
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n\r\nok")

        async with origin(expect) as port, proxy(f"127.0.0.1:{port}") as running:
            host = f"127.0.0.1:{port}"
            async with running.client() as (reader, writer):
                writer.write(ask_for(f"http://{host}/", host, "Content-Length: 2\r\nExpect: 100-continue\r\n"))
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                writer.write(b"hi")
                assert await reader.read() == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok"


@on_both_loops
class TestNamesAndAddresses:
    async def test_a_name_is_reached_at_its_checked_address(self) -> None:
        """The allowed name, however it is spelled, is looked up once and dialled by address."""
        async with origin(Web()) as port:
            world = World(port, a_example=(PUBLIC_TOO, PUBLIC))
            async with proxy("*.example", "a.example:8080", world=world) as running:
                answer = await running.ask(ask_for("http://A.EXAMPLE.:8080/", "a.example:8080"))
                assert answer.endswith(b"\r\n\r\nok")
            assert (world.lookups, world.dials) == (["a.example"], [(str(PUBLIC_TOO), 8080)])

    async def test_rebinding(self) -> None:
        """A resolver that changes its answer after the check changes nothing: the second one is never asked for."""
        async with origin(echo) as port:
            world = Turncoat(port)
            async with proxy("a.example", world=world) as running:
                async with running.tunnel("a.example:443"):
                    assert world.dials == [(str(PUBLIC), 443)]
                answer = await running.ask(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n")
                assert own(answer) == (403, "a.example leads to 127.0.0.1 (loopback)")
            assert world.dials == [(str(PUBLIC), 443)]

    @pytest.mark.parametrize(
        "text",
        ["127.0.0.1", "10.0.0.1", "169.254.169.254", "fd00:ec2::254", "::ffff:10.0.0.1", "100.64.0.1", "0.0.0.0"],
    )
    async def test_a_name_leads_nowhere_inside(self, text: str) -> None:
        """An allowed name whose DNS points into the host or its cloud is denied, and nothing is dialled."""
        world = World(0, a_example=(ip_address(text),))
        async with proxy("a.example", world=world) as running:
            status, reason = own(await running.ask(ask_for("http://a.example/", "a.example")))
            assert (status, reason.startswith(f"a.example leads to {ip_address(text)} (")) == (403, True)
            assert (running.outcomes(), world.dials) == ([("denied", "a.example")], [])

    async def test_inside_addresses_among_others_are_left_out(self) -> None:
        """Only the address that may be reached is dialled."""
        async with origin(echo) as port:
            world = World(port, a_example=(ip_address("10.0.0.1"), PUBLIC, ip_address("::1")))
            async with proxy("a.example", world=world) as running, running.tunnel("a.example:443"):
                assert world.dials == [(str(PUBLIC), 443)]

    @pytest.mark.parametrize(
        ("target", "status"),
        [("127.0.0.1:443", 403), ("[::1]:443", 403), ("93.184.216.34:443", 403), ("a.example:22", 403),
         ("2130706433:443", 400), ("0x7f.1:443", 400), ("127.1:443", 400)],
    )  # fmt: skip
    async def test_unlisted_addresses_and_ports(self, target: str, status: int) -> None:
        """Refused before any lookup, in each of their forms."""
        world = World(0, a_example=(PUBLIC,))
        async with proxy("a.example", "*.example", world=world) as running:
            assert own(await running.ask(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode()))[0] == status
            assert (world.lookups, world.dials) == ([], [])

    async def test_the_next_address_is_tried(self) -> None:
        """A name's first address that doesn't answer costs its share of the time, not the request."""
        async with origin(echo) as port:
            world = Silent(port, a_example=(PUBLIC_TOO, PUBLIC))
            async with proxy("a.example", world=world, limits=QUICK) as running, running.tunnel("a.example:443"):
                assert running.events[0].address == str(PUBLIC)

    async def test_a_malformed_list_starts_no_proxy(self) -> None:
        """The listener stays the caller's."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            with pytest.raises(InvalidSpec):
                EgressProxy(listener, ("*",), lambda event: None)
            assert listener.fileno() >= 0

    async def test_the_hosts_own_resolver(self) -> None:
        """Without an injected one the system is asked: localhost is loopback, an unknown name fails."""
        async with proxy("localhost", "no-such-host.invalid") as running:
            assert own(await running.ask(b"CONNECT localhost:443 HTTP/1.1\r\n\r\n"))[0] == 403
            assert own(await running.ask(b"CONNECT no-such-host.invalid:443 HTTP/1.1\r\n\r\n"))[0] in (502, 504)


@on_both_loops
class TestBrokenServers:
    async def test_nobody_listens(self) -> None:
        """Connection refused: 502."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        async with proxy(f"127.0.0.1:{port}") as running:
            host = f"127.0.0.1:{port}"
            answer = own(await running.ask(ask_for(f"http://{host}/", host)))
            assert answer == (502, f"{host} is not reachable: Connection refused")
            assert running.outcomes() == [("failed", "127.0.0.1")]

    async def test_nobody_answers(self) -> None:
        """Neither a resolver nor an address that stays silent holds a guest longer than its limit: 504."""
        world = Silent(0, slow_example=(PUBLIC,), a_example=(PUBLIC_TOO,))
        async with proxy("*.example", world=world, limits=QUICK) as running:
            started = time.monotonic()
            assert own(await running.ask(b"CONNECT slow.example:443 HTTP/1.1\r\n\r\n"))[0] == 504
            assert own(await running.ask(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n"))[0] == 504
            assert own(await running.ask(b"CONNECT none.example:443 HTTP/1.1\r\n\r\n")) == (
                502,
                "none.example does not resolve: Name or service not known",
            )
            assert 0.7 < time.monotonic() - started < 5

    @pytest.mark.parametrize(
        "answer",
        [b"", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 101 Switching\r\n\r\n", b"HTTP/1.1 200 OK\r\nA",
         b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000],
    )  # fmt: skip
    async def test_no_answer_is_a_502(self, answer: bytes) -> None:
        """A server that closes early, speaks another protocol or sends endless headers."""
        async with origin(Web(answer)) as port, proxy(f"127.0.0.1:{port}") as running:
            host = f"127.0.0.1:{port}"
            assert own(await running.ask(ask_for(f"http://{host}/", host)))[0] == 502
            assert running.outcomes() == [("allowed", "127.0.0.1"), ("failed", "127.0.0.1")]

    async def test_a_silent_server_is_a_504(self) -> None:
        """The idle time-out ends a plain request with an answer, and a tunnel by closing it; traffic keeps a tunnel."""

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async with origin(silent) as port, proxy(f"127.0.0.1:{port}", limits=QUICK) as running:
            host = f"127.0.0.1:{port}"
            assert own(await running.ask(ask_for(f"http://{host}/", host))) == (504, "nothing moved for 1 s")
            async with running.tunnel(host) as (reader, writer):
                started = time.monotonic()
                for _ in range(8):
                    writer.write(b"x")
                    await asyncio.sleep(0.25)
                assert await reader.read() == b""
                assert 2.5 < time.monotonic() - started < 5

    async def test_a_reset_tunnel_closes(self) -> None:
        """A server's reset ends the guest's side too."""

        async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.transport.abort()

        async with origin(reset) as port, proxy(f"127.0.0.1:{port}") as running:
            tunnel = running.tunnel(f"127.0.0.1:{port}")
            async with tunnel as (reader, writer):
                writer.write(b"x" * 10)
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""


@on_both_loops
class TestHostileClients:
    async def test_two_requests_in_one(self) -> None:
        """What follows a request on its connection never reaches a server."""
        web = Web()
        async with origin(web) as port, proxy(f"127.0.0.1:{port}") as running:
            host = f"127.0.0.1:{port}"
            second = ask_for(f"http://{host}/second", host)
            post = f"POST http://{host}/first HTTP/1.1\r\nHost: {host}\r\n".encode()
            for request in (
                ask_for(f"http://{host}/first", host) + second,
                post + b"Content-Length: 3\r\n\r\nabc" + second,
                post + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" + second,
            ):
                assert (await running.ask(request)).count(b"HTTP/1.1 200") == 1
            assert [head.split()[1] for head in web.heads] == [b"/first"] * 3
            assert web.bodies == [b"abc", b"3\r\nabc\r\n0\r\n\r\n"]

    @pytest.mark.parametrize(
        "more",
        ["Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", "Content-Length: 3\r\nContent-Length: 4\r\n",
         "Transfer-Encoding: xchunked\r\n", "X: y\r\n z\r\n", "Host: evil.example\r\n", "X: a\x00b\r\n", "X\t: a\r\n"],
    )  # fmt: skip
    async def test_ambiguous_requests_are_not_sent(self, more: str) -> None:
        """400, and no server is even dialled."""
        world = World(0, a_example=(PUBLIC,))
        async with proxy("a.example", world=world) as running:
            assert own(await running.ask(ask_for("http://a.example/", "a.example", more)))[0] == 400
            assert (world.lookups, [event.outcome for event in running.events]) == ([], ["malformed"])

    async def test_a_malformed_body_cuts_the_request(self) -> None:
        """Bad chunks and bodies that end early: the server sees the request end unfinished, the guest a 400."""
        async with origin(Web()) as port, proxy(f"127.0.0.1:{port}") as running:
            host = f"127.0.0.1:{port}"
            post = f"POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\n".encode()
            bad = await running.ask(post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
            assert own(bad) == (400, "a chunk's size is malformed")
            async with running.client() as (reader, writer):
                writer.write(post + b"Content-Length: 10\r\n\r\nabc")
                writer.write_eof()
                assert own(await reader.read()) == (400, "the request's body is cut off")

    async def test_endless_and_slow_headers(self) -> None:
        """16 KiB and the time-out bound what a head may be; bare line feeds are refused at once."""
        async with proxy("a.example", limits=QUICK) as running:
            line = b"GET http://a.example/ HTTP/1.1\r\n"
            assert own(await running.ask(line + b"X: " + b"x" * 100_000))[0] == 431
            assert own(await running.ask(line.replace(b"\r", b"") + b"Host: a.example\n\n"))[0] == 400
            started = time.monotonic()
            async with running.client() as (reader, writer):
                answer = asyncio.create_task(reader.read())
                while not answer.done():
                    writer.write(b"X")
                    await asyncio.sleep(0.05)
                assert own(await answer) == (408, "the request head did not come in time")
            assert 0.4 < time.monotonic() - started < 3
            assert [event.outcome for event in running.events] == ["malformed"] * 3

    async def test_a_silent_connection_is_nobody(self) -> None:
        """Connecting and leaving tells nothing and holds nothing."""
        async with proxy("a.example") as running:
            async with running.client():
                pass
            statistics = running.proxy.statistics
            await until(lambda: statistics().accepted == 1 and statistics().connections == 0)
            assert running.events == []

    @pytest.mark.parametrize(("name", "passes"), [("a.example", True), ("b.example", False), (None, True)])
    async def test_the_tls_name_is_the_tunnels(
        self, name: str | None, passes: bool, server_tls: ssl.SSLContext, certificate: Path
    ) -> None:
        """Another site at the same address is not what was allowed: closed, and the server sees nothing of it."""
        context = ssl.create_default_context(cafile=str(certificate))
        context.check_hostname = False
        async with origin(Web(), server_tls) as port:
            world = World(port, a_example=(PUBLIC,))
            async with proxy("a.example", world=world) as running, running.tunnel("a.example:443") as (reader, writer):
                incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
                tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
                closed = False
                for _ in range(20):
                    try:
                        tls.do_handshake()
                        break
                    except ssl.SSLWantReadError:
                        writer.write(outgoing.read())
                    with contextlib.suppress(ConnectionResetError):
                        data = await reader.read(65536)
                    if not data:
                        closed = True
                        break
                    incoming.write(data)
                assert closed is not passes
                if not passes:
                    assert running.events[-1].outcome == "denied"
                    assert running.events[-1].reason == "the tunnel to a.example asks for the TLS server name b.example"
                    assert running.proxy.statistics().bytes_up == 0

    @pytest.mark.parametrize("hello", [b"\x16\x03\x01\x00\x20", b"\x16\x03\x01\x40\x00" + bytes(100), b"\x16nonsense"])
    async def test_no_tunnel_for_half_a_hello(self, hello: bytes) -> None:
        """TLS that never says its name, or is none, reaches nobody."""
        got: list[bytes] = []

        async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            got.append(await reader.read())

        async with origin(keep) as port, proxy(f"127.0.0.1:{port}", limits=QUICK) as running:
            async with running.tunnel(f"127.0.0.1:{port}") as (reader, writer):
                writer.write(hello)
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            await running.told(2)
            assert [event.outcome for event in running.events] == ["allowed", "malformed"]
            await asyncio.sleep(0.05)
            assert got == [b""]


POUR = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
peer = server.accept()[0]
for _ in range(int(sys.argv[1]) >> 20):
    peer.sendall(bytes(1 << 20))
"""
DRAIN = """
import socket, sys
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
client.sendall(b"CONNECT %s HTTP/1.1\\r\\n\\r\\n" % sys.argv[2].encode())
while client.recv(1 << 20):
    pass
"""


async def python(source: str, *args: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", source, *args, stdout=asyncio.subprocess.PIPE
    )


@on_both_loops
class TestBounds:
    async def test_connections_at_once(self) -> None:
        """The third of two waits in the backlog until one ends, and is served then."""
        limits = EgressLimits(connections_max=2)
        async with origin(echo) as port, proxy(f"127.0.0.1:{port}", limits=limits) as running:
            host = f"127.0.0.1:{port}"
            async with contextlib.AsyncExitStack() as clients:
                async with running.tunnel(host):
                    await clients.enter_async_context(running.tunnel(host))
                    reader, writer = await clients.enter_async_context(running.client())
                    writer.write(f"CONNECT {host} HTTP/1.1\r\n\r\n".encode())
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(reader.read(1), 0.3)
                    statistics = running.proxy.statistics()
                    assert (statistics.connections, statistics.connections_max, statistics.accepted) == (2, 2, 2)
                assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 200 Connection established\r\n"

    async def test_connections_over_time(self) -> None:
        """A guest that does nothing but connect is slowed to the rate: 20 at once, then 20 a second."""
        async with proxy("a.example", limits=EgressLimits(accepts_per_s=20)) as running:
            started = time.monotonic()
            for _ in range(40):
                await running.ask(b"GET /\r\n\r\n")
            assert time.monotonic() - started > 0.9
            assert running.proxy.statistics().malformed == 40

    async def test_back_pressure(self) -> None:
        """A guest that doesn't read slows the server: nothing piles up in the node, and nothing is lost."""
        total = 64 << 20

        async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(total >> 20):
                writer.write(bytes(1 << 20))
                await writer.drain()

        async with origin(pour) as port, proxy(f"127.0.0.1:{port}") as running:
            with socket.create_connection(("127.0.0.1", running.port)) as client:
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(client, f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
                moved: list[int] = [0]
                while not 0 < moved[-1] == moved[max(0, len(moved) - 3)]:
                    await asyncio.sleep(0.2)
                    moved.append(running.proxy.statistics().bytes_down)
                assert moved[-1] < 16 << 20  # what the kernel's socket buffers hold
                got = 0
                while data := await loop.sock_recv(client, 1 << 20):
                    got += len(data)
            assert got == total + len(b"HTTP/1.1 200 Connection established\r\n\r\n")

    async def test_a_busy_tunnel_leaves_the_loop_to_others(self) -> None:
        """Between two turns of the event loop a tunnel moves a chunk, however fast both its peers are."""
        async with contextlib.AsyncExitStack() as stack:
            server = await python(POUR, str(256 << 20))
            assert server.stdout is not None
            port = int(await server.stdout.readline())
            running = await stack.enter_async_context(proxy(f"127.0.0.1:{port}"))
            client = await python(DRAIN, str(running.port), f"127.0.0.1:{port}")
            ending = asyncio.create_task(client.wait())
            most = before = 0
            while not ending.done():
                await asyncio.sleep(0)
                moved = running.proxy.statistics().bytes_down
                most, before = max(most, moved - before), moved
            assert (await ending, await server.wait(), before) == (0, 0, 256 << 20)
            assert most <= 4 * CHUNK_BYTES


@on_both_loops
class TestLife:
    async def test_stopping_ends_everything(self) -> None:
        """Live tunnels, half heads and waiting requests end with the proxy; no task and no descriptor is left."""

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        tasks = len(asyncio.all_tasks())
        async with origin(silent) as port, contextlib.AsyncExitStack() as clients:
            host = f"127.0.0.1:{port}"
            async with proxy(host) as running:
                tunnel, _ = await clients.enter_async_context(running.tunnel(host))
                half, writer = await clients.enter_async_context(running.client())
                writer.write(b"GET ")
                waiting, writer = await clients.enter_async_context(running.client())
                writer.write(ask_for(f"http://{host}/", host))
                statistics = running.proxy.statistics
                await until(lambda: statistics().connections == 3 and statistics().allowed == 2)
            assert [await reader.read() for reader in (tunnel, half, waiting)] == [b"", b"", b""]
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", running.port)
        await asyncio.sleep(0.05)
        assert len(asyncio.all_tasks()) == tasks

    async def test_start_and_stop_in_different_tasks(self) -> None:
        """A create starts it, a kill stops it: two requests, two tasks."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            started = EgressProxy(listener, ("a.example",), lambda event: None)
            await asyncio.create_task(started.__aenter__())
            await asyncio.create_task(started.__aexit__(None, None, None))
            assert listener.fileno() == -1

    async def test_a_bug_costs_one_connection(self) -> None:
        """An unforeseen error is told as a failure, and the next request is served."""
        async with origin(echo) as port:
            world = Buggy(port, a_example=(PUBLIC,))
            async with proxy("a.example", world=world) as running:
                assert await running.ask(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n") == b""
                assert running.events[0].reason == "internal error: ZeroDivisionError: oops"
                async with running.tunnel("a.example:443"):
                    assert [event.outcome for event in running.events] == ["failed", "allowed"]

    async def test_a_broken_listener_of_events_is_not_hidden(self) -> None:
        """Requests that can't be recorded are not served: the proxy ends, and leaving it says why."""

        def broken(event: EgressEvent) -> None:
            raise ZeroDivisionError("oops")

        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        made = EgressProxy(listener, ("a.example",), broken)
        await made.__aenter__()
        assert await Running(made, port, []).ask(b"GET /\r\n\r\n") == b""
        with pytest.raises(ExceptionGroup) as caught:
            await made.__aexit__(None, None, None)
        assert caught.group_contains(ZeroDivisionError)
