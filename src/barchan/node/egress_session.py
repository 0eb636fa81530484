"""One allowed connection of the egress proxy: a tunnel, or one plain request and its answer."""

import asyncio
import socket
from typing import NoReturn

from barchan.core.egress import Target, parse_host
from barchan.errors import BarchanError, ConnectionLost, Denied, ReadTimeout, RemoteProtocolError, TransportError
from barchan.node import egress_http as http
from barchan.node import egress_tls as tls
from barchan.node.egress_relay import CHUNK_BYTES, LINGER_S, IdleTimer, Moved, end_writing, pump, read_head

BODY_READ_BYTES = 16 << 10  # taking a body of one-byte chunks apart holds the loop for milliseconds, no longer


class Session:
    """Relays between the guest's connection and the one to the server; closes neither.

    `can_answer` is true while nothing of a final answer has gone to the guest.
    """

    def __init__(
        self, client: socket.socket, upstream: socket.socket, *, head_s: float, idle_s: float, up: Moved, down: Moved
    ) -> None:
        self.can_answer = True
        self._client = client
        self._upstream = upstream
        self._head_s = head_s
        self._idle_s = idle_s
        self._up = up
        self._down = down

    async def run(self, request: http.Request, early: bytes) -> None:
        """Serve `request`, of which `early` has come after the head, to its end.

        Raises:
            Denied: The tunnel's TLS asks for another name.
            RemoteProtocolError: What the guest sent is malformed.
            ReadTimeout: Nothing moved for `idle_s`.
            TransportError: The server gave no answer.
            OSError: Either peer broke its connection off.
        """
        relay = self._tunnel if request.tunnel else self._forward
        try:
            async with IdleTimer(self._idle_s) as timer:
                await relay(request, early, timer)
        except BaseExceptionGroup as group:
            _raise_leading(group)
        except TimeoutError as error:
            raise ReadTimeout(f"nothing moved for {self._idle_s:g} s") from error

    async def _tunnel(self, request: http.Request, early: bytes, timer: IdleTimer) -> None:
        self.can_answer = False
        await asyncio.get_running_loop().sock_sendall(self._client, http.TUNNEL_OPEN)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tunnel_up(request.target, early, timer))
            group.create_task(pump(self._upstream, self._client, timer.touching(self._down)))

    async def _tunnel_up(self, target: Target, early: bytes, timer: IdleTimer) -> None:
        loop = asyncio.get_running_loop()
        data = early or await loop.sock_recv(self._client, CHUNK_BYTES)
        if data[:1] == bytes([tls.HANDSHAKE_RECORD]):
            try:
                async with asyncio.timeout(self._head_s):
                    data = await self._checked_hello(target, data)
            except TimeoutError as error:
                raise RemoteProtocolError("the TLS ClientHello did not come in time", status=408) from error
        await pump(self._client, self._upstream, timer.touching(self._up), data)

    async def _checked_hello(self, target: Target, data: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        while (hello := tls.client_hello(data)) is None:
            more = await loop.sock_recv(self._client, CHUNK_BYTES)
            if not more:
                raise RemoteProtocolError("the TLS ClientHello is cut off", status=400)
            data += more
        name = tls.server_name(hello)
        if name is None:
            return data
        try:
            host = parse_host(name)[0]
        except ValueError as error:
            raise RemoteProtocolError(f"TLS server name: {error}", status=400) from error
        if host != target.host:
            raise Denied(f"the tunnel to {target.host} asks for the TLS server name {host}")
        return data

    async def _forward(self, request: http.Request, early: bytes, timer: IdleTimer) -> None:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send(request, early, timer))
            await self._answer(timer)
            await asyncio.wait({sending}, timeout=LINGER_S)  # to the guest's end of file: see answer_and_drain
            sending.cancel()

    async def _send(self, request: http.Request, early: bytes, timer: IdleTimer) -> None:
        """Send the one request. More bytes of the guest are dropped, its end of file is passed on."""
        loop = asyncio.get_running_loop()
        body = http.body_of(request)
        piece = request.head + body.feed(early)
        while True:
            try:
                await loop.sock_sendall(self._upstream, piece)
            except OSError:
                break  # the server reads no further; why, its answer says
            timer.touching(self._up)(len(piece))
            if body.is_done:
                break
            await asyncio.sleep(0)
            data = await loop.sock_recv(self._client, BODY_READ_BYTES)
            if not data:
                raise RemoteProtocolError("the request's body is cut off", status=400)
            piece = body.feed(data)
        dropped = await loop.sock_recv(self._client, CHUNK_BYTES)
        while dropped:
            await asyncio.sleep(0)
            dropped = await loop.sock_recv(self._client, CHUNK_BYTES)
        end_writing(self._upstream)

    async def _answer(self, timer: IdleTimer) -> None:
        loop = asyncio.get_running_loop()
        rest = b""
        while True:
            head, rest = await self._answer_head(rest)
            if http.answer_status(head) >= 200:
                break
            await loop.sock_sendall(self._client, head)
            await asyncio.sleep(0)
        self.can_answer = False
        await loop.sock_sendall(self._client, http.answer_head(head))
        await pump(self._upstream, self._client, timer.touching(self._down), rest)

    async def _answer_head(self, early: bytes) -> tuple[bytes, bytes]:
        try:
            got = await read_head(self._upstream, http.ANSWER_HEAD_BYTES_MAX, early)
        except RemoteProtocolError as error:
            raise TransportError(f"the server's answer is not HTTP/1.1: {error}") from error
        except OSError as error:
            raise ConnectionLost(f"the server broke the connection off: {error.strerror}") from error
        if got is None:
            raise ConnectionLost("the server closed the connection without an answer")
        return got


def _raise_leading(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the one error that says most: a judgement before a broken connection, which may follow from it."""
    ranked = sorted(group.exceptions, key=lambda error: not isinstance(error, BarchanError))
    raise ranked[0] from group
