"""QEMU's machine protocol, with a peer of the test's own that may say anything."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from barchan.backends.qemu import qmp
from barchan.backends.qemu.qmp import Qmp
from barchan.errors import BackendError, ConnectionLost, RemoteProtocolError

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\r\n'


class Peer:
    """The other end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)

    async def heard(self) -> dict[str, Any]:
        return dict(json.loads(await self._reader.readline()))

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self, **more: object) -> dict[str, Any]:
        asked = await self.heard()
        self.say(json.dumps({"id": asked["id"], **more}).encode() + b"\r\n")
        return asked

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Qmp, Peer]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    peer = Peer(theirs)
    await peer.open()
    peer.say(GREETING)
    opening = asyncio.ensure_future(Qmp.open(ours))
    assert (await peer.answer(**{"return": {}}))["execute"] == "qmp_capabilities"
    connection = await opening
    try:
        yield connection, peer
    finally:
        connection.close()
        peer.close()


def test_commands_have_their_answers() -> None:
    """Whatever comes between: events, and answers that nobody waits for."""

    async def run() -> None:
        async with connected() as (connection, peer):
            asked = asyncio.ensure_future(connection.execute("human-monitor-command", command_line="info"))
            heard = await peer.heard()
            assert heard["arguments"] == {"command-line": "info"}
            peer.say(b'{"event": "STOP", "timestamp": {}}\n{"id": 999, "return": 1}\n{"return": 2}\n')
            peer.say(json.dumps({"id": heard["id"], "return": "text"}).encode() + b"\n")
            assert await asked == "text"

    asyncio.run(run())


def test_what_qemu_refuses_is_an_error_with_its_words() -> None:
    """A refusal leaves the connection as it was."""

    async def run() -> None:
        async with connected() as (connection, peer):
            asked = asyncio.ensure_future(connection.execute("cont"))
            await peer.answer(error={"class": "GenericError", "desc": "no such thing"})
            with pytest.raises(BackendError, match="no such thing"):
                await asked
            again = asyncio.ensure_future(connection.execute("cont"))
            await peer.answer(**{"return": {}})
            assert await again == {}

    asyncio.run(run())


def test_an_event_is_told_to_who_waits_and_to_who_listens() -> None:
    """With its data."""

    async def run() -> None:
        heard: list[tuple[str, dict[str, Any]]] = []
        async with connected() as (connection, peer):
            connection.on_event = lambda name, data: heard.append((name, data))
            event = connection.event("SHUTDOWN")
            peer.say(b'{"event": "SHUTDOWN", "data": {"guest": true}}\n')
            assert await event == {"guest": True}
            assert heard == [("SHUTDOWN", {"guest": True})]

    asyncio.run(run())


def test_the_end_of_the_connection_fails_who_waits() -> None:
    """Commands, and events."""

    async def run() -> None:
        async with connected() as (connection, peer):
            asked, event = asyncio.ensure_future(connection.execute("stop")), connection.event("RESUME")
            await peer.heard()
            peer.close()
            with pytest.raises(ConnectionLost):
                await asked
            with pytest.raises(ConnectionLost):
                await event
            assert not connection.is_open

    asyncio.run(run())


@pytest.mark.parametrize("line", [b"not json\n", b"[1, 2]\n", b"\xff\xfe\n", b"x" * (qmp.LINE_BYTES_MAX + 1)])
def test_a_peer_that_says_anything_else_is_let_go(line: bytes) -> None:
    """What is no line of the protocol ends the connection, and a line without an end is not kept."""

    async def run() -> None:
        async with connected() as (connection, peer):
            asked = asyncio.ensure_future(connection.execute("stop"))
            await peer.heard()
            peer.say(line)
            with pytest.raises(RemoteProtocolError):
                await asked

    asyncio.run(run())
