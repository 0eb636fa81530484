"""Threads that answer the kernel: whatever one read does, it is passed on, and the next is served."""

import errno
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from barchan.image.lazy import protocol as fuse
from barchan.image.lazy.device import THREADS, Device

_IN = struct.Struct("=IIQQIIIHH")
_READ = struct.Struct("=QQIIQII")
BROKEN, WHOLE, UNKNOWN = 7, 8, 9


class _File:
    size_bytes = 5

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def read(self, offset: int, size: int) -> bytes | None:
        if self._error is not None:
            raise self._error
        return b"bytes"


class _Kernel:
    """The other end of a device, and what the device passed on."""

    def __init__(self, error: Exception) -> None:
        self.socket, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.missed: queue.Queue[int] = queue.Queue()
        self.ended = threading.Event()
        files = {BROKEN: _File(error), WHOLE: _File(None)}
        self._ours = ours.detach()
        device = Device(self._ours, files.get, lambda unique, *_: self.missed.put(unique), self.ended.set)
        before = set(threading.enumerate())
        device.start()
        self._threads = set(threading.enumerate()) - before
        self.socket.recv(4096)  # asks for what somebody else took

    def ask(self, unique: int, opcode: int, node_id: int, body: bytes) -> None:
        self.socket.send(_IN.pack(_IN.size + len(body), opcode, unique, node_id, 0, 0, 1, 0, 0) + body)

    def read(self, unique: int, node_id: int) -> None:
        self.ask(unique, fuse.READ, node_id, _READ.pack(0, 0, 5, 0, 0, 0, 0))

    def end(self) -> None:
        self.socket.close()
        assert self.ended.wait(10)
        for thread in self._threads:  # one that still reads would take what comes to the next one of that number
            thread.join(10)
        os.close(self._ours)


@pytest.fixture(params=[OSError(errno.EBADF, "closed"), ValueError("odd")])
def kernel(request: pytest.FixtureRequest) -> Iterator[_Kernel]:
    kernel = _Kernel(request.param)
    yield kernel
    kernel.end()


def test_a_read_that_fails_is_passed_on_and_ends_no_thread(kernel: _Kernel) -> None:
    """More such reads than there are threads, of files that fail or are unknown; then one that is right."""
    for unique in range(1, 3 * THREADS):
        kernel.read(unique, BROKEN if unique % 2 else UNKNOWN)
    assert sorted(kernel.missed.get(timeout=10) for _ in range(1, 3 * THREADS)) == list(range(1, 3 * THREADS))
    kernel.read(99, WHOLE)
    assert kernel.socket.recv(4096) == fuse.header(99, 5) + b"bytes"


def test_a_request_that_is_none_ends_no_thread(kernel: _Kernel) -> None:
    """Too short to be one, or of a body that is."""
    for unique in range(2 * THREADS):
        kernel.socket.send(b"short")
        kernel.ask(unique, fuse.READ, WHOLE, b"")
    kernel.read(99, WHOLE)
    assert kernel.socket.recv(4096) == fuse.header(99, 5) + b"bytes"
