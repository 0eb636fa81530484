"""QEMU's machine protocol: commands and events, as lines of JSON over a socket. Whoever answers may be hostile."""

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any, cast

import msgspec

from barchan.errors import BackendError, ConnectionLost, ReadTimeout, RemoteProtocolError

ANSWER_S = 30.0
LINE_BYTES_MAX = 1 << 20


class Qmp(asyncio.Protocol):
    """One connection to a QEMU, whose socket takes one at a time.

    Attributes:
        on_event: Called with the name and the data of each event.
        on_lost: Called when the connection goes without `close`.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.on_event: Callable[[str, dict[str, Any]], None] = lambda name, data: None
        self.on_lost: Callable[[], None] = lambda: None
        self._buffer = bytearray()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._events: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._greeted: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._is_closed = False

    @classmethod
    async def open(cls, sock: socket.socket) -> "Qmp":
        """Take over a connected socket.

        Raises:
            ConnectionLost: QEMU closed it: it has another connection, or has ended.
            ReadTimeout: It did not greet in time. RemoteProtocolError: What answers is no QEMU.
        """
        qmp = cls()
        await asyncio.get_running_loop().create_unix_connection(lambda: qmp, sock=sock)
        try:
            await qmp._answer(qmp._greeted, "the greeting", ANSWER_S)
            await qmp.execute("qmp_capabilities")
        except BaseException:
            qmp.close()
            raise
        return qmp

    async def execute(self, command: str, *, timeout_s: float = ANSWER_S, **arguments: object) -> Any:
        """Run one command; `_` in an argument's name stands for `-`. Returns what QEMU returns.

        Raises:
            BackendError: QEMU refuses; the message has its words.
            ConnectionLost, ReadTimeout: There is no answer; the command may or may not have been carried out.
        """
        if self._transport is None or self._is_closed:
            raise ConnectionLost("there is no connection to QEMU now")
        number = next(self._ids)
        asked: dict[str, object] = {"execute": command, "id": number}
        if arguments:
            asked["arguments"] = {name.replace("_", "-"): value for name, value in arguments.items()}
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._transport.write(msgspec.json.encode(asked) + b"\n")
            return await self._answer(future, command, timeout_s)
        finally:
            self._waiting.pop(number, None)

    def event(self, name: str) -> "asyncio.Future[dict[str, Any]]":
        """Done with the data of the next event of that name; fails with `ConnectionLost`."""
        known = self._events.get(name)
        if known is None or known.done():
            known = self._events[name] = asyncio.get_running_loop().create_future()
            if self._is_closed:
                known.set_exception(ConnectionLost("there is no connection to QEMU now"))
        return known

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    def close(self) -> None:
        """Let go of QEMU, which goes on."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    @staticmethod
    async def _answer(future: "asyncio.Future[Any]", what: str, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise ReadTimeout(f"QEMU did not answer {what} within {timeout_s:g} s") from error

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        try:
            for line in lines:
                self._take(msgspec.json.decode(line, type=dict[str, Any]))
            if len(rest) > LINE_BYTES_MAX:
                raise RemoteProtocolError(f"QEMU sent a line of more than {LINE_BYTES_MAX} bytes")
        except (msgspec.MsgspecError, UnicodeDecodeError, RemoteProtocolError) as error:
            self._fail(RemoteProtocolError(f"what answers for QEMU does not speak its protocol: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        was_closed, self._is_closed = self._is_closed, True
        self._fail(ConnectionLost("the connection to QEMU was lost"))
        if not was_closed:
            self.on_lost()

    def _fail(self, error: Exception) -> None:
        waiting = [self._greeted, *self._waiting.values(), *self._events.values()]
        self._waiting.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # it is for whoever waits; nobody has to
        if self._transport is not None:
            self._transport.abort()

    def _take(self, message: dict[str, Any]) -> None:
        if isinstance(name := message.get("event"), str):
            data = message.get("data")
            data = data if isinstance(data, dict) else {}
            future = self._events.pop(name, None)
            if future is not None and not future.done():
                future.set_result(data)
            self.on_event(name, data)
            return
        if "QMP" in message:
            if not self._greeted.done():
                self._greeted.set_result(None)
            return
        number = message.get("id")
        future = self._waiting.get(number) if isinstance(number, int) else None
        if future is None or future.done():
            return
        if "return" in message:
            future.set_result(message["return"])
        else:
            error = message.get("error")
            said = str(error.get("desc") if isinstance(error, dict) else error)[:400]
            future.set_exception(BackendError(f"QEMU refuses: {said}"))
