"""Our agent given to a guest that has QEMU's own guest agent and no cloud-init: put there as a file, and started.

Source: QEMU's qga/qapi-schema.json. Whoever answers is the guest, and nothing it says is believed beyond its form.
"""

import asyncio
import base64
import secrets
import socket
from typing import Any

import msgspec

from barchan.errors import BackendError, ConnectionLost, ReadTimeout, RemoteProtocolError
from barchan.image import agent

PORT = "org.qemu.guest_agent.0"
ANSWER_S = 30.0  # of an emulated guest that is still booting
PIECE_BYTES = 48 << 10
LINE_BYTES_MAX = 1 << 20
PASSED_OVER_LINES_MAX, PASSED_OVER_BYTES_MAX = 4096, 16 << 20  # of whatever was said before it answers
OPEN_TRIES, OPEN_EVERY_S = 60, 0.5
SENTINEL = b"\xff"  # ends whatever a parser was in the middle of, on both sides


class GuestAgent:
    """One conversation with it, over a socket that leads to its port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sock: socket.socket) -> "GuestAgent":
        """Take over a connected socket. Nobody need listen at its other end yet."""
        return cls(*await asyncio.open_unix_connection(sock=sock, limit=LINE_BYTES_MAX))

    def close(self) -> None:
        self._writer.transport.abort()

    async def greet(self, patience_s: float) -> None:
        """Ask until it answers, whatever was said on the line before.

        Raises:
            ReadTimeout: It does not, for `patience_s`. ConnectionLost: The machine is gone.
            RemoteProtocolError: What answers is none.
        """
        number = secrets.randbits(31)
        asked = {"execute": "guest-sync-delimited", "arguments": {"id": number}}
        self._writer.write(SENTINEL + msgspec.json.encode(asked) + b"\n")
        passed = 0
        try:
            async with asyncio.timeout(patience_s):
                for _ in range(PASSED_OVER_LINES_MAX):
                    line = await self._line()
                    if msgspec.json.decode(line.rpartition(SENTINEL)[2]) == {"return": number}:
                        return
                    passed += len(line)
                    if passed > PASSED_OVER_BYTES_MAX:
                        break
                    await asyncio.sleep(0)  # lines that are there already are read without waiting
        except TimeoutError as error:
            raise ReadTimeout(f"the guest's QEMU agent did not answer within {patience_s:g} s") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"what answers for the guest's QEMU agent is none: {error}") from error
        raise RemoteProtocolError(f"the guest's QEMU agent does not answer, and said {passed} bytes instead")

    async def execute(self, command: str, **arguments: object) -> Any:
        """Run one command; `_` in an argument's name stands for `-`.

        Raises:
            BackendError: It refuses. ReadTimeout, ConnectionLost, RemoteProtocolError: There is no answer.
        """
        asked = {"execute": command, "arguments": {name.replace("_", "-"): item for name, item in arguments.items()}}
        self._writer.write(msgspec.json.encode(asked) + b"\n")
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = msgspec.json.decode(await self._line(), type=dict[str, Any])
        except TimeoutError as error:
            raise ReadTimeout(f"the guest's QEMU agent did not answer {command} within {ANSWER_S:g} s") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"what the guest's QEMU agent answers can't be read: {error}") from error
        if "return" not in answer:
            raise BackendError(f"the guest's QEMU agent refuses {command}: {str(answer.get('error'))[:300]}")
        return answer["return"]

    async def _line(self) -> bytes:
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            raise ConnectionLost("the line to the guest's QEMU agent was lost") from error
        except asyncio.LimitOverrunError as error:
            raise RemoteProtocolError("the guest's QEMU agent sent a line that is too long") from error
        return line

    async def start_agent(self, program: bytes) -> None:
        """Put our agent into the guest, and start it there.

        Raises:
            BackendError, ReadTimeout, ConnectionLost, RemoteProtocolError: As `execute`.
        """
        folder = f"/run/barchan-{secrets.token_hex(8)}"
        await self.execute("guest-exec", path="/bin/mkdir", arg=["-m", "700", folder])
        files = {"agent": program, "launch": agent.LAUNCH.encode(), "start": agent.START.encode()}
        for name, content in files.items():
            await self._write(f"{folder}/{name}", content)
        script = f"sh {folder}/start {folder}; rm -r {folder}"
        await self.execute("guest-exec", path="/bin/sh", arg=["-c", script])

    async def _write(self, path: str, content: bytes) -> None:
        handle = await self._open_new(path)
        for at in range(0, len(content), PIECE_BYTES):
            piece = base64.b64encode(content[at : at + PIECE_BYTES]).decode()
            await self.execute("guest-file-write", handle=handle, buf_b64=piece)
        await self.execute("guest-file-close", handle=handle)

    async def _open_new(self, path: str) -> object:
        """Its folder is being made by a program that nobody waits for."""
        for _ in range(OPEN_TRIES):
            try:
                return await self.execute("guest-file-open", path=path, mode="w")
            except BackendError as error:
                refused = error
            await asyncio.sleep(OPEN_EVERY_S)
        raise refused
