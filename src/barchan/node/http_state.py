"""Handlers for a sandbox's state: snapshots and forks."""

from contextlib import aclosing

from aiohttp import web

from barchan.model.fork import ForkRequest
from barchan.model.node import SnapshotRequest
from barchan.node import snapshots
from barchan.node.collect import encode_chunk
from barchan.node.forks import results
from barchan.node.handlers import Handlers
from barchan.node.replies import begin_stream, is_packed, reply


class StateHandlers(Handlers):
    """State of sandboxes: what of them is kept, and what is made of it."""

    async def snapshot(self, request: web.Request) -> web.StreamResponse:
        asked: SnapshotRequest = await self.body(request, "snapshot")
        async with self.live(request) as live:
            return reply(request, await snapshots.snapshot(self.sandboxes, live, asked))

    async def fork(self, request: web.Request) -> web.StreamResponse:
        asked: ForkRequest = await self.body(request, "fork")
        async with self.live(request) as live:
            children = await self.sandboxes.forks.fork(live, asked)
        response = await begin_stream(request)
        async with aclosing(results(children, self.sandboxes.node_id)) as done:
            async for forked in done:
                await response.write(encode_chunk(forked, packed=is_packed(request)))
        await response.write_eof()
        return response
