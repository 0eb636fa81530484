"""Handlers for the screens of sandboxes that have one."""

from typing import cast

from aiohttp import web

from barchan.backends.screen import HasScreen, Screen
from barchan.core import keyboard
from barchan.errors import InvalidSpec
from barchan.model.screen import KeyRequest, PointerRequest, TypeRequest
from barchan.node.handlers import Handlers
from barchan.node.live import Live
from barchan.node.replies import reply
from barchan.wire.api import Empty


class ScreenHandlers(Handlers):
    """Screen, keyboard and mouse of sandboxes."""

    def _screen(self, live: Live) -> Screen:
        backend = self.sandboxes.running_backend(live.spec.backend)
        if backend is None or not backend.capabilities.screen:
            raise InvalidSpec(
                f'a {live.spec.backend} sandbox has no screen (try: backend="vm", with a machine\'s disk)'
            )
        return cast(HasScreen, live.handle).screen

    async def screen_png(self, request: web.Request) -> web.StreamResponse:
        async with self.live(request) as live:
            return web.Response(body=await self._screen(live).png(), content_type="image/png")

    async def screen_size(self, request: web.Request) -> web.StreamResponse:
        async with self.live(request) as live:
            return reply(request, await self._screen(live).size())

    async def screen_type(self, request: web.Request) -> web.StreamResponse:
        asked: TypeRequest = await self.body(request, "screen_type")
        chords = keyboard.typed(asked.text)
        async with self.live(request) as live:
            await self._screen(live).press(chords)
            return reply(request, Empty())

    async def screen_key(self, request: web.Request) -> web.StreamResponse:
        asked: KeyRequest = await self.body(request, "screen_key")
        chord = keyboard.chord(asked.keys)
        async with self.live(request) as live:
            await self._screen(live).press([chord])
            return reply(request, Empty())

    async def screen_pointer(self, request: web.Request) -> web.StreamResponse:
        asked: PointerRequest = await self.body(request, "screen_pointer")
        if (asked.x is None) != (asked.y is None):
            raise InvalidSpec("give both x and y, or neither: then the mouse stays where it is")
        async with self.live(request) as live:
            await self._screen(live).point(asked)
            return reply(request, Empty())
