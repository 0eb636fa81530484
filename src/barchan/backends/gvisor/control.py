"""Speaking with what runs a gVisor guest: the door of our starter, and the control server of the sentry."""

import asyncio
import base64
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from barchan.backends.container.backend import ContainerHandle
from barchan.backends.gvisor.intake import Intake
from barchan.backends.gvisor.spec import CONTAINER_ID, DOOR_DIR
from barchan.backends.hosted.outer import reach
from barchan.core.finished import finished
from barchan.errors import BackendError, ConnectionLost

DOOR: Final = f"{DOOR_DIR}/door"
ANSWER_S: Final = 15.0
ANSWER_BYTES_MAX: Final = 1 << 20
ERROR_CHARS_MAX: Final = 300
IMAGES: Final = ("checkpoint.img", "pages_meta.img", "pages.img")  # of a memory directory, in the order of the calls


class _Answer(msgspec.Struct):
    success: bool
    err: str = ""


async def guest_line(outer: ContainerHandle) -> socket.socket:
    """The other end of the guest's standard input; all of them are one.

    Raises:
        ConnectionLost: What runs the guest is gone, or not up yet.
    """
    return await _fetch(outer, b"g")


async def stop(outer: ContainerHandle) -> None:
    """Stop every program of the guest, its init, too; repeating is harmless.

    Raises:
        ConnectionLost: What runs the guest is gone. BackendError: It did not obey.
    """
    await _ask(outer, b"p")


async def go_on(outer: ContainerHandle) -> None:
    """Let them go on; harmless if they run."""
    await _ask(outer, b"r")


async def _ask(outer: ContainerHandle, wish: bytes) -> None:
    loop = asyncio.get_running_loop()
    with reach(outer, DOOR) as sock:
        try:
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_sendall(sock, wish)
                answer = await loop.sock_recv(sock, 1)
        except OSError as error:  # a time-out is one
            raise ConnectionLost(f"what runs the guest of {outer.sandbox_id} does not answer: {error}") from error
    if not answer:
        raise ConnectionLost(f"what runs the guest of {outer.sandbox_id} has ended")
    if answer != b"\0":
        raise BackendError(f"the kernel of {outer.sandbox_id} did not stop, or go on, when it was told to")


async def _fetch(outer: ContainerHandle, wish: bytes) -> socket.socket:
    loop = asyncio.get_running_loop()
    with reach(outer, DOOR) as sock:
        try:
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_sendall(sock, wish)
                await _readable(sock)
                _, fds, _, _ = socket.recv_fds(sock, 1, 1)
        except OSError as error:
            raise ConnectionLost(f"what runs the guest of {outer.sandbox_id} does not answer: {error}") from error
    if not fds:
        raise ConnectionLost(f"what runs the guest of {outer.sandbox_id} has ended")
    taken = socket.socket(fileno=fds[0])
    taken.setblocking(False)
    return taken


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock.fileno(), _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())


def _settle(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


class Sentry:
    """The control server of one guest's kernel: JSON both ways, one call at a time. Close it after use."""

    def __init__(self, sock: socket.socket, sandbox_id: str) -> None:
        self._sock = sock
        self._sandbox_id = sandbox_id

    @classmethod
    async def of(cls, outer: ContainerHandle) -> "Sentry":
        """Raises `ConnectionLost` where there is none."""
        return cls(await _fetch(outer, b"c"), outer.sandbox_id)

    def __enter__(self) -> "Sentry":
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    async def loopback(self) -> None:
        """Give its own network an interface: the loopback."""
        ones = [base64.b64encode(mask).decode() for mask in (b"\xff\0\0\0", b"\xff" * 16)]
        link = {
            "Name": "lo",
            "Addresses": [{"Address": "127.0.0.1", "PrefixLen": 8}, {"Address": "::1", "PrefixLen": 128}],
            "Routes": [
                {"Destination": {"IP": "127.0.0.0", "Mask": ones[0]}, "Gateway": None},
                {"Destination": {"IP": "::1", "Mask": ones[1]}, "Gateway": None},
            ],
        }
        await self._call("Network.CreateLinksAndRoutes", {"LoopbackLinks": [link]})

    async def start(self) -> None:
        """Run the guest's init."""
        await self._call("containerManager.StartRoot", CONTAINER_ID)

    async def save(self, images: Path, bytes_max: int, timeout_s: float) -> None:
        """Write the guest's programs and memory into new files of no more than so many bytes; it goes on as it was.

        Raises:
            BackendError: It can't be stored, in the sentry's words. ConnectionLost: The sentry broke on the way.
            OSError: The files can't be made, or there is no room.
        """
        arguments = {
            "metadata": {"compression": "none"},
            "MemoryFileSaveOpts": {"ExcludeCommittedZeroPages": True},
            "have_pages_file": True,
            "Resume": True,
        }
        intake = Intake([images / name for name in IMAGES], bytes_max)
        taking = asyncio.ensure_future(asyncio.to_thread(intake.run))
        try:
            await self._call("containerManager.Checkpoint", arguments, intake.ends, timeout_s)
        finally:
            intake.stop()
            try:
                await finished(taking)  # how it failed, if it did, is why the sentry could not go on
            finally:
                intake.close()

    async def load(self, images: Path, timeout_s: float) -> None:
        """Begin with the programs and memory of such files, which run at once; instead of `start`.

        Raises:
            BackendError: It can't, in the sentry's words. ConnectionLost: The sentry broke on the way.
            OSError: The files can't be opened.
        """
        arguments = {"HavePagesFile": True, "HaveDeviceFile": False}
        fds: list[int] = []
        try:
            for name in IMAGES:
                fds.append(os.open(images / name, os.O_RDONLY | os.O_CLOEXEC))
            await self._call("containerManager.Restore", arguments, fds, timeout_s)
        finally:
            for fd in fds:
                os.close(fd)

    async def wake(self) -> None:
        """Have a guest's init, which has just come back, look for what to wait for: its kernel forgets it."""
        arguments = {"CID": CONTAINER_ID, "Signo": int(signal.SIGCHLD), "PID": 0, "Mode": 0}
        await self._call("containerManager.Signal", arguments)

    async def _call(self, method: str, argument: Any, fds: Sequence[int] = (), timeout_s: float = ANSWER_S) -> None:
        loop = asyncio.get_running_loop()
        data = msgspec.json.encode({"method": method, "arg": argument})
        try:
            async with asyncio.timeout(timeout_s):
                sent = socket.send_fds(self._sock, [data], fds) if fds else 0
                await loop.sock_sendall(self._sock, data[sent:])
                answer = await self._answer()
        except OSError as error:
            raise ConnectionLost(f"the kernel of {self._sandbox_id} did not answer {method}: {error}") from error
        if not answer.success:
            why = answer.err.strip().partition("\n")[0][:ERROR_CHARS_MAX]  # stack traces follow
            raise BackendError(f"the kernel of {self._sandbox_id} failed at {method}: {why}")

    async def _answer(self) -> _Answer:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < ANSWER_BYTES_MAX:
            piece = await loop.sock_recv(self._sock, 1 << 16)
            if not piece:
                break
            data += piece
            try:
                return msgspec.json.decode(data, type=_Answer)
            except msgspec.DecodeError:
                continue  # it is not whole yet
        raise ConnectionLost(f"the kernel of {self._sandbox_id} has ended")
