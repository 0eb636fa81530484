"""Handlers for a sandbox's state: snapshots."""

from aiohttp import web

from barchan.model.node import SnapshotRequest
from barchan.node import snapshots
from barchan.node.handlers import Handlers
from barchan.node.replies import reply


class StateHandlers(Handlers):
    """State of sandboxes: what of them is kept, and what is made of it."""

    async def snapshot(self, request: web.Request) -> web.StreamResponse:
        asked: SnapshotRequest = await self.body(request, "snapshot")
        return reply(request, await snapshots.snapshot(self.sandboxes, self.live(request), asked))
