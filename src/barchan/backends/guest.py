"""A node's end of the connection to one guest init, whatever carries it."""

import asyncio
import itertools
import os
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Self, cast

from barchan.backends.starts import Starts, start_error
from barchan.errors import (
    BackendError,
    ConnectionLost,
    InitDied,
    NotFound,
    ReadTimeout,
    RemoteProtocolError,
)
from barchan.wire import guest as wire

REPLY_TIMEOUT_S = 15.0
ENDED_KEPT_MAX = 64


class Reader:
    """Somebody who takes a process's output in order, from `offsets` on.

    Attributes:
        next_offset: Per stream, the byte wanted next.
        consumed: Per stream, up to where it is done; the guest is held back about 1 MiB beyond the slowest reader.
        process: Whose output it is, once that is known.
    """

    def __init__(self, stdout_offset: int = 0, stderr_offset: int = 0) -> None:
        self.next_offset = {wire.STDOUT: stdout_offset, wire.STDERR: stderr_offset}
        self.is_finished = False
        self.consumed = dict(self.next_offset)
        self.process: GuestProcess | None = None

    def output(self, stream: int, offset: int, data: bytes) -> None:
        """Take bytes. An offset beyond the end of the last ones says that some were lost."""
        raise NotImplementedError

    def finished(self) -> None:
        """The main process has ended, and all it wrote was given."""

    def closed(self, stream: int) -> None:
        """Nobody can write to this stream any more."""

    def lost(self, error: Exception) -> None:
        """The guest is gone."""


class GuestProcess:
    """One start in the guest, as the node sees it. Output goes to any number of readers."""

    __slots__ = (
        "_acked",
        "_attaching",
        "_connection",
        "ended",
        "exit",
        "handle",
        "missed_from_s",
        "missed_until_s",
        "pid",
        "process_id",
        "readers",
        "streams_closed",
        "timed_out",
    )

    def __init__(self, connection: "GuestConnection", process_id: str, started: wire.Started) -> None:
        self._connection = connection
        self.process_id = process_id
        self.handle = started.handle
        self.pid = started.pid
        self.exit: wire.Exit | None = None
        self.timed_out = False
        self.missed_from_s: float | None = None  # its sandbox's `Clock.missed_s` when it began, and when it ended
        self.missed_until_s: float | None = None
        self.ended: asyncio.Future[wire.Exit] = connection.loop.create_future()
        self.readers: list[Reader] = []
        self._attaching: list[Reader] = []
        self.streams_closed: set[int] = set()
        self._acked = {wire.STDOUT: 0, wire.STDERR: 0}

    async def add_reader(self, reader: Reader) -> wire.Spool:
        """Give `reader` the output from its offsets on, nobody anything twice; returns what the spool holds."""
        await self._connection.at_work.wait()
        self.readers.append(reader)
        reader.process = self
        self._attaching.append(reader)
        try:
            return await self.follow_again()
        except BaseException:
            self.remove_reader(reader)
            raise

    async def hear_exit(self) -> None:
        """Ask the init to tell of its end. A little output comes with that, and goes to nobody."""
        frame = await self._connection.request(lambda tag: wire.follow(tag, self.handle, 0, 0))
        if wire.decode_spool(frame.body).exited:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await asyncio.shield(self.ended)

    async def follow_again(self) -> wire.Spool:
        """Ask the init to push from the lowest offset that a reader still wants."""
        lowest = {stream: min(reader.next_offset[stream] for reader in self.readers) for stream in self._acked}
        self._acked = dict(lowest)
        frame = await self._connection.request(
            lambda tag: wire.follow(tag, self.handle, lowest[wire.STDOUT], lowest[wire.STDERR]),
            on_reply=lambda _: self._attaching.clear(),
        )
        return wire.decode_spool(frame.body)

    @property
    def all_closed(self) -> bool:
        """Nobody can write to its streams any more."""
        return len(self.streams_closed) == 2

    def remove_reader(self, reader: Reader) -> None:
        for readers in (self.readers, self._attaching):
            if reader in readers:
                readers.remove(reader)

    def take_output(self, pushed: wire.Output) -> None:
        stream, end = pushed.stream, pushed.offset + len(pushed.data)
        for reader in list(self.readers):
            wanted = reader.next_offset[stream]
            if end <= wanted:
                continue
            if pushed.offset > wanted and reader in self._attaching:
                continue  # pushed before the init knew of this reader: its own bytes come behind the FOLLOW's reply
            skip = max(0, wanted - pushed.offset)
            reader.next_offset[stream] = end
            reader.output(stream, pushed.offset + skip, pushed.data[skip:] if skip else pushed.data)
            self._settle(reader)
        self.acknowledge(stream)

    def acknowledge(self, stream: int) -> None:
        """Tell the init how far all readers have come, in steps worth a frame."""
        if not self.readers or self._connection.link is None:  # whoever follows again tells how far they are
            return
        offset = min(reader.consumed[stream] for reader in self.readers)
        if offset - self._acked[stream] >= wire.WINDOW_BYTES // 4:
            self._acked[stream] = offset
            self._connection.send(wire.ack(self.handle, stream, offset))

    def take_exit(self, pushed: wire.Exit) -> None:
        self.exit = pushed
        if not self.ended.done():
            self.ended.set_result(pushed)
        for reader in list(self.readers):
            self._settle(reader)

    def _settle(self, reader: Reader) -> None:
        """Tell a reader when it has all that the main process wrote: EXIT overtakes output that waits for an ACK."""
        if self.exit is None or reader.is_finished:
            return
        ends = {wire.STDOUT: self.exit.stdout_end, wire.STDERR: self.exit.stderr_end}
        if all(reader.next_offset[stream] >= end for stream, end in ends.items()):
            reader.is_finished = True
            reader.finished()

    def take_end(self, pushed: wire.End) -> None:
        self.streams_closed.add(pushed.stream)
        for reader in list(self.readers):
            reader.closed(pushed.stream)

    def take_loss(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # it is for whoever asks; nobody has to
        for reader in list(self.readers):
            reader.lost(error)


class _Link(asyncio.Protocol):
    """One socket of a `GuestConnection`; what comes over a replaced one is ignored."""

    def __init__(self, owner: "GuestConnection") -> None:
        self.owner = owner
        self._frames = wire.FrameReader()
        self.transport: asyncio.Transport | None = None
        self.greeted: asyncio.Future[None] = owner.loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.owner.link is not self:
            return
        try:
            for frame in self._frames.feed(data):
                if frame.tag == wire.HELLO_TAG:
                    self._greet(frame)
                else:
                    self.owner.take(frame)
        except RemoteProtocolError as error:
            self.owner.guest_gone(error)

    def _greet(self, frame: wire.Frame) -> None:
        if self.greeted.done():
            raise RemoteProtocolError("a guest greeted twice")
        if frame.kind == wire.ERROR or wire.decode_hello(frame.body) != wire.VERSION:
            self.greeted.set_exception(BackendError("the guest init speaks another protocol version"))
        else:
            self.greeted.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(ConnectionLost("the guest init closed the connection"))
            self.greeted.exception()
        if self.owner.link is self:
            self.owner.link_lost()


class GuestConnection:
    """Frames to and from one init. A lost connection proves nothing: `reconnect` takes a new one and goes on.

    `on_lost` is called when the connection goes without anybody having asked for it.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.processes: dict[int, GuestProcess] = {}
        self.by_id: dict[str, GuestProcess] = {}
        self._ended: OrderedDict[str, GuestProcess] = OrderedDict()
        self._tags = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[wire.Frame]] = {}
        self._on_reply: dict[int, Callable[[wire.Frame], object]] = {}
        self.link: _Link | None = None
        self.on_lost: Callable[[], None] | None = None
        self._gone: Exception | None = None
        self.starts = Starts()
        self.at_work = asyncio.Event()  # not while the guest stands still: what its programs would notice waits then
        self.at_work.set()

    @classmethod
    async def open(cls, sock: socket.socket) -> Self:
        """Take over a socket on which the HELLO was already sent, and wait for its answer."""
        connection = cls()
        try:
            await connection.reconnect(sock)
        except BaseException:
            connection.close()
            raise
        return connection

    async def reconnect(self, sock: socket.socket) -> None:
        """Go on over a new socket: every followed process is followed again from where its readers are."""
        self._drop_link()
        self._fail_waiting(ConnectionLost("the connection to the guest init was replaced"))
        self.link = link = _Link(self)
        await self.loop.create_unix_connection(lambda: link, sock=sock)
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            await link.greeted
        await self._follow_all()

    async def take_over(self, other: "GuestConnection") -> None:
        """Go on over the connection that another one has to the same init, which has come back; the other is done."""
        link, other.link = other.link, None
        if link is None:
            raise ConnectionLost("the connection to the guest init was lost")
        self._drop_link()
        self.on_lost, other.on_lost = other.on_lost, None
        link.owner = self
        self.link = link
        await self._follow_all()

    async def _follow_all(self) -> None:
        for process in list(self.processes.values()):
            if process.readers:
                await process.follow_again()
            elif process.exit is None:
                await process.hear_exit()

    def close(self) -> None:
        """Let go of the guest, which lives on."""
        self._drop_link()

    def _drop_link(self) -> None:
        link, self.link = self.link, None
        if link is not None and link.transport is not None:
            link.transport.abort()

    def guest_gone(self, error: Exception) -> None:
        """The guest itself has ended: everyone who waits for it is told."""
        if self._gone is not None:
            return
        self._gone = error
        self.at_work.set()
        self._drop_link()
        self._fail_waiting(error)
        for process in list(self.processes.values()):
            process.take_loss(error)
        self.processes.clear()

    def link_lost(self) -> None:
        """The socket in use is gone; requests under way have no answer."""
        self.link = None
        self._fail_waiting(self._gone or ConnectionLost("the connection to the guest init was lost"))
        if self._gone is None and self.on_lost is not None:
            self.on_lost()

    def _fail_waiting(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        self._on_reply.clear()
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

    def take(self, frame: wire.Frame) -> None:
        """One frame from the init."""
        if frame.tag:
            self._take_reply(frame)
            return
        pushed = wire.decode_pushed(frame)
        process = self.processes.get(pushed.handle)
        if process is None:
            return
        if isinstance(pushed, wire.Output):
            process.take_output(pushed)
        elif isinstance(pushed, wire.End):
            process.take_end(pushed)
        else:
            process.take_exit(pushed)
            self._retire(process)

    def _take_reply(self, frame: wire.Frame) -> None:
        on_reply = self._on_reply.pop(frame.tag, None)
        if on_reply is not None and frame.kind != wire.ERROR:
            on_reply(frame)
        future = self._waiting.pop(frame.tag, None)
        if future is not None and not future.done():
            future.set_result(frame)

    def _register(self, process_id: str, started: wire.Started, reader: Reader | None) -> GuestProcess:
        """Known before the next frame is read, so that output pushed right behind the reply finds its process."""
        process = self.processes.get(started.handle)
        if process is None:
            process = GuestProcess(self, process_id, started)
            self.processes[started.handle] = process
            self.by_id[process_id] = process
            self._ended.pop(process_id, None)
        if reader is not None and not started.existing:
            process.readers.append(reader)
            reader.process = process
        return process

    def _retire(self, process: GuestProcess) -> None:
        """Remember a bounded number of ended processes; older ones are asked of the init again when needed."""
        self._ended[process.process_id] = process
        self._ended.move_to_end(process.process_id)
        while len(self._ended) > ENDED_KEPT_MAX:
            oldest = next((item for item in self._ended.values() if not item.readers), None)
            if oldest is None:
                return
            del self._ended[oldest.process_id]
            self.processes.pop(oldest.handle, None)
            self.by_id.pop(oldest.process_id, None)

    # requests

    def send(self, data: bytes) -> None:
        if self._gone is not None:
            raise self._gone
        if self.link is None or self.link.transport is None or self.link.transport.is_closing():
            raise ConnectionLost("there is no connection to the guest init now")
        self.link.transport.write(data)

    async def request(
        self,
        make: Callable[[int], bytes],
        *,
        timeout_s: float = REPLY_TIMEOUT_S,
        on_reply: Callable[[wire.Frame], object] | None = None,
    ) -> wire.Frame:
        """Send one request and return its reply. `on_reply` sees the reply before any frame behind it is read.

        Raises:
            ConnectionLost: No answer because the connection went; the request may or may not have been carried out.
            ReadTimeout: No answer in time.
            OSError: The init's ERROR, with its errno.
        """
        tag = next(self._tags) & 0x7FFFFFFF
        data = make(tag)
        future: asyncio.Future[wire.Frame] = self.loop.create_future()
        self._waiting[tag] = future
        if on_reply is not None:
            self._on_reply[tag] = on_reply
        timer = self.loop.call_later(timeout_s, _expire, future, timeout_s)
        try:
            self.send(data)
            frame = await future
        finally:
            timer.cancel()
            self._waiting.pop(tag, None)
            self._on_reply.pop(tag, None)
        if frame.kind == wire.ERROR:
            number, message = wire.decode_error(frame.body)
            raise OSError(number, message)
        return frame

    async def start(self, start: wire.Start, reader: Reader | None) -> GuestProcess:
        """Start a program or applet, or find the one that this id started before; `reader` gets its output.

        Raises:
            Conflict: The id was used for something else.
        """
        found: list[tuple[GuestProcess, bool]] = []

        def register(frame: wire.Frame) -> None:
            started = wire.decode_started(frame.body)
            found.append((self._register(start.process_id, started, reader), started.existing))

        try:
            while not found:
                await self.at_work.wait()
                async with self.starts.one():
                    if self.at_work.is_set():
                        await self.request(start.encode, on_reply=register)
        except OSError as error:
            raise start_error(error, start.process_id) from error
        ((process, existing),) = found
        if existing and reader is not None:
            await process.add_reader(reader)
        elif existing and process.exit is None:
            await process.hear_exit()  # an earlier node may have started it
        return process

    async def find(self, process_id: str) -> GuestProcess:
        """A process started earlier, perhaps under another node.

        Raises:
            NotFound: Nothing was started under this id.
        """
        known = self.by_id.get(process_id)
        if known is not None:
            return known
        await self.at_work.wait()
        try:
            frame = await self.request(lambda tag: wire.lookup(tag, process_id))
        except OSError as error:
            raise NotFound(f"no process {process_id!r} was started in this sandbox", process_id=process_id) from error
        process = self._register(process_id, wire.decode_started(frame.body), None)
        await process.hear_exit()
        return process

    async def signal(self, process: GuestProcess, signo: int, scope: wire.Scope) -> int:
        await self.at_work.wait()
        frame = await self.request(lambda tag: wire.signal(tag, process.handle, signo, scope))
        return wire.decode_number(frame.body, "<I")

    async def write_stdin(self, process: GuestProcess, offset: int, data: bytes, *, eof: bool, timeout_s: float) -> int:
        """Write one piece (at most 256 KiB); returns the offset reached. A process that reads no more takes nothing."""
        await self.at_work.wait()
        frame = await self.request(
            lambda tag: wire.stdin(tag, process.handle, offset, data, eof=eof), timeout_s=timeout_s
        )
        return wire.decode_number(frame.body, "<Q")

    async def watch_running(self) -> None:
        """Hear of the end of every process that runs, though an earlier node started it."""
        for item in await self.listed():
            if not item.exited:
                process = self._register(item.process_id, wire.Started(item.handle, item.pid, True), None)
                await process.hear_exit()

    async def listed(self) -> list[wire.Listed]:
        found: list[wire.Listed] = []
        while len(found) <= wire.PROCESSES_MAX:
            await self.at_work.wait()
            first = found[-1].handle + 1 if found else 0
            found += (page := wire.decode_list((await self.request(partial(wire.list_from, first))).body, first))
            if len(page) < 1000:
                return found
        raise RemoteProtocolError(f"a guest lists more than {wire.PROCESSES_MAX} processes")

    async def ping(self, timeout_s: float = REPLY_TIMEOUT_S) -> wire.Pong:
        return wire.decode_pong((await self.request(wire.ping, timeout_s=timeout_s)).body)

    @property
    def running(self) -> int:
        return sum(process.exit is None for process in self.processes.values())


def _expire(future: asyncio.Future[wire.Frame], timeout_s: float) -> None:
    if not future.done():
        future.set_exception(ReadTimeout(f"the guest init did not answer within {timeout_s:g} s"))


def init_died(sandbox_id: str, wstatus: int) -> InitDied:
    how = f"signal {os.WTERMSIG(wstatus)}" if os.WIFSIGNALED(wstatus) else f"exit code {os.WEXITSTATUS(wstatus)}"
    return InitDied(f"the init of {sandbox_id} ended by {how}", wstatus=wstatus)
