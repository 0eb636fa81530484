"""The host's side of a line to a guest init that never ends; docs/formats/guest-protocol.md says how it is greeted."""

import asyncio
import hmac
import os
import secrets
import socket
from pathlib import Path

from barchan.errors import ConnectionLost, ReadTimeout
from barchan.wire import guest as wire

KEY_FILE = "line.key"
KEY_BYTES = 32
GREET_S = 15.0
CALL_EVERY_S = 1.0  # what is sent to a port before its machine has it open may be lost
PASSED_OVER_BYTES_MAX = 64 << 20  # of an earlier connection
_PIECE_BYTES = 1 << 16


def secret(state_dir: Path, sandbox_id: str) -> bytes:
    """What opens the line to a sandbox once more while a connection over it is under way; the same for every node of
    the state directory. No guest and no client ever sees it.
    """
    return hmac.digest(_key(state_dir / KEY_FILE), sandbox_id.encode(), "sha256")


def _key(path: Path) -> bytes:
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        found = b""
    if len(found) == KEY_BYTES:
        return found
    part = path.with_name(f".{path.name}-{os.getpid()}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
    try:
        os.link(part, path)
    except FileExistsError:
        pass  # another was first: its key counts
    finally:
        part.unlink()
    return path.read_bytes()


async def greet(sock: socket.socket, secret: bytes, *, opens: bytes | None = None, timeout_s: float = GREET_S) -> None:
    """Begin a connection over a line, in the midst of whatever went over it before, and say HELLO.

    Afterwards `GuestConnection.open(sock)` goes on.

    Args:
        sock: Of a stream, connected. It is made non-blocking. It stays the caller's, also after an error.
        secret: The line's, which ends a connection under way, and the next one's.
        opens: That of the connection under way, where it is another one's: of a guest that was stored with it.

    Raises:
        ReadTimeout: The init has not answered in time.
        ConnectionLost: The line was closed, or what came over it is no answer of an init.
    """
    sock.setblocking(False)
    try:
        async with asyncio.timeout(timeout_s):
            own = await _call(sock, opens or secret)
            await asyncio.get_running_loop().sock_sendall(sock, wire.line_confirm(own, secret) + wire.hello())
    except TimeoutError as error:
        raise ReadTimeout(f"the guest init did not answer a greeting within {timeout_s:g} s") from error
    except OSError as error:
        raise ConnectionLost(f"the line to the guest init broke: {error}") from error


async def _call(sock: socket.socket, secret: bytes) -> bytes:
    """Call until the last call is answered; returns the init's own number. Answers come in order, so none comes behind
    that one.
    """
    listening = _Listening(sock)
    while True:
        number = secrets.token_bytes(wire.LINE_NUMBER_BYTES)
        await asyncio.get_running_loop().sock_sendall(sock, secret + wire.line_call(number))
        try:
            async with asyncio.timeout(CALL_EVERY_S):
                return await listening.until(wire.line_answer(number), wire.LINE_NUMBER_BYTES)
        except TimeoutError:
            continue


class _Listening:
    """What comes over a line, of which all but an answer is of an earlier connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._seen = b""
        self._passed = 0

    async def until(self, mark: bytes, length: int) -> bytes:
        """The bytes behind `mark`. Nothing is read beyond them, for nothing follows an answer."""
        loop = asyncio.get_running_loop()
        while True:
            at = self._seen.find(mark)
            end = at + len(mark) + length
            if at >= 0 and len(self._seen) >= end:
                found, self._seen = self._seen[end - length : end], b""
                return found
            self._seen = self._seen[at if at >= 0 else -len(mark) :]
            data = await loop.sock_recv(self._sock, _PIECE_BYTES)
            if not data:
                raise ConnectionLost("the line to the guest init was closed")
            self._passed += len(data)
            if self._passed > PASSED_OVER_BYTES_MAX:
                raise ConnectionLost(f"over {PASSED_OVER_BYTES_MAX} bytes came from a guest init, and no answer")
            self._seen += data
