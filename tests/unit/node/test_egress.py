"""The egress proxy against real sockets: honest clients, names and addresses, start and stop."""

import asyncio
import contextlib
import os
import socket
import ssl
from ipaddress import ip_address
from pathlib import Path

import pytest

from barchan.core.egress import EgressEvent
from barchan.errors import InvalidSpec
from barchan.node.egress import EgressProxy, proxy_env
from tests.unit.node.egress_harness import (
    PUBLIC,
    PUBLIC_TOO,
    QUICK,
    Buggy,
    EgressSuite,
    Running,
    Silent,
    Turncoat,
    Web,
    World,
    ask_for,
    curl,
    echo,
    on_both_loops,
    origin,
    own,
    proxy,
    until,
)

pytestmark = pytest.mark.timeout(60)


@on_both_loops
class TestHonestClients(EgressSuite):
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
class TestNamesAndAddresses(EgressSuite):
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
class TestLife(EgressSuite):
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
