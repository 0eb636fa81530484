"""Handlers for a sandbox's state: snapshots, forks and tiers of waiting."""

import asyncio
from contextlib import aclosing

from aiohttp import web

from barchan.core.finished import finished
from barchan.model.fork import ForkRequest
from barchan.model.node import Killed, SnapshotRequest
from barchan.model.pool import PoolRequest
from barchan.model.snapshot_info import SnapshotPull
from barchan.model.tiers import AdoptRequest, Tier, TierRequest
from barchan.node import away, snapshots_away, storms
from barchan.node.collect import encode_chunk
from barchan.node.forks import results
from barchan.node.handlers import Handlers
from barchan.node.replies import begin_stream, is_packed, pairs_of, reply


class StateHandlers(Handlers):
    """State of sandboxes: what of them is kept, and what is made of it."""

    async def snapshot(self, request: web.Request) -> web.StreamResponse:
        asked: SnapshotRequest = await self.body(request, "snapshot")
        async with self.live(request) as live:
            return reply(request, await self.sandboxes.tree.keep(live, asked))

    async def fork_end(self, request: web.Request) -> web.StreamResponse:
        return reply(request, Killed(killed=await self.sandboxes.forks.end(request.match_info["fork_id"])))

    async def snapshot_list(self, request: web.Request) -> web.StreamResponse:
        return reply(request, await self.sandboxes.tree.listed(pairs_of(request, "metadata")))

    async def snapshot_info(self, request: web.Request) -> web.StreamResponse:
        return reply(request, await self.sandboxes.tree.info(request.match_info["snapshot_id"]))

    async def snapshot_remove(self, request: web.Request) -> web.StreamResponse:
        return reply(request, await self.sandboxes.tree.remove(request.match_info["snapshot_id"]))

    async def snapshot_push(self, request: web.Request) -> web.StreamResponse:
        return reply(request, await snapshots_away.push(self.sandboxes, request.match_info["snapshot_id"]))

    async def snapshot_pull(self, request: web.Request) -> web.StreamResponse:
        asked: SnapshotPull = await self.body(request, "snapshot_pull")
        pulling = snapshots_away.pull(self.sandboxes, request.match_info["snapshot_id"], asked.name)
        return reply(request, await finished(pulling))

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

    async def pool(self, request: web.Request) -> web.StreamResponse:
        return reply(request, await self.sandboxes.warm.info())

    async def pool_set(self, request: web.Request) -> web.StreamResponse:
        asked: PoolRequest = await self.body(request, "pool_set")
        return reply(request, await self.sandboxes.warm.set(asked.slots))

    async def pause(self, request: web.Request) -> web.StreamResponse:
        return await self._to(request, "paused")

    async def page_out(self, request: web.Request) -> web.StreamResponse:
        return await self._to(request, "paged_out")

    async def hibernate(self, request: web.Request) -> web.StreamResponse:
        return await self._to(request, "hibernated")

    async def resume(self, request: web.Request) -> web.StreamResponse:
        return await self._to(request, "running")

    async def push(self, request: web.Request) -> web.StreamResponse:
        live = self.sandboxes.get(request.match_info["sandbox_id"])
        await away.push(self.sandboxes, live)
        return reply(request, live.info(self.sandboxes.node_id))

    async def adopt(self, request: web.Request) -> web.StreamResponse:
        asked: AdoptRequest = await self.body(request, "adopt")
        taking = away.adopt(self.sandboxes, request.match_info["sandbox_id"], asked.lease_id)
        return reply(request, (await finished(taking)).info(self.sandboxes.node_id))

    async def _to(self, request: web.Request, tier: Tier) -> web.StreamResponse:
        live = self.sandboxes.get(request.match_info["sandbox_id"])
        await asyncio.shield(self.sandboxes.tasks.spawn(self.sandboxes.tiers.to(live, tier)))
        return reply(request, live.info(self.sandboxes.node_id))

    async def tier_many(self, request: web.Request) -> web.StreamResponse:
        asked: TierRequest = await self.body(request, "tier_many")
        chosen = storms.chosen(self.sandboxes, asked)
        response = await begin_stream(request)
        async with aclosing(storms.bring(self.sandboxes, chosen, asked.tier)) as done:
            async for change in done:
                await response.write(encode_chunk(change, packed=is_packed(request)))
        await response.write_eof()
        return response
