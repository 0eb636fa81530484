"""Connections that clients take over for calls: many calls in flight on one, in frames, without HTTP for each."""

import asyncio
import os
from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web

from barchan.backends.function.worker import Call, Outcome
from barchan.errors import BarchanError, CapacityError, Conflict, InvalidSpec, RemoteProtocolError
from barchan.model.calls import CALL_TIMEOUT_S_MAX
from barchan.node.calls import RETRY_AFTER_MS, Calls
from barchan.node.replies import reply
from barchan.node.sandboxes import Sandboxes
from barchan.wire import api
from barchan.wire import calls as wire

IN_FLIGHT_MAX = 2000  # of one connection
HEAD = (
    f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: {wire.PROTOCOL}\r\nConnection: Upgrade\r\nContent-Length: 0\r\n\r\n"
)


class CallHandlers:
    """The routes of calls."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._calls = sandboxes.calls

    async def call_info(self, request: web.Request) -> web.StreamResponse:
        return reply(request, self._calls.info())

    async def connect(self, request: web.Request) -> web.StreamResponse:
        """Take the connection over. Returns when it has ended."""
        if request.headers.get("Upgrade", "").lower() != wire.PROTOCOL:
            raise InvalidSpec(f"this is no request but the beginning of a connection: send `Upgrade: {wire.PROTOCOL}`")
        transport = request.transport
        if transport is None:
            raise Conflict("the connection has ended")
        connection = _Connection(self._calls, transport, request.protocol.connection_lost)
        transport.set_protocol(connection)
        transport.write(HEAD.encode())
        await connection.ended
        return web.Response()


class _Connection(asyncio.Protocol):
    """One client's. What it gets wrong ends it."""

    def __init__(
        self, calls: Calls, transport: asyncio.Transport, lost: Callable[[BaseException | None], None]
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls = calls
        self._transport = transport
        self._lost = lost
        self._frames = wire.FrameReader(wire.REQUEST_BYTES_MAX)
        self._in_flight: dict[int, Call] = {}
        calls.connections.add(transport)

    def data_received(self, data: bytes) -> None:
        try:
            for found in self._frames.feed(data):
                self._act(found)
        except RemoteProtocolError:
            self._transport.abort()

    def _act(self, found: wire.Frame) -> None:
        if found.kind == wire.Kind.CANCEL:
            call = self._in_flight.pop(found.number, None)
            if call is not None:
                self._calls.cancel(self, call)
        elif found.kind == wire.Kind.CALL and found.number not in self._in_flight:
            self._begin(found)
        else:
            raise RemoteProtocolError(f"a client sent a frame of kind {found.kind}")

    def _begin(self, found: wire.Frame) -> None:
        asked = wire.decode_call(found.body)
        wrong = _refusal(asked, len(self._in_flight))
        if wrong is not None:
            return self._tell(found.number, wrong)
        done = partial(self._done, found.number)
        call = self._in_flight[found.number] = Call(asked.work, asked.timeout_s, asked.output_bytes_max, done)
        self._calls.submit(self, asked.spec, call)

    def _tell(self, number: int, error: BarchanError) -> None:
        self._transport.write(wire.frame(wire.Kind.ERROR, number, msgspec.msgpack.encode(api.error_body(error))))

    def _done(self, number: int, outcome: Outcome | BarchanError) -> None:
        if self._in_flight.pop(number, None) is None or self._transport.is_closing():
            return
        if isinstance(outcome, BarchanError):
            return self._tell(number, outcome)
        number_of_signal = os.WTERMSIG(outcome.wstatus) if os.WIFSIGNALED(outcome.wstatus) else None
        told = wire.Reply(
            exit_code=128 + number_of_signal if number_of_signal else os.WEXITSTATUS(outcome.wstatus),
            signal=number_of_signal,
            timed_out=outcome.timed_out,
            oom_killed=outcome.oom_killed,
            stdout=outcome.stdout,
            stderr=outcome.stderr,
            stdout_bytes=outcome.stdout_bytes,
            stderr_bytes=outcome.stderr_bytes,
            user_s=outcome.user_s,
            system_s=outcome.system_s,
            max_rss_kib=outcome.max_rss_kib,
            wall_s=outcome.wall_s,
            value=outcome.value,
        )
        self._transport.write(wire.encode_reply(number, told))

    # a client that does not read its answers is not heard either, and what it has asked for does not begin

    def pause_writing(self) -> None:
        self._transport.pause_reading()
        self._calls.hold(self)

    def resume_writing(self) -> None:
        self._transport.resume_reading()
        self._calls.go_on(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._calls.connections.discard(self._transport)
        self._calls.leave(self, self._in_flight.values())
        self._in_flight.clear()
        if not self.ended.done():
            self.ended.set_result(None)
        self._lost(error)


def _refusal(asked: wire.Asked, in_flight: int) -> BarchanError | None:
    """Why a call is not made, if it asks for more than it may have."""
    if not 0 < asked.timeout_s <= CALL_TIMEOUT_S_MAX:
        return InvalidSpec(f"{asked.timeout_s} s: a call has more than 0 and at most {CALL_TIMEOUT_S_MAX:g}")
    if asked.output_bytes_max > wire.OUTPUT_BYTES_MAX:
        return InvalidSpec(f"{asked.output_bytes_max} bytes of output: a call has at most {wire.OUTPUT_BYTES_MAX}")
    if in_flight >= IN_FLIGHT_MAX:
        what = f"{IN_FLIGHT_MAX} calls of this connection are under way, its bound"
        return CapacityError(what, retry_after_ms=RETRY_AFTER_MS)
    return None
