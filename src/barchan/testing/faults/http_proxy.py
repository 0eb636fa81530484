"""An HTTP server on loopback that passes requests on, or does to them what a bad server does."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import aiohttp
from aiohttp import web

Mode = Literal["pass", "429", "500", "hang", "garbage", "cut", "slow", "corrupt", "down"]
Upstream = Callable[[web.Request], Awaitable[tuple[int, dict[str, str], bytes]]]
BODY_BYTES_MAX = 64 << 20
DRIPS = 4
SLOW_S = 1.0
GARBAGE = b'{"choices": [{"message": {"content": "def '
_PASSED_ON = ("content-type", "content-range", "accept-ranges", "etag", "last-modified", "retry-after")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class HttpProxy:
    """One server.

    Args:
        touches: Ending of the paths that something is done to; the others are always passed on.

    Attributes:
        mode: What is done to requests that come from now on, and to those that wait in an earlier `hang`.
        url: Where it is, once it is opened.
        touched: Requests that were not passed on as they should be.
    """

    def __init__(self, upstream: Upstream, touches: str = "") -> None:
        self.url = ""
        self.touched = 0
        self._upstream = upstream
        self._touches = touches
        self._mode: Mode = "pass"
        self._changed = asyncio.Event()

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._mode = mode
        self._changed.set()
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Serve, on a free port of loopback."""
        application = web.Application(client_max_size=BODY_BYTES_MAX)
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            yield
        finally:
            self.mode = "down"  # whoever hangs is let go
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        mode = self._mode
        if mode == "pass" or not request.path.endswith(self._touches):
            status, headers, body = await self._upstream(request)
            return _whole(request, status, headers, body)
        self.touched += 1
        if mode in ("429", "500"):
            return web.Response(status=int(mode), text="not now")
        if mode == "garbage":
            return web.Response(body=GARBAGE, content_type="application/json")
        if mode == "hang":
            await self._changed.wait()
        if mode in ("hang", "down"):
            return _hang_up(request)
        status, headers, body = await self._upstream(request)
        if mode == "corrupt":
            return _whole(request, status, headers, _flipped(body))
        return await _in_pieces(request, status, headers, body, cut=mode == "cut")


def _whole(request: web.Request, status: int, headers: dict[str, str], body: bytes) -> web.Response:
    if request.method == "HEAD":
        return web.Response(status=status, headers={**headers, "Content-Length": str(len(body))})
    return web.Response(status=status, headers=headers, body=body)


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


def _flipped(body: bytes) -> bytes:
    """The same with one bit of its middle byte changed."""
    if not body:
        return body
    changed = bytearray(body)
    changed[len(body) // 2] ^= 1
    return bytes(changed)


async def _in_pieces(
    request: web.Request, status: int, headers: dict[str, str], body: bytes, *, cut: bool
) -> web.StreamResponse:
    """Slowly, or only the first half."""
    if request.method == "HEAD":
        return _whole(request, status, headers, body)
    response = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(len(body))})
    if not cut:
        await asyncio.sleep(SLOW_S)
    await response.prepare(request)
    step = max(1, len(body) // DRIPS)
    for at in range(0, len(body), step):
        if cut and at >= len(body) // 2:
            return _hang_up(request)
        await response.write(body[at : at + step])
        if not cut:
            await asyncio.sleep(SLOW_S / DRIPS)
    await response.write_eof()
    return response


def folder(root: Path) -> Upstream:
    """The files below a folder, read only, with ranges."""

    def read(name: str, asked: str) -> tuple[int, dict[str, str], bytes]:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()) or not path.is_file():
            return 404, {}, b""
        size = path.stat().st_size
        stamp = {"ETag": f'"{path.stat().st_mtime_ns:x}-{size:x}"', "Accept-Ranges": "bytes"}
        found = _RANGE.fullmatch(asked)
        if found is None:
            return 200, stamp, path.read_bytes()
        first, last = int(found[1]), min(int(found[2]) if found[2] else size - 1, size - 1)
        if first > last:
            return 416, {"Content-Range": f"bytes */{size}"}, b""
        with path.open("rb") as file:
            file.seek(first)
            return 206, {**stamp, "Content-Range": f"bytes {first}-{last}/{size}"}, file.read(last - first + 1)

    async def upstream(request: web.Request) -> tuple[int, dict[str, str], bytes]:
        if request.method not in ("GET", "HEAD"):
            return 405, {}, b""
        return await asyncio.to_thread(read, request.match_info["path"], request.headers.get("Range", ""))

    return upstream


def server(session: aiohttp.ClientSession, base_url: str) -> Upstream:
    """Another HTTP server."""
    base = base_url.rstrip("/").removesuffix("/v1")

    async def upstream(request: web.Request) -> tuple[int, dict[str, str], bytes]:
        headers = {
            name: value for name, value in request.headers.items() if name.lower() in ("authorization", "content-type")
        }
        async with session.request(
            request.method, f"{base}{request.path_qs}", data=await request.read(), headers=headers
        ) as answer:
            body = await answer.content.read()
            kept = {name: value for name, value in answer.headers.items() if name.lower() in _PASSED_ON}
            return answer.status, kept, body

    return upstream
