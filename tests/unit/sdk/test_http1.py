"""The HTTP client against a peer that is scripted byte by byte, honest and not."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from barchan.errors import BarchanError, ConnectionLost, InvalidSpec, ReadTimeout, RemoteProtocolError
from barchan.model.sandbox import OutputChunk
from barchan.sdk.endpoint import endpoint_of
from barchan.sdk.http1 import Pool, Response
from barchan.sdk.transport import Call, Transport, records
from tests.unit.sdk.fake_node import record

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def pool_of(folder: Path, peer: Peer) -> AsyncIterator[Pool]:
    path = folder / "peer.sock"
    server = await asyncio.start_unix_server(closing(peer), path)
    pool = Pool(endpoint_of(f"unix://{path}", None), None)
    try:
        yield pool
    finally:
        await pool.close()
        await ended(server)


def closing(peer: Peer) -> Peer:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await peer(reader, writer)
        finally:
            writer.close()

    return serve


async def ended(server: asyncio.Server) -> None:
    """Close, and let the connections of the peer's side end too."""
    server.close()
    await asyncio.sleep(0.02)


def says(answer: bytes, *, cut: int = 0, pause_s: float = 0.0) -> Peer:
    """A peer that reads a request head and answers, in two pieces if `cut`."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer[:cut])
        await asyncio.sleep(pause_s)
        writer.write(answer[cut:])
        await writer.drain()

    return peer


async def get(pool: Pool, bytes_max: int = 1 << 20) -> bytes:
    response = await pool.exchange("GET", "/x", b"", "")
    return await response.read(bytes_max)


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: x\r\n\r\n"
)
SIZED = b"HTTP/1.1 200 OK\r\ncontent-LENGTH:  11 \r\n\r\nhello world"


@pytest.mark.parametrize("answer", [CHUNKED, SIZED])
async def test_a_body_is_whole_however_it_is_cut(tmp_path: Path, answer: bytes) -> None:
    """Sized and chunked bodies come out the same for every cut of the bytes on the wire."""
    for cut in range(0, len(answer), 5):
        (tmp_path / "peer.sock").unlink(missing_ok=True)
        async with pool_of(tmp_path, says(answer, cut=cut, pause_s=0.002)) as pool:
            assert await get(pool) == b"hello world"


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 999 Odd\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nunbounded",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 400_000 + b"\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_protocol_error(tmp_path: Path, answer: bytes) -> None:
    """Answers that no node gives are told as the peer's mistake, and their connection isn't used again."""
    async with pool_of(tmp_path, says(answer)) as pool:
        with pytest.raises(RemoteProtocolError):
            await get(pool)
        assert not pool._open and not pool._idle


async def test_a_body_over_the_bound_is_refused(tmp_path: Path) -> None:
    """Neither a sized nor a chunked body can fill the memory of the caller."""
    for answer in (SIZED, CHUNKED):
        (tmp_path / "peer.sock").unlink(missing_ok=True)
        async with pool_of(tmp_path, says(answer)) as pool:
            with pytest.raises(RemoteProtocolError):
                await get(pool, bytes_max=10)
            assert not pool._open


@pytest.mark.parametrize("length", range(0, len(CHUNKED), 7))
async def test_an_answer_cut_short_is_a_lost_connection(tmp_path: Path, length: int) -> None:
    """Wherever the connection ends inside an answer, it is ConnectionLost."""
    async with pool_of(tmp_path, says(CHUNKED[:length])) as pool:
        with pytest.raises(ConnectionLost):
            await get(pool)


async def test_connections_are_used_again(tmp_path: Path) -> None:
    """One after the other, requests share a connection; one closed by the peer meanwhile is not used."""
    connections = 0

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(3):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(SIZED)

    async with pool_of(tmp_path, peer) as pool:
        for expected in (1, 1, 1, 2):
            assert await get(pool) == b"hello world"
            await asyncio.sleep(0.05)
            assert connections == expected


async def test_connection_close_is_heeded(tmp_path: Path) -> None:
    """A connection whose peer announces its end isn't kept."""
    answer = b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 0\r\n\r\n"
    async with pool_of(tmp_path, says(answer)) as pool:
        assert await get(pool) == b""
        assert not pool._idle and not pool._open


async def test_an_early_refusal_of_an_upload_is_heard(tmp_path: Path) -> None:
    """A peer that answers before it has read the body is believed at once, and the rest isn't sent."""
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield bytes(1 << 16)

    answer = b"HTTP/1.1 413 Too large\r\nContent-Length: 2\r\n\r\nno"

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await asyncio.sleep(1)

    async with pool_of(tmp_path, peer) as pool:
        response = await pool.exchange("PUT", "/x", body(), "x")
        assert (response.status, await response.read(10)) == (413, b"no")
        assert not pool._idle and sent < 100


async def test_a_source_that_fails_ends_the_upload(tmp_path: Path) -> None:
    """The error of the data's source is raised, not one of the connection."""

    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        raise InvalidSpec("can't read it")

    async with pool_of(tmp_path, says(SIZED, pause_s=5)) as pool:
        with pytest.raises(InvalidSpec):
            await pool.exchange("PUT", "/x", body(), "x")
        assert not pool._open


async def test_a_silent_stream_times_out(tmp_path: Path) -> None:
    """Reading a body that stops coming ends after the given quiet time."""
    async with pool_of(tmp_path, says(CHUNKED, cut=60, pause_s=30)) as pool:
        response = await pool.exchange("GET", "/x", b"", "")
        started = time.monotonic()
        with pytest.raises(ReadTimeout):
            _ = [piece async for piece in response.pieces(0.1)]
        assert time.monotonic() - started < 20 and not pool._open


async def test_a_slow_reader_holds_up_the_peer(tmp_path: Path) -> None:
    """A stream that nobody reads isn't buffered without bound: the peer is made to wait."""
    written = 0

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
            await writer.drain()
            written += 1 << 16

    async with pool_of(tmp_path, peer) as pool:
        response = await pool.exchange("GET", "/x", b"", "")
        await asyncio.sleep(0.3)
        assert written < 4 << 20
        response.close()


async def test_a_full_queue_of_connections_is_waited_for(tmp_path: Path) -> None:
    """More connections at once than the peer's queue holds all get their answer."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "peer.sock"))
    listener.listen(2)
    pool = Pool(endpoint_of(f"unix://{tmp_path}/peer.sock", None), None)
    calls = [asyncio.ensure_future(get(pool)) for _ in range(20)]
    await asyncio.sleep(0.05)
    server = await asyncio.start_unix_server(closing(says(SIZED)), sock=listener)
    assert await asyncio.gather(*calls) == [b"hello world"] * 20
    await pool.close()
    await ended(server)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_tcp_works_like_a_unix_socket(host: str) -> None:
    """An http:// address is reached over TCP, with the Host header that HTTP wants."""
    heads: list[bytes] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(SIZED)

    server = await asyncio.start_server(closing(peer), host.strip("[]"), 0)
    port = server.sockets[0].getsockname()[1]
    pool = Pool(endpoint_of(f"http://{host}:{port}/", None), "token-1")
    assert await get(pool) == b"hello world"
    assert heads[0].startswith(f"GET /x HTTP/1.1\r\nHost: {host}:{port}\r\n".encode())
    assert b"\r\nAuthorization: Bearer token-1\r\n" in heads[0]
    await pool.close()
    await ended(server)


def of_pieces(*pieces: bytes) -> Response:
    class Pieces:
        async def pieces(self, quiet_s: float | None) -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

    return Pieces()  # type: ignore[return-value]


OUTPUT = Call("output", OutputChunk)


async def test_records_are_whole_however_they_are_cut() -> None:
    """The records of a stream don't depend on where its pieces end."""
    chunks = [OutputChunk("stdout", n * 3, b"abc") for n in range(5)]
    data = b"".join(record(chunk) for chunk in chunks)
    for size in (1, 2, 7, len(data)):
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert [chunk async for chunk in records(of_pieces(*pieces), OUTPUT, quiet_s=None)] == chunks


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xff\xff\xff\xff", RemoteProtocolError),
        (b"\x03\x00\x00\x00abc", RemoteProtocolError),
        (b"\x03\x00\x00\x00a", ConnectionLost),
    ],
)
async def test_bad_records_are_told(data: bytes, error: type[BarchanError]) -> None:
    """A record that is too long, one of another type, and one cut short."""
    with pytest.raises(error):
        _ = [chunk async for chunk in records(of_pieces(data), OUTPUT, quiet_s=None)]


async def test_a_reply_that_can_not_be_read_is_the_nodes_mistake(tmp_path: Path) -> None:
    """A 200 with a body of another type is RemoteProtocolError."""
    async with pool_of(tmp_path, says(SIZED)) as pool:
        transport = Transport(pool._endpoint)
        with pytest.raises(RemoteProtocolError):
            await transport.value(Call("output", OutputChunk), "/x")
        await transport.close()


def test_ids_and_queries_are_quoted() -> None:
    """Nothing in an id or a path can change which operation is called."""
    call: Call[OutputChunk] = OUTPUT
    target = call.target({"follow": True, "stdout": None, "x": ["a b", "c&d"]}, sandbox_id="../s?", process_id="..")
    assert target == "/v1/sandboxes/..%2Fs%3F/processes/%2E%2E/output?follow=true&x=a%20b&x=c%26d"
    with pytest.raises(InvalidSpec):
        call.target(sandbox_id="", process_id="p")
