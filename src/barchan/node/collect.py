"""Readers of process output: one that keeps head and tail, one that hands chunks to a stream."""

import asyncio
from collections import deque
from contextlib import suppress

import msgspec

from barchan.backends.guest import Reader
from barchan.errors import ConnectionLost
from barchan.model.sandbox import OutputChunk
from barchan.wire import guest as wire

HELD_S = 0.01


class HeadTail:
    """Keeps the first and the last half of at most `bytes_max` bytes of a stream."""

    __slots__ = ("_head", "_head_max", "_tail", "_tail_bytes", "_tail_max", "complete", "end")

    def __init__(self, bytes_max: int) -> None:
        self._head_max = bytes_max - bytes_max // 2
        self._tail_max = bytes_max // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.end = 0
        self.complete = True

    def add(self, offset: int, data: bytes) -> None:
        if offset != self.end:
            self.complete = False
        self.end = offset + len(data)
        room = self._head_max - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail and self._tail_bytes - len(self._tail[0]) >= self._tail_max:
            self._tail_bytes -= len(self._tail.popleft())
            self.complete = False

    def value(self) -> tuple[bytes, bool]:
        """The bytes kept, and whether that is everything."""
        tail = b"".join(self._tail)
        if len(tail) > self._tail_max:
            tail = tail[len(tail) - self._tail_max :]
            self.complete = False
        return bytes(self._head) + tail, self.complete


class Collector(Reader):
    """Takes all output of one exec; `done` when the main process has ended.

    What comes once more was written than is kept costs the node's time for nothing: that is taken at `HELD_S` for each
    window, some 100 MB/s, and whoever writes faster waits in its sandbox.
    """

    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self.streams = {wire.STDOUT: HeadTail(bytes_max), wire.STDERR: HeadTail(bytes_max)}
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._bytes_max = bytes_max
        self._held: set[int] = set()

    def output(self, stream: int, offset: int, data: bytes) -> None:
        kept = self.streams[stream]
        kept.add(offset, data)
        if kept.end <= self._bytes_max:
            self.consumed[stream] = self.next_offset[stream]
        elif stream not in self._held:
            self._held.add(stream)
            self._loop.call_later(HELD_S, self._go_on, stream)

    def _go_on(self, stream: int) -> None:
        self._held.discard(stream)
        self.consumed[stream] = self.next_offset[stream]
        if self.process is not None:
            with suppress(ConnectionLost):  # whoever follows again says how far it is
                self.process.acknowledge(stream)

    def finished(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def lost(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Stream(Reader):
    """Hands output to one consumer, at its pace: what it has not taken stays in the guest's spool."""

    def __init__(self, stdout_offset: int = 0, stderr_offset: int = 0) -> None:
        super().__init__(stdout_offset, stderr_offset)
        self._queue: deque[tuple[int, int, bytes]] = deque()
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self.exited = False
        self.closed_streams: set[int] = set()

    def output(self, stream: int, offset: int, data: bytes) -> None:
        self._queue.append((stream, offset, data))
        self._wake.set()

    def finished(self) -> None:
        self.exited = True
        self._wake.set()

    def closed(self, stream: int) -> None:
        self.closed_streams.add(stream)
        self._wake.set()

    def lost(self, error: Exception) -> None:
        self._error = error
        self._wake.set()

    def take_nowait(self) -> tuple[int, int, bytes] | None:
        """The next chunk (stream, offset, bytes), if one is here."""
        if not self._queue:
            return None
        stream, offset, data = self._queue.popleft()
        self.consumed[stream] = offset + len(data)
        return stream, offset, data

    async def changed(self) -> None:
        """Wait until there is something new: a chunk, the exit, a closed stream.

        Raises:
            BarchanError: The guest is gone.
        """
        if self._queue:
            return
        if self._error is None:
            self._wake.clear()
            await self._wake.wait()
        self._raise_lost()

    def _raise_lost(self) -> None:
        if self._error is not None and not self._queue:
            raise self._error


def encode_chunk(chunk: object, *, packed: bool) -> bytes:
    """One record of a streamed response: NDJSON, or length-prefixed MessagePack."""
    if not packed:
        return msgspec.json.encode(chunk) + b"\n"
    body = msgspec.msgpack.encode(chunk)
    return len(body).to_bytes(4, "little") + body


def output_chunk(stream: int, offset: int, data: bytes) -> OutputChunk:
    return OutputChunk("stdout" if stream == wire.STDOUT else "stderr", offset, data)
