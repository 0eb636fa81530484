"""The kernel's side of the reader: threads that take requests from /dev/fuse and answer what they can at once."""

import errno
import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

from barchan.image.lazy import protocol as fuse

THREADS = 4

_log = logging.getLogger(__name__)


class File(Protocol):
    """One file of the directory; safe to use from any thread."""

    size_bytes: int

    def read(self, offset: int, size: int) -> bytes | None:
        """Bytes that are here, or None."""


class Device:
    """Serves one FUSE connection; any number of descriptors of it may be served, one process after the other.

    Args:
        fd: Of /dev/fuse, mounted; the device closes it.
        find: The file of a node id, or None. Called by the threads.
        miss: A read that has to wait for its data, failed here, or is of a node id that `find` does not know:
            (request id, node id, offset, size, pid). Called by the threads; answered by `reply` or `fail`.
        ended: The file system is gone. Called by a thread.
    """

    def __init__(
        self,
        fd: int,
        find: Callable[[int], File | None],
        miss: Callable[[int, int, int, int, int], None],
        ended: Callable[[], None],
    ) -> None:
        self._fd = fd
        self._find = find
        self._miss = miss
        self._ended = ended
        self._is_over = threading.Lock()  # taken once, by the thread that is first to see the end

    def start(self) -> None:
        """Begin to serve, first what somebody else took and did not answer."""
        try:
            os.write(self._fd, fuse.resend())
        except OSError as error:
            if error.errno != errno.EINVAL:  # before Linux 6.9: what a killed reader had taken is lost
                raise
        for number in range(THREADS):
            threading.Thread(target=self._serve, name=f"fuse-{number}", daemon=True).start()

    def reply(self, unique: int, data: bytes) -> None:
        self._write([fuse.header(unique, len(data)), data])

    def fail(self, unique: int, number: int) -> None:
        self._write([fuse.failure(unique, number)])

    def _write(self, parts: list[bytes]) -> None:
        try:
            os.writev(self._fd, parts)
        except OSError as error:
            # ENOENT: whoever asked is gone. ENODEV: the file system is, which the threads find out by themselves.
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise

    def _serve(self) -> None:
        buffer = bytearray(fuse.MESSAGE_BYTES_MAX)
        view = memoryview(buffer)
        while True:
            try:
                length = os.readv(self._fd, [buffer])
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                length = 0
            if not length:
                if self._is_over.acquire(blocking=False):
                    self._ended()
                return
            try:
                self._handle(fuse.parse(view[:length]))
            except Exception:  # whatever one request does, the others are served
                _log.exception("a request of the kernel was not answered")

    def _handle(self, request: fuse.Request) -> None:
        if request.opcode == fuse.READ:
            self._read(request)
        elif request.opcode not in fuse.SILENT:
            try:
                answer = self._answer(request)
            except OSError as error:
                self.fail(request.unique, error.errno or errno.EIO)
            else:
                self.reply(request.unique, answer)

    def _read(self, request: fuse.Request) -> None:
        offset, size = fuse.read_in(request.body)
        try:
            file = self._find(request.node_id)
            data = None if file is None else file.read(offset, size)
        except Exception:  # a guest may see no error before it is reported, whatever the error is
            _log.exception("a read of the cache failed")
            data = None
        if data is None:
            self._miss(request.unique, request.node_id, offset, size, request.pid)
        else:
            self.reply(request.unique, data)

    def _answer(self, request: fuse.Request) -> bytes:
        if request.opcode == fuse.INIT:
            return fuse.init(request.body)
        if request.opcode == fuse.LOOKUP:
            return self._lookup(bytes(request.body).rstrip(b"\0"))
        if request.opcode == fuse.GETATTR:
            is_root = request.node_id == fuse.ROOT_ID
            return fuse.attr_out(request.node_id, None if is_root else self._file(request.node_id).size_bytes)
        if request.opcode == fuse.OPEN:
            self._file(request.node_id)
            return fuse.open_out()
        if request.opcode in (fuse.RELEASE, fuse.FLUSH):
            return b""
        if request.opcode == fuse.STATFS:
            return fuse.statfs_out()
        # Among them INTERRUPT: the kernel then sends no more of them, and reads are not broken off by signals.
        raise OSError(errno.ENOSYS, f"operation {request.opcode}")

    def _lookup(self, name: bytes) -> bytes:
        if len(name) != 64 or name.strip(b"0123456789abcdef"):
            raise OSError(errno.ENOENT, "no such layer")
        node_id = fuse.node_id_of(name.decode())
        return fuse.entry_out(node_id, self._file(node_id).size_bytes)

    def _file(self, node_id: int) -> File:
        file = self._find(node_id)
        if file is None:
            raise OSError(errno.ENOENT, "no such layer")
        return file
