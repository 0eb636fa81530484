"""The node's HTTP server: the table of `wire.api` carried out."""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from aiohttp import web

from barchan.backends.guest import GuestProcess
from barchan.errors import BackendError, BarchanError, Denied, InvalidSpec
from barchan.image.store import image_info
from barchan.model.gc import GcRequest
from barchan.model.image import NameRequest, RebaseRequest
from barchan.model.node import Killed, LeaseRequest, SnapshotRequest
from barchan.model.sandbox import ExecRequest, OutputChunk, SandboxSpec, StartRequest
from barchan.node import gc, snapshots
from barchan.node.collect import Stream, encode_chunk, output_chunk
from barchan.node.live import Live
from barchan.node.sandboxes import Sandboxes
from barchan.wire import api, openapi
from barchan.wire import guest as wire
from barchan.wire.api import MSGPACK, ROUTES, Empty, Signalled, StdinWritten

HEARTBEAT_S = 5.0
WAIT_S_MAX = 60.0
_PIECE_BYTES = 256 << 10
OFFSET_MAX = (1 << 63) - 1
_STREAMING = web.RequestKey("streaming", web.StreamResponse)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """One handler method per route of the table, named like it."""

    def __init__(self, sandboxes: Sandboxes, token: str | None, stop: asyncio.Event, pid: int) -> None:
        self._sandboxes = sandboxes
        self._token = token
        self._stop = stop
        self._pid = pid
        self._decoders: dict[str, tuple[Any, Any]] = {
            route.name: (msgspec.json.Decoder(route.body), msgspec.msgpack.Decoder(route.body))
            for route in ROUTES
            if route.body_kind == "value"
        }

    def application(self) -> web.Application:
        app = web.Application(client_max_size=api.BODY_BYTES_MAX)
        for route in ROUTES:
            app.router.add_route(route.method, route.path, self._guarded(getattr(self, route.name)))
        app.router.add_get("/openapi.json", self._guarded(self.openapi))
        return app

    def _guarded(self, handler: Handler) -> Handler:
        """Check the token, and turn errors into their bodies."""

        async def serve(request: web.Request) -> web.StreamResponse:
            try:
                self._authorise(request)
                return await handler(request)
            except BarchanError as error:
                if _STREAMING in request:
                    return _cut_off(request)
                return _reply(request, api.error_body(error), status=api.http_status(error))
            except (asyncio.CancelledError, web.HTTPException, ConnectionError):
                raise
            except Exception as error:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"{request.method} {request.path} failed", "exception": error}
                )
                if _STREAMING in request:
                    return _cut_off(request)
                failure = BackendError(f"the node failed at this request: {type(error).__name__}: {error}")
                return _reply(request, api.error_body(failure), status=500)

        return serve

    def _authorise(self, request: web.Request) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self._token.encode()):
            raise Denied("this node wants its bearer token (Authorization: Bearer ...)")

    async def _body(self, request: web.Request, name: str) -> Any:
        raw = await request.read()
        as_json, as_msgpack = self._decoders[name]
        try:
            return (as_msgpack if request.content_type == MSGPACK else as_json).decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidSpec(f"the body does not fit {name}: {error}") from error

    def _live(self, request: web.Request) -> Live:
        return self._sandboxes.get(request.match_info["sandbox_id"])

    # the node

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(openapi.describe())

    async def node_info(self, request: web.Request) -> web.StreamResponse:
        return _reply(request, self._sandboxes.node_info(self._pid))

    async def node_shutdown(self, request: web.Request) -> web.StreamResponse:
        await self._sandboxes.shutdown()
        self._stop.set()
        return _reply(request, Empty())

    async def lease_hold(self, request: web.Request) -> web.StreamResponse:
        asked: LeaseRequest = await self._body(request, "lease_hold")
        lease = self._sandboxes.leases.hold(asked)
        try:
            response = await _stream(request)
            while not lease.ended.is_set():
                await response.write(encode_chunk(lease.info(), packed=_packed(request)))
                with suppress(TimeoutError):
                    await asyncio.wait_for(lease.ended.wait(), HEARTBEAT_S)
            return response
        finally:
            self._sandboxes.leases.release(lease)
            self._sandboxes.touch()

    async def lease_list(self, request: web.Request) -> web.StreamResponse:
        return _reply(request, self._sandboxes.leases.list())

    async def lease_end(self, request: web.Request) -> web.StreamResponse:
        return _reply(request, Killed(killed=await self._sandboxes.end_lease(request.match_info["lease_id"])))

    async def image_list(self, request: web.Request) -> web.StreamResponse:
        return _reply(request, await asyncio.to_thread(self._sandboxes.images.list))

    async def image(self, request: web.Request) -> web.StreamResponse:
        return _reply(request, image_info(await self._sandboxes.templates.resolve(request.match_info["name"])))

    async def image_remove(self, request: web.Request) -> web.StreamResponse:
        return _reply(request, await snapshots.remove_image(self._sandboxes, request.match_info["name"]))

    async def image_gc(self, request: web.Request) -> web.StreamResponse:
        asked: GcRequest = await self._body(request, "image_gc")
        return _reply(request, await gc.collect(self._sandboxes, asked))

    async def layer_list(self, request: web.Request) -> web.StreamResponse:
        return _reply(request, await gc.layers(self._sandboxes))

    async def image_name(self, request: web.Request) -> web.StreamResponse:
        asked: NameRequest = await self._body(request, "image_name")
        return _reply(request, await self._sandboxes.templates.name(asked))

    async def image_rebase(self, request: web.Request) -> web.StreamResponse:
        asked: RebaseRequest = await self._body(request, "image_rebase")
        async with aclosing(self._sandboxes.templates.rebase(asked)) as done:
            first = await anext(done, None)  # a failure before the first image is still an HTTP error
            response = await _stream(request)
            if first is not None:
                await response.write(encode_chunk(first, packed=_packed(request)))
            async for rebased in done:
                await response.write(encode_chunk(rebased, packed=_packed(request)))
            await response.write_eof()
            return response

    # sandboxes

    async def create(self, request: web.Request) -> web.StreamResponse:
        spec: SandboxSpec = await self._body(request, "create")
        return _reply(request, await self._sandboxes.create(spec))

    async def list(self, request: web.Request) -> web.StreamResponse:
        found = self._sandboxes.matching(_labels(request), request.query.get("create_id"))
        return _reply(request, [live.info(self._sandboxes.node_id) for live in found if live.phase == "ready"])

    async def kill_many(self, request: web.Request) -> web.StreamResponse:
        labels, create_id = _labels(request), request.query.get("create_id")
        if not labels and create_id is None and request.query.get("all") != "true":
            raise InvalidSpec("say which: label=KEY=VALUE, create_id=ID, or all=true for every sandbox of this node")
        found = self._sandboxes.matching(labels, create_id)
        await asyncio.gather(*(self._sandboxes.end(live, "killed") for live in found))
        return _reply(request, Killed(killed=len(found)))

    async def info(self, request: web.Request) -> web.StreamResponse:
        return _reply(request, self._sandboxes.info(request.match_info["sandbox_id"]))

    async def kill(self, request: web.Request) -> web.StreamResponse:
        sandbox_id = request.match_info["sandbox_id"]
        live = self._sandboxes.live.get(sandbox_id)
        if live is None:
            self._sandboxes.info(sandbox_id)  # NotFound unless it once lived
            return _reply(request, Killed(killed=0))
        await self._sandboxes.end(live, "killed")
        return _reply(request, Killed(killed=1))

    async def stats(self, request: web.Request) -> web.StreamResponse:
        return _reply(request, self._live(request).handle.stats())

    async def snapshot(self, request: web.Request) -> web.StreamResponse:
        asked: SnapshotRequest = await self._body(request, "snapshot")
        return _reply(request, await snapshots.snapshot(self._sandboxes, self._live(request), asked))

    # processes

    async def exec(self, request: web.Request) -> web.StreamResponse:
        asked: ExecRequest = await self._body(request, "exec")
        live = self._live(request)
        live.requests += 1
        try:
            return _reply(request, await live.processes.exec(asked))
        finally:
            live.requests -= 1

    async def start(self, request: web.Request) -> web.StreamResponse:
        asked: StartRequest = await self._body(request, "start")
        return _reply(request, await self._live(request).processes.start(asked))

    async def process_list(self, request: web.Request) -> web.StreamResponse:
        return _reply(request, await self._live(request).processes.listed())

    async def _process(self, request: web.Request) -> tuple[Live, GuestProcess]:
        live = self._live(request)
        return live, await live.handle.guest.find(request.match_info["process_id"])

    async def process_info(self, request: web.Request) -> web.StreamResponse:
        live, process = await self._process(request)
        wait_s = min(WAIT_S_MAX, _seconds(request, "wait_s"))
        if wait_s > 0 and process.exit is None:
            await asyncio.wait([process.ended], timeout=wait_s)
        if process.exit is None and process.ended.done():
            process.ended.result()  # the guest is gone: its error is the answer
        return _reply(request, live.processes.info(process))

    async def output(self, request: web.Request) -> web.StreamResponse:
        live, process = await self._process(request)
        stream = Stream(_number(request, "stdout", 0), _number(request, "stderr", 0))
        follow = _flag(request, "follow", default=True)
        packed = _packed(request)
        spool = await process.add_reader(stream)
        try:
            response = await _stream(request)
            async for chunk in _chunks(live, process, stream, None if follow else spool):
                await response.write(encode_chunk(chunk, packed=packed))
            await response.write_eof()
            return response
        finally:
            process.remove_reader(stream)

    async def stdin(self, request: web.Request) -> web.StreamResponse:
        live, process = await self._process(request)
        offset, eof = _number(request, "offset", 0), _flag(request, "eof", default=False)
        data = await request.read()
        try:
            reached = await live.processes.write_stdin(process, offset, data, eof=eof)
        except OSError as error:
            raise InvalidSpec(f"process {process.process_id} takes no more input: {error.strerror}") from error
        return _reply(request, StdinWritten(offset=reached))

    async def signal(self, request: web.Request) -> web.StreamResponse:
        asked: api.SignalRequest = await self._body(request, "signal")
        live, process = await self._process(request)
        return _reply(request, Signalled(signalled=await live.processes.signal(process, asked.signal, asked.scope)))

    async def resize(self, request: web.Request) -> web.StreamResponse:
        asked: api.ResizeRequest = await self._body(request, "resize")
        live, process = await self._process(request)
        try:
            await live.handle.guest.request(lambda tag: wire.resize(tag, process.handle, asked.rows, asked.cols))
        except OSError as error:
            raise InvalidSpec(f"process {process.process_id} has no terminal: {error.strerror}") from error
        return _reply(request, Empty())

    # files

    async def file_read(self, request: web.Request) -> web.StreamResponse:
        offset, length = _number(request, "offset", 0), _number(request, "length", -1, least=-1)
        return await self._bytes_out(request, "read", str(offset), str(length))

    async def tar_read(self, request: web.Request) -> web.StreamResponse:
        return await self._bytes_out(request, "tar-out")

    async def _bytes_out(self, request: web.Request, operation: str, *operands: str) -> web.StreamResponse:
        live = self._live(request)
        path = _path(live, request, "path")
        pieces = live.files.stream_out(operation, path, *operands, user=request.query.get("user"))
        try:
            first = await anext(pieces, b"")  # a failure before the first byte is still an HTTP error
            response = await _stream(request, "application/octet-stream")
            await response.write(first)
            async for piece in pieces:
                await response.write(piece)
            await response.write_eof()
            return response
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    async def file_write(self, request: web.Request) -> web.StreamResponse:
        mode = _number(request, "mode", 0o644, most=0o7777)
        parents = str(int(_flag(request, "parents", default=False)))
        return await self._bytes_in(request, "write", oct(mode)[2:], parents)

    async def tar_write(self, request: web.Request) -> web.StreamResponse:
        return await self._bytes_in(request, "tar-in")

    async def _bytes_in(self, request: web.Request, operation: str, *operands: str) -> web.StreamResponse:
        live = self._live(request)
        path = _path(live, request, "path")
        await live.files.stream_in(
            operation,
            path,
            *operands,
            user=request.query.get("user"),
            data=request.content.iter_chunked(_PIECE_BYTES),
            length=request.content_length,
        )
        return _reply(request, Empty())

    async def file_stat(self, request: web.Request) -> web.StreamResponse:
        live = self._live(request)
        return _reply(request, await live.files.stat(_path(live, request, "path"), request.query.get("user")))

    async def file_list(self, request: web.Request) -> web.StreamResponse:
        live = self._live(request)
        return _reply(request, await live.files.list(_path(live, request, "path"), request.query.get("user")))

    async def file_mkdir(self, request: web.Request) -> web.StreamResponse:
        asked: api.MkdirRequest = await self._body(request, "file_mkdir")
        live = self._live(request)
        await live.files.run(
            "mkdir", live.processes.path(asked.path), oct(asked.mode)[2:], str(int(asked.parents)), user=asked.user
        )
        return _reply(request, Empty())

    async def file_move(self, request: web.Request) -> web.StreamResponse:
        asked: api.MoveRequest = await self._body(request, "file_move")
        live = self._live(request)
        source, target = live.processes.path(asked.source), live.processes.path(asked.target)
        await live.files.run("move", source, target, user=asked.user)
        return _reply(request, Empty())

    async def file_remove(self, request: web.Request) -> web.StreamResponse:
        asked: api.RemoveRequest = await self._body(request, "file_remove")
        live = self._live(request)
        await live.files.run("remove", live.processes.path(asked.path), str(int(asked.recursive)), user=asked.user)
        return _reply(request, Empty())

    async def file_watch(self, request: web.Request) -> web.StreamResponse:
        live = self._live(request)
        recursive = _flag(request, "recursive", default=True)
        changes = live.files.watch(_path(live, request, "path"), recursive, request.query.get("user"))
        packed = _packed(request)
        response: web.StreamResponse | None = None
        try:
            async for batch in changes:
                if response is None:  # every change from now on is seen
                    response = await _stream(request)
                for change in batch:
                    await response.write(encode_chunk(change, packed=packed))
            if response is None:
                raise BackendError("the guest stopped watching before it began")
            return response
        finally:
            await changes.aclose()  # type: ignore[attr-defined]


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


def _packed(request: web.Request) -> bool:
    return request.headers.get("Accept") == MSGPACK


def _reply(request: web.Request, value: object, status: int = 200) -> web.Response:
    if _packed(request):
        return web.Response(body=msgspec.msgpack.encode(value), content_type=MSGPACK, status=status)
    return web.Response(body=msgspec.json.encode(value), content_type=api.JSON, status=status)


async def _stream(request: web.Request, content_type: str = "") -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_type = content_type or (MSGPACK if _packed(request) else "application/x-ndjson")
    await response.prepare(request)
    request[_STREAMING] = response
    return response


def _cut_off(request: web.Request) -> web.StreamResponse:
    """End a response that has begun without its proper end, so that no reader takes it for whole."""
    if request.transport is not None:
        request.transport.abort()
    response: web.StreamResponse = request[_STREAMING]
    return response


def _labels(request: web.Request) -> dict[str, str]:
    labels = {}
    for item in request.query.getall("label", []):
        name, separator, value = item.partition("=")
        if not separator:
            raise InvalidSpec(f"label={item!r} is not label=KEY=VALUE")
        labels[name] = value
    return labels


def _path(live: Live, request: web.Request, name: str) -> str:
    if name not in request.query:
        raise InvalidSpec(f"the query needs {name}=")
    return live.processes.path(request.query[name])


def _number(request: web.Request, name: str, default: int, *, least: int = 0, most: int = OFFSET_MAX) -> int:
    raw = request.query.get(name)
    if raw is None:
        return default
    try:
        value = int(raw)
    except ValueError as error:
        raise InvalidSpec(f"{name}={raw[:40]!r} is not a whole number") from error
    if not least <= value <= most:
        raise InvalidSpec(f"{name}={value} is out of range")
    return value


def _seconds(request: web.Request, name: str) -> float:
    raw = request.query.get(name, "0")
    try:
        value = float(raw)
    except ValueError as error:
        raise InvalidSpec(f"{name}={raw!r} is not a number") from error
    if not 0 <= value < float("inf"):
        raise InvalidSpec(f"{name}={raw!r} is not a duration")
    return value


def _flag(request: web.Request, name: str, *, default: bool) -> bool:
    raw = request.query.get(name)
    if raw is None:
        return default
    if raw.lower() in ("true", "1"):
        return True
    if raw.lower() in ("false", "0"):
        return False
    raise InvalidSpec(f"{name}={raw!r} is neither true nor false")
