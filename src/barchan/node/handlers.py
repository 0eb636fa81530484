"""What every handler of the node's HTTP server starts from: the sandboxes, and a request's body."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from barchan.errors import InvalidSpec
from barchan.node.live import Live
from barchan.node.replies import known
from barchan.node.sandboxes import Sandboxes
from barchan.wire.api import MSGPACK, ROUTES


class Handlers:
    """Handler methods, each named like its route of the table."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self.sandboxes = sandboxes
        self._decoders: dict[str, tuple[Any, Any]] = {
            route.name: (msgspec.json.Decoder(route.body), msgspec.msgpack.Decoder(route.body))
            for route in ROUTES
            if route.body_kind == "value"
        }

    async def body(self, request: web.Request, name: str) -> Any:
        raw = await request.read()
        as_json, as_msgpack = self._decoders[name]
        try:
            return (as_msgpack if request.content_type == MSGPACK else as_json).decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidSpec(f"the body does not fit {name}: {error}{known(as_json.type, str(error))}") from error

    @asynccontextmanager
    async def live(self, request: web.Request, *, attached: bool = False) -> AsyncIterator[Live]:
        """The request's sandbox, awake; inside, the request counts as one in flight, or as one that only listens."""
        live = self.sandboxes.get(request.match_info["sandbox_id"])
        async with self.sandboxes.preempting.serving(live), self.sandboxes.tiers.busy(live, attached=attached):
            yield live
