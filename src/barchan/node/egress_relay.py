"""Bytes between two sockets: bounded reads, half-close, back-pressure, one idle time-out for both directions.

Sockets are non-blocking; nothing is buffered beyond one chunk a direction, so a slow reader slows its writer.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from types import TracebackType

from barchan.errors import RemoteProtocolError

CHUNK_BYTES = 64 << 10
LINGER_S = 2.0
LINGER_BYTES_MAX = 256 << 10

Moved = Callable[[int], None]  # told the size of each chunk that has passed


class IdleTimer:
    """Context that raises TimeoutError when `touch` was not called for `idle_s`."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._timer = asyncio.timeout(idle_s)

    async def __aenter__(self) -> "IdleTimer":
        await self._timer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._timer.__aexit__(kind, error, trace)

    def touch(self) -> None:
        """Start over. Moves the timer at most every sixteenth of its length: chunks are many, timers cost."""
        due, when = asyncio.get_running_loop().time() + self._idle_s, self._timer.when()
        if when is not None and due - when > self._idle_s / 16 and not self._timer.expired():
            self._timer.reschedule(due)

    def touching(self, moved: Moved) -> Moved:
        """`moved`, with a touch at each call."""

        def touch_and_tell(size: int) -> None:
            self.touch()
            moved(size)

        return touch_and_tell


async def read_head(source: socket.socket, bytes_max: int, early: bytes = b"") -> tuple[bytes, bytes] | None:
    """Read up to an empty line. Returns the head with it and the bytes that came after, or None at end of file.

    Raises:
        RemoteProtocolError: More than `bytes_max` without an empty line, or lines that end without CR.
    """
    loop = asyncio.get_running_loop()
    data = bytearray(early)
    looked = 0
    while True:
        end = data.find(b"\r\n\r\n", looked) + 4
        if 4 <= end <= bytes_max:
            return bytes(data[:end]), bytes(data[end:])
        if len(data) > bytes_max:
            raise RemoteProtocolError("the headers are too long", status=431)
        if data.find(b"\n\n", looked) >= 0:
            raise RemoteProtocolError("a line ends without a carriage return", status=400)
        looked = max(0, len(data) - 3)
        chunk = await loop.sock_recv(source, 4096)
        if not chunk:
            return None
        data += chunk


async def pump(source: socket.socket, sink: socket.socket, moved: Moved, first: bytes = b"") -> None:
    """Move bytes until `source` ends, then half-close `sink`. `first` goes before them."""
    loop = asyncio.get_running_loop()
    data = first or await loop.sock_recv(source, CHUNK_BYTES)
    while data:
        await loop.sock_sendall(sink, data)
        moved(len(data))
        await asyncio.sleep(0)  # two fast peers never make the calls above wait: the others' turn
        data = await loop.sock_recv(source, CHUNK_BYTES)
    end_writing(sink)


def end_writing(sock: socket.socket) -> None:
    """Half-close, also where the peer has already gone."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


async def answer_and_drain(client: socket.socket, answer: bytes) -> None:
    """Send a last answer and read what still comes, bounded: closing on unread bytes would reset the answer away."""
    loop = asyncio.get_running_loop()
    left = LINGER_BYTES_MAX
    with contextlib.suppress(OSError, TimeoutError):  # whoever leaves without reading an answer has done without it
        async with asyncio.timeout(LINGER_S):
            await loop.sock_sendall(client, answer)
            end_writing(client)
            while left > 0 and (data := await loop.sock_recv(client, CHUNK_BYTES)):
                left -= len(data)


async def wait_readable(sock: socket.socket) -> None:
    """Wait without taking anything, so that cancelling loses nothing."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
