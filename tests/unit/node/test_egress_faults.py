"""The egress proxy against broken servers, hostile clients and too much of everything."""

import asyncio
import contextlib
import socket
import ssl
import sys
import time
from pathlib import Path

import pytest

from barchan.node.egress import EgressLimits
from barchan.node.egress_relay import CHUNK_BYTES
from tests.unit.node.egress_harness import (
    PUBLIC,
    PUBLIC_TOO,
    QUICK,
    EgressSuite,
    Silent,
    Web,
    World,
    ask_for,
    echo,
    on_both_loops,
    origin,
    own,
    proxy,
    until,
)

pytestmark = pytest.mark.timeout(60)


@on_both_loops
class TestBrokenServers(EgressSuite):
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
            assert time.monotonic() - started > 0.7

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
                assert time.monotonic() - started > 1

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
class TestHostileClients(EgressSuite):
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
            assert time.monotonic() - started > 0.4
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
class TestBounds(EgressSuite):
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
