"""HTTP/1.1 as a node speaks it, over asyncio streams: kept-alive connections, sized and chunked bodies, no more.

A general client costs an exec 0.1 ms and every import 0.2 s; this one is the part of it that a node needs. Every error
of the operating system or the peer leaves here as a `TransportError` or `RemoteProtocolError`. `details["sent"]` 0 says
that no byte of the request was sent, so that anything may be sent again.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from barchan.errors import ConnectionLost, ConnectTimeout, LocalProtocolError, ReadTimeout, RemoteProtocolError
from barchan.sdk.endpoint import Endpoint
from barchan.wire.api import MSGPACK

CONNECT_TIMEOUT_S = 10.0
IDLE_CONNECTIONS_MAX = 64
_IDLE_REUSE_S = 15.0  # well below the time after which servers close an idle connection
_RECEIVE_BYTES = 64 << 10
_BUFFER_BYTES = 256 << 10  # the most a response head may have; twice this is read ahead of a slow reader
_PIECE_BYTES = 1 << 20
_QUEUE_FULL_S = 0.005

T = TypeVar("T")
Body = bytes | AsyncIterable[bytes]


class Connection:
    """One connection, in the hands of at most one exchange."""

    __slots__ = ("idle_since", "reader", "writer")

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.idle_since = 0.0

    def is_usable(self, now: float) -> bool:
        return now - self.idle_since < _IDLE_REUSE_S and not self.reader.at_eof() and not self.writer.is_closing()


class Response:
    """A response whose head was read. Read the body to its end, or close it: only then the connection is free again."""

    def __init__(self, pool: "Pool", connection: Connection, head: bytes) -> None:
        self._pool = pool
        self._connection: Connection | None = connection
        self.status, headers = _parse_head(head)
        self.content_type = headers.get("content-type", "")
        self._keep_alive = headers.get("connection", "").lower() != "close"
        self._chunked = "transfer-encoding" in headers
        self._size = _body_size(headers, self.status)

    def close(self) -> None:
        """Give up what was not read yet; the connection ends with it."""
        if self._connection is not None:
            self._pool.discard(self._connection)
            self._connection = None

    def drop_connection(self) -> None:
        """Let the connection not be used again (the request's body was not sent whole)."""
        self._keep_alive = False

    def _finish(self) -> None:
        if self._connection is not None:
            (self._pool.release if self._keep_alive else self._pool.discard)(self._connection)
            self._connection = None

    async def read(self, bytes_max: int) -> bytes:
        """The whole body.

        Raises:
            RemoteProtocolError: It is longer than `bytes_max`.
        """
        if self._connection is None:
            raise LocalProtocolError("the response was closed")
        if not self._chunked:
            if self._size > bytes_max:
                self.close()
                raise RemoteProtocolError(f"a body of {self._size} bytes: at most {bytes_max} were expected")
            with _Edge(self.close):
                body = await self._connection.reader.readexactly(self._size)
            self._finish()
            return body
        pieces: list[bytes] = []
        total = 0
        async for piece in self.pieces(None):
            total += len(piece)
            if total > bytes_max:
                self.close()
                raise RemoteProtocolError(f"a body of more than {bytes_max} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    async def pieces(self, quiet_s: float | None) -> AsyncGenerator[bytes, None]:
        """The body as it comes, at most 1 MiB at once; `ReadTimeout` when nothing comes for `quiet_s`."""
        if self._connection is None:
            raise LocalProtocolError("the response was closed")
        reader = self._connection.reader
        with _Edge(self.close):
            while size := await _within(quiet_s, self._next_chunk(reader)):
                while size:
                    piece = await _within(quiet_s, reader.read(min(size, _PIECE_BYTES)))
                    if not piece:
                        raise ConnectionLost("the node ended the connection inside a body", sent=1)
                    size -= len(piece)
                    yield piece
                if self._chunked and await _within(quiet_s, reader.readexactly(2)) != b"\r\n":
                    raise RemoteProtocolError("a chunk does not end where it should")
        self._finish()

    async def _next_chunk(self, reader: asyncio.StreamReader) -> int:
        """Bytes to read next, 0 at the end; a sized body counts as one chunk."""
        if not self._chunked:
            size, self._size = self._size, 0
            return size
        line = await reader.readuntil(b"\r\n")
        digits = line[:-2].partition(b";")[0].strip()
        if not 0 < len(digits) <= 16 or digits.strip(b"0123456789abcdefABCDEF"):
            raise RemoteProtocolError(f"a chunk of size {digits[:20]!r}")
        size = int(digits, 16)
        while size == 0 and await reader.readuntil(b"\r\n") != b"\r\n":
            continue  # a trailer: nothing in it is ours
        return size


class Pool:
    """The connections of one client on one event loop."""

    def __init__(self, endpoint: Endpoint, token: str | None, *, idle_max: int = IDLE_CONNECTIONS_MAX) -> None:
        self._endpoint = endpoint
        self._idle_max = idle_max
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        host = "node" if endpoint.unix_path is not None else (endpoint.url or "").partition("//")[2]
        authorization = f"Authorization: Bearer {token}\r\n" if token is not None else ""
        self._headers = f" HTTP/1.1\r\nHost: {host}\r\nAccept: {MSGPACK}\r\n{authorization}".encode()

    async def exchange(self, method: str, target: str, body: Body, content_type: str) -> Response:
        """Send one request and read the head of its response."""
        head = f"{method} {target}".encode() + self._headers
        if body:
            head += b"Content-Type: %b\r\n" % content_type.encode()
        connection = await self._acquire()
        with _Edge(lambda: self.discard(connection)):
            if not isinstance(body, bytes):
                return await self._exchange_stream(connection, head, body)
            connection.writer.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
            return Response(self, connection, await connection.reader.readuntil(b"\r\n\r\n"))

    async def _exchange_stream(self, connection: Connection, head: bytes, body: AsyncIterable[bytes]) -> Response:
        """As `exchange`, chunked. A node that refuses answers before it has read the body: then the rest isn't sent."""
        connection.writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
        sending = asyncio.ensure_future(_send_chunks(connection.writer, body))
        answer = asyncio.ensure_future(connection.reader.readuntil(b"\r\n\r\n"))
        try:
            await asyncio.wait({sending, answer}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not isinstance(error := sending.exception(), ConnectionLost | None):
                raise error
            response = Response(self, connection, await answer)
            if not sending.done():
                response.drop_connection()
            return response
        finally:
            for task in (sending, answer):
                task.cancel()
            await asyncio.gather(sending, answer, return_exceptions=True)

    async def _acquire(self) -> Connection:
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable(now):
                return connection
            self.discard(connection)
        return await self._connect()

    async def _connect(self) -> Connection:
        path = self._endpoint.unix_path
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if path is not None:
                    unix = await _unix_socket(path)
                    reader, writer = await _open_unix(unix)
                else:
                    host, port = self._endpoint.host_port
                    reader, writer = await asyncio.open_connection(host, port, limit=_BUFFER_BYTES)
        except TimeoutError as error:
            raise ConnectTimeout(f"{self._endpoint} did not answer in {CONNECT_TIMEOUT_S:g} s", sent=0) from error
        except OSError as error:
            raise ConnectionLost(f"{self._endpoint} can't be reached: {error.strerror or error}", sent=0) from error
        connection = Connection(reader, writer)
        self._open.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        if len(self._idle) < self._idle_max and connection in self._open:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            self.discard(connection)

    def discard(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.writer.transport.abort()

    def close_nowait(self) -> list[asyncio.StreamWriter]:
        """End every connection; the writers are closed once the loop has gone on."""
        writers = [connection.writer for connection in self._open]
        for connection in list(self._open):
            self.discard(connection)
        self._idle.clear()
        return writers

    def leave(self) -> None:
        """In a forked child: replace the shared sockets. The descriptors stay taken: objects of the parent own them."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for connection in self._open:
            descriptor = connection.writer.get_extra_info("socket").fileno()
            if descriptor >= 0:
                os.dup2(null, descriptor, inheritable=False)
        os.close(null)

    async def close(self) -> None:
        writers = self.close_nowait()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


class _Receiver(asyncio.StreamReaderProtocol, asyncio.BufferedProtocol):
    """Receives into one buffer of its own: asyncio would map and unmap 256 KiB for every answer, however short."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self._reader = reader
        self._into = memoryview(bytearray(_RECEIVE_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._into

    def buffer_updated(self, nbytes: int) -> None:
        self._reader.feed_data(self._into[:nbytes])


async def _open_unix(unix: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_BUFFER_BYTES, loop=loop)
    transport, protocol = await loop.create_unix_connection(lambda: _Receiver(reader, loop), sock=unix)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def open_socket(endpoint: Endpoint) -> socket.socket | None:
    """A socket connected to a node of this host; None for one that is reached by TCP.

    Raises:
        ConnectionLost: There is none.
    """
    if endpoint.unix_path is None:
        return None
    try:
        return await _unix_socket(endpoint.unix_path)
    except OSError as error:
        raise ConnectionLost(f"{endpoint} can't be reached: {error.strerror or error}", sent=0) from error


async def _unix_socket(path: str) -> socket.socket:
    """A connected socket. Connecting never waits: a full queue is EAGAIN, which asyncio would take for a connection."""
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        unix.setblocking(False)
        while True:
            try:
                unix.connect(path)
                return unix
            except BlockingIOError:
                await asyncio.sleep(_QUEUE_FULL_S)
    except BaseException:
        unix.close()
        raise


async def _send_chunks(writer: asyncio.StreamWriter, body: AsyncIterable[bytes]) -> None:
    async for piece in body:
        if piece:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            with _Edge(writer.transport.abort):
                await writer.drain()
    writer.write(b"0\r\n\r\n")


async def _within(quiet_s: float | None, read: Awaitable[T]) -> T:
    async with asyncio.timeout(quiet_s):
        return await read


class _Edge:
    """Where errors of the system and the peer enter: translates them, and gives up the connection after any error."""

    __slots__ = ("_give_up",)

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        self._give_up()
        if isinstance(error, TimeoutError) and error.errno is None:
            raise ReadTimeout("the node did not answer in time") from error
        if isinstance(error, asyncio.IncompleteReadError | OSError):
            raise ConnectionLost(f"the connection to the node was lost: {error}", sent=1) from error
        if isinstance(error, asyncio.LimitOverrunError):
            raise RemoteProtocolError("the head of the answer is too long") from error


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers, names in lower case."""
    lines = head[:-4].decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not code.isdecimal() or not 200 <= int(code) <= 599:
        raise RemoteProtocolError(f"not an answer of a node: {lines[0][:80]!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            raise RemoteProtocolError(f"not a header: {line[:80]!r}")
        headers[name.lower()] = value.strip()
    return int(code), headers


def _body_size(headers: dict[str, str], status: int) -> int:
    """Bytes of the body, 0 for a chunked one."""
    if status == 204:
        return 0
    coding, size = headers.get("transfer-encoding"), headers.get("content-length")
    if (coding is None) == (size is None) or (coding is not None and coding.lower() != "chunked"):
        raise RemoteProtocolError(f"a body without a clear end: transfer-encoding {coding!r}, content-length {size!r}")
    if size is None:
        return 0
    if not size.isdecimal() or len(size) > 18:
        raise RemoteProtocolError(f"a body of {size[:20]!r} bytes")
    return int(size)
