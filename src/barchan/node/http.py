"""The node's HTTP server: the table of `wire.api` carried out."""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import msgspec
from aiohttp import web

from barchan.backends.guest import GuestProcess
from barchan.errors import BackendError, BarchanError, Denied, InvalidSpec
from barchan.image.store import image_info
from barchan.model.gc import GcRequest
from barchan.model.image import NameRequest, RebaseRequest
from barchan.model.lease import LeaseBeat, PreemptRequest
from barchan.model.node import Killed, LeaseRequest, Stopped
from barchan.model.sandbox import ExecRequest, OutputChunk, SandboxSpec, StartRequest
from barchan.node import gc, snapshots, upkeep
from barchan.node.collect import Stream, encode_chunk, output_chunk
from barchan.node.handlers import Handlers
from barchan.node.http_calls import CallHandlers
from barchan.node.http_files import FileHandlers
from barchan.node.http_screen import ScreenHandlers
from barchan.node.http_state import StateHandlers
from barchan.node.live import Live
from barchan.node.replies import STREAMING, begin_stream, flag, is_packed, labels_of, number, reply, seconds
from barchan.node.sandboxes import Sandboxes
from barchan.wire import api, openapi
from barchan.wire import calls as wire_calls
from barchan.wire import guest as wire
from barchan.wire.api import ROUTES, Awake, Empty, Signalled, StdinWritten

HEARTBEAT_S = 5.0
WAIT_S_MAX = 60.0
LEFT = 499  # the status of what nobody reads any more; it is not sent
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)


class Server(Handlers):
    """One handler method per route of the table, named like it."""

    def __init__(self, sandboxes: Sandboxes, token: str | None, stop: asyncio.Event, pid: int) -> None:
        super().__init__(sandboxes)
        self._token = token
        self._stop = stop
        self._pid = pid

    def application(self) -> web.Application:
        app = web.Application(client_max_size=api.BODY_BYTES_MAX)
        groups = (self, FileHandlers(self.sandboxes), StateHandlers(self.sandboxes), ScreenHandlers(self.sandboxes))
        calls = CallHandlers(self.sandboxes)
        for route in ROUTES:
            handler = next(getattr(group, route.name) for group in (*groups, calls) if hasattr(group, route.name))
            app.router.add_route(route.method, route.path, self._guarded(handler))
        app.router.add_get("/openapi.json", self._guarded(self.openapi))
        app.router.add_get(wire_calls.PATH, self._guarded(calls.connect))
        return app

    def _guarded(self, handler: Handler) -> Handler:
        """Check the token, and turn errors into their bodies."""

        async def serve(request: web.Request) -> web.StreamResponse:
            try:
                self._authorise(request)
                return await handler(request)
            except BarchanError as error:
                if STREAMING in request:
                    return _cut_off(request)
                return reply(request, api.error_body(error), status=api.http_status(error))
            except (asyncio.CancelledError, web.HTTPException):
                raise
            except ConnectionError as error:
                if request.transport is not None and not request.transport.is_closing():
                    raise
                _log.info("%s %s: its client has left: %s", request.method, request.raw_path, error)
                return request.get(STREAMING) or web.Response(status=LEFT)
            except Exception as error:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"{request.method} {request.path} failed", "exception": error}
                )
                if STREAMING in request:
                    return _cut_off(request)
                failure = BackendError(f"the node failed at this request: {type(error).__name__}: {error}")
                return reply(request, api.error_body(failure), status=500)

        return serve

    def _authorise(self, request: web.Request) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token.encode()):
            raise Denied("this node wants its bearer token (Authorization: Bearer ...)")

    # the node

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(openapi.describe())

    async def node_info(self, request: web.Request) -> web.StreamResponse:
        return reply(request, upkeep.node_info(self.sandboxes, self._pid))

    async def node_shutdown(self, request: web.Request) -> web.StreamResponse:
        ended = await self.sandboxes.shutdown(keep=flag(request, "keep", default=False))
        snapshots_ = len(await self.sandboxes.tree.listed({}))
        self._stop.set()
        return reply(request, Stopped(ended=ended, asleep=self.sandboxes.tiers.stored, snapshots=snapshots_))

    async def lease_hold(self, request: web.Request) -> web.StreamResponse:
        asked: LeaseRequest = await self.body(request, "lease_hold")
        lease = self.sandboxes.leases.hold(asked)
        try:
            response = await begin_stream(request)
            while not lease.dismissed.is_set():
                await response.write(encode_chunk(lease.info(), packed=is_packed(request)))
                with suppress(TimeoutError):
                    await asyncio.wait_for(lease.dismissed.wait(), HEARTBEAT_S)
            if lease.preemption is not None:
                await response.write(encode_chunk(lease.info(), packed=is_packed(request)))
            return response
        finally:
            self.sandboxes.leases.release(lease, asked.holder)
            self.sandboxes.touch()

    async def lease_list(self, request: web.Request) -> web.StreamResponse:
        over = self.sandboxes.journal.leases_over() if flag(request, "ended", default=False) else []
        return reply(request, [*over, *self.sandboxes.leases.list()])

    async def lease_beat(self, request: web.Request) -> web.StreamResponse:
        asked: LeaseBeat = await self.body(request, "lease_beat")
        return reply(request, self.sandboxes.leases.beat(request.match_info["lease_id"], asked))

    async def lease_preempt(self, request: web.Request) -> web.StreamResponse:
        asked: PreemptRequest = await self.body(request, "lease_preempt")
        lease_id = request.match_info["lease_id"]
        self.sandboxes.leases.get(lease_id)  # NotFound is no stream yet
        response = await begin_stream(request)
        async with aclosing(self.sandboxes.preempting.preempt(lease_id, asked)) as done:
            async for change in done:
                await response.write(encode_chunk(change, packed=is_packed(request)))
        await response.write_eof()
        return response

    async def lease_end(self, request: web.Request) -> web.StreamResponse:
        return reply(request, Killed(killed=await self.sandboxes.end_lease(request.match_info["lease_id"])))

    async def image_list(self, request: web.Request) -> web.StreamResponse:
        return reply(request, await asyncio.to_thread(self.sandboxes.images.list))

    async def image(self, request: web.Request) -> web.StreamResponse:
        return reply(request, image_info(await self.sandboxes.templates.resolve(request.match_info["name"])))

    async def image_remove(self, request: web.Request) -> web.StreamResponse:
        return reply(request, await snapshots.remove_image(self.sandboxes, request.match_info["name"]))

    async def image_gc(self, request: web.Request) -> web.StreamResponse:
        asked: GcRequest = await self.body(request, "image_gc")
        return reply(request, await gc.collect(self.sandboxes, asked))

    async def layer_list(self, request: web.Request) -> web.StreamResponse:
        return reply(request, await gc.layers(self.sandboxes))

    async def image_name(self, request: web.Request) -> web.StreamResponse:
        asked: NameRequest = await self.body(request, "image_name")
        return reply(request, await self.sandboxes.templates.name(asked))

    async def image_rebase(self, request: web.Request) -> web.StreamResponse:
        asked: RebaseRequest = await self.body(request, "image_rebase")
        async with aclosing(self.sandboxes.templates.rebase(asked)) as done:
            first = await anext(done, None)  # a failure before the first image is still an HTTP error
            response = await begin_stream(request)
            if first is not None:
                await response.write(encode_chunk(first, packed=is_packed(request)))
            async for rebased in done:
                await response.write(encode_chunk(rebased, packed=is_packed(request)))
            await response.write_eof()
            return response

    # sandboxes

    async def create(self, request: web.Request) -> web.StreamResponse:
        spec: SandboxSpec = await self.body(request, "create")
        return reply(request, await self.sandboxes.create(spec))

    async def list(self, request: web.Request) -> web.StreamResponse:
        found = self.sandboxes.matching(labels_of(request), request.query.get("create_id"))
        return reply(request, [live.info(self.sandboxes.node_id) for live in found if live.is_here])

    async def kill_many(self, request: web.Request) -> web.StreamResponse:
        labels, create_id = labels_of(request), request.query.get("create_id")
        if not labels and create_id is None and request.query.get("all") != "true":
            raise InvalidSpec("say which: label=KEY=VALUE, create_id=ID, or all=true for every sandbox of this node")
        found = self.sandboxes.matching(labels, create_id)
        await asyncio.gather(*(self.sandboxes.end(live, "killed") for live in found))
        return reply(request, Killed(killed=len(found)))

    async def info(self, request: web.Request) -> web.StreamResponse:
        return reply(request, self.sandboxes.info(request.match_info["sandbox_id"]))

    async def kill(self, request: web.Request) -> web.StreamResponse:
        sandbox_id = request.match_info["sandbox_id"]
        live = self.sandboxes.live.get(sandbox_id)
        if live is None:
            self.sandboxes.info(sandbox_id)  # NotFound unless it once lived
            return reply(request, Killed(killed=0))
        await self.sandboxes.end(live, "killed")
        return reply(request, Killed(killed=1))

    async def stats(self, request: web.Request) -> web.StreamResponse:
        async with self.live(request) as live:
            return reply(request, live.stats())

    async def denials(self, request: web.Request) -> web.StreamResponse:
        return reply(request, self.sandboxes.get(request.match_info["sandbox_id"]).denials())

    # processes

    async def exec(self, request: web.Request) -> web.StreamResponse:
        asked: ExecRequest = await self.body(request, "exec")
        async with self.live(request) as live:
            return reply(request, await live.processes.exec(asked))

    async def awake(self, request: web.Request) -> web.StreamResponse:
        live = self.sandboxes.get(request.match_info["sandbox_id"])
        response: web.StreamResponse | None = None
        if flag(request, "again", default=False) and live.phase != "ready":
            async with self.sandboxes.preempting.serving(live):
                response = await begin_stream(request)
                await response.write(encode_chunk(_awake(live), packed=is_packed(request)))
                await self.sandboxes.tiers.until_woken(live)
        async with self.live(request) as live:
            response = response or await begin_stream(request)
            while live.ending is None:
                change = live.clock.change
                await response.write(encode_chunk(_awake(live), packed=is_packed(request)))
                with suppress(TimeoutError):
                    await asyncio.wait_for(change.wait(), HEARTBEAT_S)
            return response

    async def start(self, request: web.Request) -> web.StreamResponse:
        asked: StartRequest = await self.body(request, "start")
        async with self.live(request) as live:
            return reply(request, await live.processes.start(asked))

    async def process_list(self, request: web.Request) -> web.StreamResponse:
        async with self.live(request) as live:
            return reply(request, await live.processes.listed())

    @asynccontextmanager
    async def _process(
        self, request: web.Request, *, attached: bool = False
    ) -> AsyncIterator[tuple[Live, GuestProcess]]:
        async with self.live(request, attached=attached) as live:
            yield live, await live.handle.guest.find(request.match_info["process_id"])

    async def process_info(self, request: web.Request) -> web.StreamResponse:
        async with self._process(request) as (live, process):
            wait_s = min(WAIT_S_MAX, seconds(request, "wait_s"))
            if wait_s > 0 and process.exit is None:
                due = asyncio.get_running_loop().create_future()
                either: set[asyncio.Future[Any]] = {process.ended, due}
                timer = live.clock.call_later(wait_s, due.set_result, None)
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    timer.cancel()
            if process.exit is None and process.ended.done():
                process.ended.result()  # the guest is gone: its error is the answer
            return reply(request, live.processes.info(process))

    async def output(self, request: web.Request) -> web.StreamResponse:
        stream = Stream(number(request, "stdout", 0), number(request, "stderr", 0))
        follow, packed = flag(request, "follow", default=True), is_packed(request)
        response: web.StreamResponse | None = None
        live = self.sandboxes.get(request.match_info["sandbox_id"])
        if flag(request, "again", default=False) and live.phase != "ready":  # it only listens on: that wakes nothing
            async with self.sandboxes.preempting.serving(live):
                response = await begin_stream(request)
                await self.sandboxes.tiers.until_woken(live)
        is_idle = flag(request, "idle", default=False)
        async with self._process(request, attached=is_idle) as (live, process):
            spool = await process.add_reader(stream)
            try:
                response = response or await begin_stream(request)
                async for chunk in _chunks(live, process, stream, None if follow else spool):
                    await response.write(encode_chunk(chunk, packed=packed))
                await response.write_eof()
                return response
            finally:
                process.remove_reader(stream)

    async def stdin(self, request: web.Request) -> web.StreamResponse:
        async with self._process(request) as (live, process):
            offset, eof = number(request, "offset", 0), flag(request, "eof", default=False)
            data = await request.read()
            try:
                reached = await live.processes.write_stdin(process, offset, data, eof=eof)
            except OSError as error:
                raise InvalidSpec(f"process {process.process_id} takes no more input: {error.strerror}") from error
            return reply(request, StdinWritten(offset=reached))

    async def signal(self, request: web.Request) -> web.StreamResponse:
        asked: api.SignalRequest = await self.body(request, "signal")
        async with self._process(request) as (live, process):
            return reply(request, Signalled(signalled=await live.processes.signal(process, asked.signal, asked.scope)))

    async def resize(self, request: web.Request) -> web.StreamResponse:
        asked: api.ResizeRequest = await self.body(request, "resize")
        async with self._process(request) as (live, process):
            try:
                await live.handle.guest.request(lambda tag: wire.resize(tag, process.handle, asked.rows, asked.cols))
            except OSError as error:
                raise InvalidSpec(
                    f"process {process.process_id} has no terminal: {error.strerror} (try: start it with pty=True)"
                ) from error
            return reply(request, Empty())


def _awake(live: Live) -> Awake:
    return Awake(is_awake=not live.clock.is_stopped, slept_s=live.clock.slept_s)


async def _chunks(
    live: Live, process: GuestProcess, stream: Stream, until: wire.Spool | None
) -> AsyncIterator[OutputChunk]:
    """Everything from the stream's offsets on: output, `exit`, more output of background children, `end`.

    `until`: stop where the spool ended at the time of asking.
    """
    told_exit = False
    while True:
        chunk = stream.take_nowait()
        if chunk is not None:
            yield output_chunk(*chunk)
            process.acknowledge(chunk[0])
            continue
        if until is not None and _reached(stream, until):
            break
        if stream.exited and not told_exit:
            told_exit = True
            yield OutputChunk("exit", 0, msgspec.json.encode(live.processes.info(process)))
            continue
        if told_exit and process.all_closed:
            break
        await stream.changed()
    yield OutputChunk("end", 0, b"")


def _reached(stream: Stream, until: wire.Spool) -> bool:
    return stream.next_offset[wire.STDOUT] >= until.stdout_head and stream.next_offset[wire.STDERR] >= until.stderr_head


def _cut_off(request: web.Request) -> web.StreamResponse:
    """End a response that has begun without its proper end, so that no reader takes it for whole."""
    if request.transport is not None:
        request.transport.abort()
    response: web.StreamResponse = request[STREAMING]
    return response
