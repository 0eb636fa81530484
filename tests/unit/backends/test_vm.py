"""Machines, without one: what they are seeded with, how another agent is asked for help, what a picture says."""

import asyncio
import base64
import email
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from barchan.backends.vm import backend
from barchan.backends.vm.qga import SENTINEL, GuestAgent
from barchan.backends.vm.screen import AXIS_MAX, PNG_MAGIC, _axis, size_of
from barchan.backends.vm.seed import FILE, seed_bytes, seed_layer, user_data
from barchan.errors import BackendError, ConnectionLost, ReadTimeout, RemoteProtocolError
from barchan.image import agent
from barchan.model.screen import ScreenSize

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.mark.requires("mtools")
def test_a_seed_starts_the_agent(tmp_path: Path) -> None:
    """Its instructions are YAML for cloud-init, its script is a shell's, and the agent in it is whole."""
    program = bytes(range(256)) * 2000
    image = tmp_path / "seed"
    image.write_bytes(seed_bytes(program))

    def read(name: str) -> bytes:
        return subprocess.run(["mtype", "-i", image, f"::{name}"], capture_output=True, check=True).stdout

    assert read("agent") == program
    assert read("meta-data").startswith(b"instance-id: ")
    assert read("user-data").startswith(b"#cloud-boothook\n#!/bin/sh\n")
    for script in ("start", "launch"):
        assert subprocess.run(["sh", "-n"], input=read(script), check=False).returncode == 0


def test_a_seed_has_what_the_owner_tells_beside_ours() -> None:
    """Both are parts of one message, whole, whatever the owner's is made of; other words make another instance."""
    own = "#cloud-config\nhostname: \u00fcber\n--====barchan====--\n"
    message = email.message_from_string(user_data(own))
    hook, told = message.get_payload()
    assert isinstance(hook, Message) and isinstance(told, Message)
    assert hook.get_content_type() == "text/cloud-boothook"
    assert hook.get_payload(decode=True) == user_data("").encode()
    assert told.get_content_type() == "text/plain"
    assert told.get_payload(decode=True) == own.encode()
    assert seed_bytes(b"", own) != seed_bytes(b"", own + "\n")


def test_a_seed_is_one_layer_for_all(tmp_path: Path) -> None:
    """Asked for again, the same layer is found; nothing half made stays beside it."""
    first, again = seed_layer(tmp_path), seed_layer(tmp_path)
    assert first == again
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert (first.path / FILE).read_bytes() == seed_bytes(agent.PROGRAM.read_bytes())


@asynccontextmanager
async def talk(peer: Peer) -> AsyncIterator[GuestAgent]:
    """A conversation with a scripted guest agent."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=theirs, limit=1 << 20)
    line = await GuestAgent.open(ours)
    running = asyncio.create_task(_run(peer, reader, writer))
    try:
        yield line
    finally:
        line.close()
        await asyncio.wait({running})
        await asyncio.sleep(0)  # for both transports to close their sockets


async def _run(peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await peer(reader, writer)
    except ConnectionError:
        pass  # the other side has had enough
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_the_agent_is_put_into_the_guest_and_started() -> None:
    """After words that were for somebody else, the file goes over in pieces, whole, and a shell starts it."""
    program = bytes(range(256)) * 700
    written = bytearray()
    started: list[str] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = msgspec.json.decode((await reader.readline()).lstrip(SENTINEL))
        writer.write(b'{"return": 1}\n{"return": {}}\n' + SENTINEL)
        writer.write(msgspec.json.encode({"return": asked["arguments"]["id"]}) + b"\n")
        while started[:1] != ["-c"]:
            asked = msgspec.json.decode(await reader.readline())
            arguments = asked["arguments"]
            if asked["execute"] == "guest-file-write":
                written.extend(base64.b64decode(arguments["buf-b64"]))
            elif asked["execute"] == "guest-exec":
                started[:] = arguments["arg"]
            writer.write(b'{"return": 1000}\n' if asked["execute"] == "guest-file-open" else b'{"return": {}}\n')

    async with talk(peer) as line:
        await line.greet(5)
        await line.start_agent(program)
    assert bytes(written) == program + agent.LAUNCH.encode() + agent.START.encode()
    assert started[-1].startswith("sh /run/barchan-")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'{"error": {"class": "GenericError", "desc": "no"}}\n', BackendError),
        (b"not json\n", RemoteProtocolError),
        (b"[1]\n", RemoteProtocolError),
        (b"x" * (2 << 20) + b"\n", RemoteProtocolError),
        (b"", ConnectionLost),
    ],
)
async def test_what_a_guest_answers_is_not_believed(answer: bytes, expected: type[Exception]) -> None:
    """A refusal, nonsense, a line without end and a hang-up each have their error."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        await writer.drain()

    async with talk(peer) as line:
        with pytest.raises(expected):
            await line.execute("guest-ping")


async def test_a_guest_without_that_agent_says_nothing() -> None:
    """Nobody answers: that is told after the time that was given."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with talk(peer) as line:
        with pytest.raises(ReadTimeout):
            await line.greet(0.05)


@pytest.mark.parametrize("flood", [b"0\n" * 8192, (b'"' + b"x" * 900_000 + b'"\n') * 20])
async def test_a_guest_that_floods_holds_nobody_up(flood: bytes) -> None:
    """Others get their turns meanwhile, and after so many lines or bytes it is given up."""
    turns = 0

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(flood)
        await writer.drain()
        await reader.read()

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    async with talk(peer) as line:
        with pytest.raises(RemoteProtocolError, match="does not answer"):
            await line.greet(20)
    running.cancel()
    assert turns > 4096 if len(flood) < 1 << 20 else turns > 10


async def test_why_an_agent_was_not_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that no agent answers from says what became of the way by QEMU's own, also if that can't be reached."""

    def nowhere(outer: object, path: str) -> socket.socket:
        raise ConnectionLost("nobody listens")

    async def unanswered(machine: object, secret: bytes, within_s: float) -> socket.socket:
        await asyncio.sleep(0.05)
        raise ConnectionLost("no answer in 300 s")

    monkeypatch.setattr(backend, "reach", nowhere)
    monkeypatch.setattr(backend, "greeted", unanswered)
    machine: Any = SimpleNamespace(outer=None)
    here: Any = SimpleNamespace(boot_s=1.0)
    with pytest.raises(ConnectionLost, match="no answer in 300 s; QEMU's guest agent did not start ours: nobody"):
        await backend.VmBackend.first(here, machine, b"")


def test_the_size_is_the_pictures_own() -> None:
    """It is read from a PNG's header; what is no PNG is none of a screen's."""
    assert size_of(PNG_MAGIC + struct.pack(">I4sII", 13, b"IHDR", 1280, 800)) == ScreenSize(width=1280, height=800)
    for wrong in (b"", b"P6\n1280 800\n", PNG_MAGIC, PNG_MAGIC + bytes(20)):
        with pytest.raises(BackendError):
            size_of(wrong)


@pytest.mark.parametrize("pixels", [640, 720, 1280, 1920, 4096])
def test_every_pixel_is_met(pixels: int) -> None:
    """A guest that scales the tablet's place to its screen comes to the pixel that was meant, rounding or not."""
    for pixel in range(pixels):
        value = _axis("x", pixel, pixels)["data"]
        assert isinstance(value, dict)
        assert value["value"] * pixels // (AXIS_MAX + 1) == pixel
        assert 0 <= value["value"] <= AXIS_MAX
