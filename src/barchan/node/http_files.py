"""Handlers for files in a sandbox."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from barchan.errors import BackendError, Conflict
from barchan.node.collect import encode_chunk
from barchan.node.handlers import Handlers
from barchan.node.live import Live
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

    @asynccontextmanager
    async def _changing(self, request: web.Request) -> AsyncIterator[Live]:
        """As `live`, for whoever the sandbox belongs to: a client that was stopped, whose rollout another one has taken
        over meanwhile, must not change what that one works with.

        Raises:
            Conflict: The request is made under a lease that the sandbox has left, or in an epoch that is over.
        """
        async with self.live(request) as live:
            lease_id = request.query.get("lease")
            if lease_id is not None and lease_id != live.spec.lease_id:
                raise Conflict(
                    f"sandbox {live.sandbox_id} has gone over to another lease: whoever holds that goes on with it",
                    sandbox_id=live.sandbox_id,
                )
            epoch = number(request, "epoch", live.files_epoch)
            if epoch < live.files_epoch:
                raise Conflict(
                    f"the files of sandbox {live.sandbox_id} are changed in epoch {live.files_epoch} by now, and "
                    f"not in {epoch}: whoever has that one goes on with it",
                    sandbox_id=live.sandbox_id,
                )
            live.files_epoch = epoch
            yield live

    async def _bytes_in(self, request: web.Request, operation: str, *operands: str) -> web.StreamResponse:
        async with self._changing(request) as live:
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
        async with self._changing(request) as live:
            await live.files.run(
                "mkdir", live.processes.path(asked.path), oct(asked.mode)[2:], str(int(asked.parents)), user=asked.user
            )
            return reply(request, Empty())

    async def file_move(self, request: web.Request) -> web.StreamResponse:
        asked: api.MoveRequest = await self.body(request, "file_move")
        async with self._changing(request) as live:
            source, target = live.processes.path(asked.source), live.processes.path(asked.target)
            await live.files.run("move", source, target, user=asked.user)
            return reply(request, Empty())

    async def file_remove(self, request: web.Request) -> web.StreamResponse:
        asked: api.RemoveRequest = await self.body(request, "file_remove")
        async with self._changing(request) as live:
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
