"""Handlers for files in a sandbox."""

from aiohttp import web

from barchan.errors import BackendError
from barchan.node.collect import encode_chunk
from barchan.node.handlers import Handlers
from barchan.node.replies import begin_stream, flag, guest_path, is_packed, number, reply
from barchan.wire import api
from barchan.wire.api import Empty

_PIECE_BYTES = 256 << 10


class FileHandlers(Handlers):
    """Files of sandboxes."""

    async def file_read(self, request: web.Request) -> web.StreamResponse:
        offset, length = number(request, "offset", 0), number(request, "length", -1, least=-1)
        return await self._bytes_out(request, "read", str(offset), str(length))

    async def tar_read(self, request: web.Request) -> web.StreamResponse:
        return await self._bytes_out(request, "tar-out")

    async def _bytes_out(self, request: web.Request, operation: str, *operands: str) -> web.StreamResponse:
        async with self.live(request) as live:
            path = guest_path(live, request, "path")
            pieces = live.files.stream_out(operation, path, *operands, user=request.query.get("user"))
            try:
                first = await anext(pieces, b"")  # a failure before the first byte is still an HTTP error
                response = await begin_stream(request, "application/octet-stream")
                await response.write(first)
                async for piece in pieces:
                    await response.write(piece)
                await response.write_eof()
                return response
            finally:
                await pieces.aclose()  # type: ignore[attr-defined]

    async def file_write(self, request: web.Request) -> web.StreamResponse:
        mode = number(request, "mode", 0o644, most=0o7777)
        parents = str(int(flag(request, "parents", default=False)))
        return await self._bytes_in(request, "write", oct(mode)[2:], parents)

    async def tar_write(self, request: web.Request) -> web.StreamResponse:
        return await self._bytes_in(request, "tar-in")

    async def _bytes_in(self, request: web.Request, operation: str, *operands: str) -> web.StreamResponse:
        async with self.live(request) as live:
            path = guest_path(live, request, "path")
            await live.files.stream_in(
                operation,
                path,
                *operands,
                user=request.query.get("user"),
                data=request.content.iter_chunked(_PIECE_BYTES),
                length=request.content_length,
            )
            return reply(request, Empty())

    async def file_stat(self, request: web.Request) -> web.StreamResponse:
        async with self.live(request) as live:
            return reply(request, await live.files.stat(guest_path(live, request, "path"), request.query.get("user")))

    async def file_list(self, request: web.Request) -> web.StreamResponse:
        async with self.live(request) as live:
            return reply(request, await live.files.list(guest_path(live, request, "path"), request.query.get("user")))

    async def file_mkdir(self, request: web.Request) -> web.StreamResponse:
        asked: api.MkdirRequest = await self.body(request, "file_mkdir")
        async with self.live(request) as live:
            await live.files.run(
                "mkdir", live.processes.path(asked.path), oct(asked.mode)[2:], str(int(asked.parents)), user=asked.user
            )
            return reply(request, Empty())

    async def file_move(self, request: web.Request) -> web.StreamResponse:
        asked: api.MoveRequest = await self.body(request, "file_move")
        async with self.live(request) as live:
            source, target = live.processes.path(asked.source), live.processes.path(asked.target)
            await live.files.run("move", source, target, user=asked.user)
            return reply(request, Empty())

    async def file_remove(self, request: web.Request) -> web.StreamResponse:
        asked: api.RemoveRequest = await self.body(request, "file_remove")
        async with self.live(request) as live:
            await live.files.run("remove", live.processes.path(asked.path), str(int(asked.recursive)), user=asked.user)
            return reply(request, Empty())

    async def file_watch(self, request: web.Request) -> web.StreamResponse:
        async with self.live(request) as live:
            recursive = flag(request, "recursive", default=True)
            changes = live.files.watch(guest_path(live, request, "path"), recursive, request.query.get("user"))
            packed = is_packed(request)
            response: web.StreamResponse | None = None
            try:
                async for batch in changes:
                    if response is None:  # every change from now on is seen
                        response = await begin_stream(request)
                    for change in batch:
                        await response.write(encode_chunk(change, packed=packed))
                if response is None:
                    raise BackendError("the guest stopped watching before it began")
                return response
            finally:
                await changes.aclose()  # type: ignore[attr-defined]
