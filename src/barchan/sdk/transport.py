"""Calls of the node's HTTP table: typed bodies, time-outs, one error tree, sending again what is safe to send again."""

import asyncio
import os
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from barchan.errors import (
    ConnectionLost,
    ConnectTimeout,
    InvalidSpec,
    LocalProtocolError,
    ReadTimeout,
    RemoteProtocolError,
)
from barchan.sdk import embedded
from barchan.sdk.endpoint import Endpoint, token_of
from barchan.sdk.http1 import Body, Pool, Response
from barchan.wire.api import MSGPACK, ROUTE, error_from_body

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
RESEND_S = 15.0  # how long a node may take to come back
VALUE_BYTES_MAX = 256 << 20
RECORD_BYTES_MAX = 2 << 20
_DELAY_S, _DELAY_MAX_S = 0.05, 1.0
_ENCODER = msgspec.msgpack.Encoder()


class Call(Generic[T]):
    """One operation of the node with the type of its reply (of one record, for a stream)."""

    def __init__(self, name: str, reply: type[T]) -> None:
        route = ROUTE[name]
        assert route.reply == reply, name
        self.method = route.method
        self.content_type = MSGPACK if route.body_kind == "value" else "application/octet-stream"
        self.decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(reply)
        self._path = route.path

    def target(self, query: Mapping[str, Any] | None = None, **ids: str) -> str:
        """Path and query; values that are None are left out, lists are repeated."""
        path = self._path.format(**{name: _segment(name, value) for name, value in ids.items()})
        pairs = {name: _query_value(value) for name, value in (query or {}).items() if value is not None}
        return f"{path}?{urlencode(pairs, doseq=True, quote_via=quote)}" if pairs else path


def _segment(name: str, value: str) -> str:
    if not value:
        raise InvalidSpec(f"an empty {name}")
    # Dots alone would be resolved on the way like those of a file path.
    return quote(value, safe="") if value.strip(".") else value.replace(".", "%2E")


def _query_value(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def encode(value: msgspec.Struct) -> bytes:
    """A request's body. What does not fit the wire is the caller's mistake."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidSpec(f"{type(value).__name__}: {error}") from error


class Transport:
    """Everything a client and its handles need to reach their node, from any event loop and thread."""

    def __init__(self, endpoint: Endpoint, token: str | None = None) -> None:
        self.endpoint = endpoint
        self._token = token
        self._pools: dict[asyncio.AbstractEventLoop, tuple[Pool, AsyncGenerator[None, None]]] = {}
        self._closed = False
        _transports.add(self)

    async def value(
        self,
        call: Call[T],
        target: str,
        body: Body = b"",
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        resend: bool = True,
        patience_s: float = RESEND_S,
        bytes_max: int = VALUE_BYTES_MAX,
    ) -> T:
        """Call, and decode the reply.

        Args:
            resend: Whether the call may reach the node twice; if not, it is sent again only when it can't have arrived.
            patience_s: How long to go on trying after the connection was lost.
            bytes_max: Bound of the reply.
        """

        async def attempt() -> T:
            response = await self._exchange(call, target, body)
            return _decode(call, await response.read(bytes_max))

        return await self._persist(attempt, timeout_s, resend and isinstance(body, bytes), patience_s)

    async def first_value(self, call: Call[T], target: str) -> T:
        """Call a node that may not be there, which is told at once. Where a call was taken, the address is right."""
        try:
            return await self.value(call, target, patience_s=0)
        except ConnectionLost as loss:
            if not loss.details.get("sent"):
                raise
        return await self.value(call, target)

    async def open(
        self,
        call: Call[Any],
        target: str,
        body: bytes = b"",
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        patience_s: float = RESEND_S,
    ) -> Response:
        """Call, and hand over the response with its body unread; the caller closes it."""
        return await self._persist(lambda: self._exchange(call, target, body), timeout_s, True, patience_s)

    async def content(self, call: Call[bytes], target: str, *, timeout_s: float, bytes_max: int) -> bytes:
        """Call, and return the body as it is."""

        async def attempt() -> bytes:
            return await (await self._exchange(call, target, b"")).read(bytes_max)

        return await self._persist(attempt, timeout_s, True, RESEND_S)

    async def connect(self, attempt: Callable[[Endpoint, str | None], Awaitable[T]], *, timeout_s: float) -> T:
        """Attempt to make a connection of another kind, given where to and the token; a lost one is tried again."""
        if self._closed:
            raise LocalProtocolError("the client is closed")
        return await self._persist(lambda: attempt(self.endpoint, self._token), timeout_s, True, RESEND_S)

    async def _exchange(self, call: Call[Any], target: str, body: Body) -> Response:
        pool = await self._pool()
        response = await pool.exchange(call.method, target, body, call.content_type)
        if response.status >= 300:
            raise error_from_body(await response.read(VALUE_BYTES_MAX), response.content_type)
        return response

    async def _persist(
        self, attempt: Callable[[], Awaitable[T]], timeout_s: float, resend: bool, patience_s: float
    ) -> T:
        """Attempt until it gives an answer, good or bad; a lost connection is tried again while there is patience."""
        delay_s, give_up_at, joined = _DELAY_S, None, False
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    started = time.monotonic()
                    try:
                        return await attempt()
                    except (ConnectionLost, ConnectTimeout) as error:
                        now = time.monotonic()
                        if give_up_at is None or now - started > _DELAY_MAX_S:
                            # First loss, or the node was back for a while: a new outage with patience of its own.
                            delay_s, give_up_at = _DELAY_S, now + patience_s
                        is_unsent = error.details.get("sent") == 0
                        if is_unsent and not joined and self.endpoint.state_dir is not None:
                            joined = True
                            await asyncio.to_thread(embedded.ensure_node, self.endpoint.state_dir, self.endpoint.store)
                            continue
                        if not (resend or is_unsent) or now + delay_s > give_up_at:
                            raise
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, _DELAY_MAX_S)
        except TimeoutError as error:
            raise ReadTimeout(f"no answer from {self.endpoint} in {timeout_s:g} s") from error

    async def _pool(self) -> Pool:
        if self._closed:
            raise LocalProtocolError("the client is closed")
        loop = asyncio.get_running_loop()
        known = self._pools.get(loop)
        if known is not None:
            return known[0]
        for gone in [other for other in self._pools if other.is_closed()]:
            del self._pools[gone]
        pool = Pool(self.endpoint, self._token)
        closer = self._close_with(loop, pool)
        self._pools[loop] = (pool, closer)
        await anext(closer)
        return pool

    async def _close_with(self, loop: asyncio.AbstractEventLoop, pool: Pool) -> AsyncGenerator[None, None]:
        """Suspended for the loop's life: a loop closes its generators before it ends, and this one its pool."""
        try:
            yield
        finally:
            self._pools.pop(loop, None)
            await pool.close()

    async def close(self) -> None:
        """End every connection, of every loop. Calls in progress fail."""
        self._closed = True
        here = asyncio.get_running_loop()
        for loop, (pool, closer) in list(self._pools.items()):
            if loop is here:
                await closer.aclose()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(pool.close_nowait)

    def leave_connections(self) -> None:
        """In a forked child: let go of the parent's connections: the node shall see them end when the parent does."""
        for pool, _ in self._pools.values():
            pool.leave()


def _leave_connections() -> None:
    for transport in list(_transports):
        transport.leave_connections()


def _decode(call: Call[T], body: bytes) -> T:
    try:
        return call.decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"the node's answer can't be read: {error}") from error


async def records(response: Response, call: Call[T], *, quiet_s: float | None) -> AsyncGenerator[T, None]:
    """The records of a stream to its end.

    Raises:
        ReadTimeout: Nothing came for `quiet_s`.
        ConnectionLost: The stream broke off.
    """
    buffer = bytearray()
    async for piece in response.pieces(quiet_s):
        buffer += piece
        at = 0
        while len(buffer) >= at + 4:
            end = at + 4 + int.from_bytes(buffer[at : at + 4], "little")
            if end - at > RECORD_BYTES_MAX:
                raise RemoteProtocolError(f"a record of {end - at} bytes")
            if end > len(buffer):
                break
            yield _decode(call, bytes(buffer[at + 4 : end]))
            at = end
        del buffer[:at]
    if buffer:
        raise ConnectionLost("a stream ended inside a record", sent=1)


_transports: weakref.WeakSet[Transport] = weakref.WeakSet()
_shared: dict[Endpoint, Transport] = {}
os.register_at_fork(after_in_child=_leave_connections)


def shared_transport(endpoint: Endpoint) -> Transport:
    """This process's transport for handles that came out of a pickle; it lives as long as the process."""
    transport = _shared.get(endpoint)
    if transport is None:
        transport = _shared.setdefault(endpoint, Transport(endpoint, token_of(endpoint)))
    return transport
