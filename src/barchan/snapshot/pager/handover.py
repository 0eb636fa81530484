"""CRIU's connection: what it hands over of the processes that it restores.

For each process it sends the pid that it had in the dump (4 bytes; negative: a zombie, and nothing more comes of it)
and a byte with the descriptor of its userfaultfd. A last number says that all are restored.
"""

import array
import asyncio
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from barchan.errors import BackendError, RemoteProtocolError

SOCKET_NAME: Final = "lazy-pages.socket"  # CRIU's choice
_RESTORED = 0x52535446
_NUMBER = struct.Struct("=i")
_CREDENTIALS = struct.Struct("iII")
_FDS = array.array("i")


class Handover:
    """Listens for one CRIU in a directory.

    Args:
        connected: Called before anything is taken; what it raises turns CRIU away.
        received: Takes a pid of the dump and a descriptor, which it owns from then on.

    Attributes:
        restored: Done when all processes are; the exception says why they are not.
    """

    def __init__(self, directory: Path, connected: Callable[[], None], received: Callable[[int, int], None]) -> None:
        self.restored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connected = connected
        self._received = received
        self._loop = asyncio.get_running_loop()
        self._pid = 0
        self._bytes = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._socket.bind(f"/proc/self/fd/{folder}/{SOCKET_NAME}")  # a path of any length
            self._socket.listen(1)
        except BaseException:
            self._socket.close()
            raise
        finally:
            os.close(folder)
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Listen or read no more."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _accept(self) -> None:
        connection, _ = self._socket.accept()
        self.close()  # there is one restore
        self._socket = connection
        connection.setblocking(False)
        try:
            _, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != os.geteuid():
                raise RemoteProtocolError(f"user {uid} came for a restore's memory")
            self._connected()
        except Exception as error:
            self._end(error)
            return
        self._loop.add_reader(connection.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            while not self.restored.done():
                self._receive()
        except BlockingIOError:
            return
        except Exception as error:
            self._end(error)

    def _receive(self) -> None:
        """One piece: a number, or the byte behind it."""
        wanted = 1 if self._pid else _NUMBER.size - len(self._bytes)
        data, ancillary, _, _ = self._socket.recvmsg(wanted, socket.CMSG_SPACE(_FDS.itemsize), socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if not data:
            raise BackendError("CRIU ended before the restore was done: its log says why")
        if self._pid:
            pid, self._pid = self._pid, 0
            if len(fds) != 1:
                raise RemoteProtocolError("CRIU sent a process without its userfaultfd")
            self._received(pid, fds[0])
            return
        self._bytes += data
        if len(self._bytes) < _NUMBER.size:
            return
        (number,) = _NUMBER.unpack(self._bytes)
        self._bytes = b""
        if number == _RESTORED:
            self._end(None)
        elif number > 0:
            self._pid = number

    def _end(self, error: Exception | None) -> None:
        self.close()
        if self.restored.done():
            return
        if error is None:
            self.restored.set_result(None)
        else:
            self.restored.set_exception(error)
