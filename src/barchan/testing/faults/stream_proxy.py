"""A node's socket with a proxy before it, whose connections can be cut or fall silent."""

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

PIECE_BYTES = 64 << 10
BACKLOG = 1024


class StreamProxy:
    """Passes bytes between clients of one unix socket and a server behind another; used as a context.

    Args:
        path: Where clients connect; at most 107 bytes long.
        upstream: The server's socket. Without a server, connections are closed.
    """

    def __init__(self, path: Path, upstream: Path) -> None:
        self.path = path
        self._upstream = upstream
        self._writers: set[asyncio.StreamWriter] = set()
        self._heard = asyncio.Event()
        self._heard.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.path, backlog=BACKLOG)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self._heard.set()
        self.cut()
        await self._server.wait_closed()
        self.path.unlink(missing_ok=True)

    @property
    def connections(self) -> int:
        """Clients that are connected."""
        return len(self._writers) // 2

    def cut(self) -> None:
        """Close every connection at once, whatever is on its way."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def silence(self, seconds: float) -> None:
        """Let nothing pass for a while, and then cut what was silent: bytes that were held are lost."""
        self._heard.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self.cut()
            self._heard.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(self._upstream)
        except OSError:  # no node now: as if nobody listened
            self._drop(writer)
            return
        self._writers.add(up_writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, up_writer))
                group.create_task(self._pass(up_reader, writer))
        finally:
            self._drop(writer)
            self._drop(up_writer)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction to its end; the other side hears of the end, and may still answer."""
        try:
            while piece := await reader.read(PIECE_BYTES):
                await self._heard.wait()
                writer.write(piece)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        except OSError:  # cut, here or by a side: so it is for the other side
            writer.transport.abort()

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()
