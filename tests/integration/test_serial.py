"""The host's side of a line to an init: greetings, and what a connection over it does."""

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.backends.guest import GuestConnection
from barchan.backends.hosted import serial
from barchan.backends.microvm.initrd import GUEST_PROGRAMS, INIT
from barchan.errors import ConnectionLost, ReadTimeout
from barchan.wire import guest as wire

pytestmark = pytest.mark.requires("root", "static-libc")


@pytest.fixture
def line(tmp_path: Path) -> Iterator[socket.socket]:
    """One end of a pair of sockets, at whose other end an init is."""
    ours, theirs = socket.socketpair()
    argv = [GUEST_PROGRAMS / INIT, "--serial-fd", str(theirs.fileno()), "--spool-dir", tmp_path]
    with ours, subprocess.Popen([*argv, "--spool-max-bytes", "1000000"], pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        yield ours
        assert process.poll() is None
        process.kill()


async def run(guest: GuestConnection, process_id: str) -> int:
    start = wire.Start(process_id=process_id, argv=["sh", "-c", "exit 7"], env={"PATH": "/usr/bin:/bin"})
    process = await guest.start(start, None)
    await process.hear_exit()
    return (await process.ended).wstatus >> 8


async def test_one_connection_after_another(line: socket.socket, tmp_path: Path) -> None:
    """A node that comes back breaks into the connection of the one before, wherever that stood."""
    secret = serial.secret(tmp_path, "sb_1")
    await serial.greet(line, secret)
    first = await GuestConnection.open(line.dup())
    assert await run(first, "first") == 7
    first.send(wire.Start(process_id="half", argv=["true"], stdin=bytes(1 << 20)).encode(9)[:70_000])
    await asyncio.sleep(0.1)
    first.close()
    await serial.greet(line, serial.secret(tmp_path, "sb_1"))
    second = await GuestConnection.open(line.dup())
    assert [item.process_id for item in await second.listed()] == ["first"]
    assert await run(second, "second") == 7
    second.close()


async def test_another_secret_is_not_heard(line: socket.socket, tmp_path: Path) -> None:
    """In the middle of a frame only the connection's own secret is more than what the frame carries."""
    await serial.greet(line, serial.secret(tmp_path, "sb_1"))
    guest = await GuestConnection.open(line.dup())
    guest.send(wire.Start(process_id="half", argv=["true"], stdin=bytes(1 << 20)).encode(9)[:70_000])
    await asyncio.sleep(0.1)
    guest.close()
    with pytest.raises(ReadTimeout):
        await serial.greet(line, serial.secret(tmp_path, "sb_2"), timeout_s=1.5)
    await serial.greet(line, serial.secret(tmp_path, "sb_1"))


async def test_nobody_at_the_other_end(tmp_path: Path) -> None:
    """Silence is a time-out, and an end is a lost connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(ReadTimeout, match=r"within 0\.2 s"):
            await serial.greet(ours, bytes(32), timeout_s=0.2)
        theirs.close()
        with pytest.raises(ConnectionLost):
            await serial.greet(ours, bytes(32), timeout_s=5)


def test_secrets(tmp_path: Path) -> None:
    """A sandbox's own, the same for the next node of the state directory, and of another one's nothing follows."""
    found = serial.secret(tmp_path, "sb_1")
    assert found == serial.secret(tmp_path, "sb_1")
    assert len({found, serial.secret(tmp_path, "sb_2"), serial.secret(_made(tmp_path / "b"), "sb_1")}) == 3
    assert (tmp_path / serial.KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.glob(".*")] == []


def _made(path: Path) -> Path:
    path.mkdir()
    return path
