"""What CRIU sends the pager, in any pieces, and what must not be taken for it."""

import array
import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from barchan.errors import BackendError, RemoteProtocolError
from barchan.snapshot.pager.handover import SOCKET_NAME, Handover

RESTORED = struct.pack("=I", 0x52535446)


class Criu:
    """Speaks as CRIU does."""

    def __init__(self, directory: Path, refusal: Exception | None = None) -> None:
        self.received: list[tuple[int, int]] = []
        self.refusal = refusal
        self.handover = Handover(directory, self._connected, lambda pid, fd: self.received.append((pid, fd)))
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(os.fspath(directory / SOCKET_NAME))

    def _connected(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def pid(self, number: int) -> None:
        self.socket.sendall(struct.pack("=i", number))

    def descriptor(self) -> int:
        """Send one, with the byte that carries it; its inode."""
        with open(os.memfd_create("page"), "rb") as file:
            fds = array.array("i", [file.fileno()])
            self.socket.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            return os.fstat(file.fileno()).st_ino

    def close(self) -> None:
        self.socket.close()
        self.handover.close()
        for _, fd in self.received:
            os.close(fd)


@pytest.fixture
async def criu(tmp_path: Path) -> AsyncIterator[Criu]:
    made = Criu(tmp_path)
    yield made
    made.close()


async def test_processes_come_with_their_descriptors(criu: Criu) -> None:
    """Zombies have none; the last number ends it, and nothing is read behind that."""
    criu.pid(1)
    sent = [(1, criu.descriptor())]
    criu.pid(-7)
    for byte in struct.pack("=i", 300):
        criu.socket.sendall(bytes([byte]))
        await asyncio.sleep(0)
    sent.append((300, criu.descriptor()))
    criu.socket.sendall(RESTORED + b"more")
    await criu.handover.restored
    assert [(pid, os.fstat(fd).st_ino) for pid, fd in criu.received] == sent


async def test_an_end_before_the_last_number_is_a_failure(criu: Criu) -> None:
    """CRIU died, or gave up."""
    criu.pid(1)
    criu.descriptor()
    criu.pid(2)
    criu.socket.close()
    with pytest.raises(BackendError, match="CRIU ended"):
        await criu.handover.restored
    assert [pid for pid, _ in criu.received] == [1]


async def test_a_process_without_its_descriptor_is_refused(criu: Criu) -> None:
    """Its pages could never come."""
    criu.pid(1)
    criu.socket.sendall(b"\0")
    with pytest.raises(RemoteProtocolError):
        await criu.handover.restored


async def test_who_may_not_connect_is_turned_away(tmp_path: Path) -> None:
    """For instance while the sandbox has no control group that could be killed."""
    criu = Criu(tmp_path, FileNotFoundError("no such group"))
    with pytest.raises(FileNotFoundError):
        await criu.handover.restored
    assert criu.socket.recv(1) == b""
    criu.close()
