"""The control socket of the reader, and of the pager: packets of `wire.supervisor`, one node at a time.

docs/formats/reader-protocol.md and docs/formats/pager-protocol.md have the operations.
"""

import array
import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from barchan.errors import BarchanError, LocalProtocolError
from barchan.wire import supervisor as wire

Answer = tuple[dict[str, str | int], list[int]]
"""Keys of a reply, and descriptors, which are closed once sent."""
Handler = Callable[[wire.Message, list[int]], Awaitable[Answer]]
"""Takes a request and the descriptors that came with it; it owns those."""

REQUESTS_MAX: Final = 1024
SEND_PAUSE_S: Final = 0.002


class Control:
    """Listens on a unix socket of our own user, and hands requests to handlers by their operation."""

    def __init__(self, path: Path, handlers: dict[str, Handler]) -> None:
        self._path = path
        self._handlers = handlers
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connection: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._listener.bind(os.fspath(path))
        finally:
            os.umask(before)
        self._listener.listen(16)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def close(self) -> None:
        self._drop()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for task in self._tasks:
            task.cancel()

    def event(self, word: str, **keys: str | int) -> None:
        """Tell the node, if there is one; what doesn't fit its socket is sent when it has room."""
        if self._connection is not None:
            self._spawn(self._send(self._connection, wire.encode(word, **keys), []))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            connection.close()
            return
        self._drop()
        connection.setblocking(False)
        self._connection = connection
        self._loop.add_reader(connection.fileno(), self._readable, connection)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._loop.remove_reader(connection.fileno())
            connection.close()

    def _readable(self, connection: socket.socket) -> None:
        try:
            data, ancillary, _, _ = connection.recvmsg(
                wire.PACKET_BYTES_MAX, socket.CMSG_SPACE(wire.FDS_MAX * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        fds = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if not data or len(self._tasks) > REQUESTS_MAX:
            for fd in fds:
                os.close(fd)
            self._drop()
        else:
            self._spawn(self._handle(connection, data, list(fds)))

    async def _handle(self, connection: socket.socket, packet: bytes, fds: list[int]) -> None:
        tag, sent = 0, list[int]()
        try:
            message = wire.decode(packet)
            tag = message.number("tag")
            handler = self._handlers.get(message.word)
            if handler is None:
                raise LocalProtocolError(f"there is no operation {message.word!r}")
            given, fds = fds, []
            keys, sent = await handler(message, given)
            reply = wire.encode("ok", tag=tag, **keys)
        except (BarchanError, OSError) as error:
            code = error.code if isinstance(error, BarchanError) else "os"
            number = error.errno or 0 if isinstance(error, OSError) else 0
            text = str(error).replace("\0", "?")[:4000]
            reply = wire.encode("error", tag=tag, stage=code, errno=number, message=text)
        finally:
            for fd in fds:
                os.close(fd)
        await self._send(connection, reply, sent)

    async def _send(self, connection: socket.socket, packet: bytes, fds: list[int]) -> None:
        try:
            while connection.fileno() >= 0:
                try:
                    if fds:
                        socket.send_fds(connection, [packet], fds)
                    else:
                        connection.send(packet)
                    return
                except BlockingIOError:
                    await asyncio.sleep(SEND_PAUSE_S)
                except OSError:  # the node is gone; the next one asks anew
                    return
        finally:
            for fd in fds:
                os.close(fd)
