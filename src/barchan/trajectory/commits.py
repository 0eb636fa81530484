"""Puts appended entries on disk, many at a time: one sync of a log serves all who wait for it, and syncs of several
logs at once share what the file system does for each (a commit of its journal).

Nothing here sleeps to gather a group: what is appended while the disk is at work is the next one.
"""

import asyncio
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from barchan.errors import BackendError

# At once, in a process. What they share is the journal's commit: on ext4 one sync alone needs 1 flush of the disk,
# with 4 at once each needs 0.7, with 8 and 16 about 0.35.
SYNCS_MAX = 8


class Commits:
    """What of one log is on disk. Its writer appends and closes; anybody waits, from any event loop.

    Args:
        fd: The log's, which is closed by `close` and by nobody else.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._file = threading.Lock()  # held while the descriptor is in use by a thread, or closed
        self._lock = threading.Lock()  # of what follows
        self._appended = self._durable = -1
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._is_due = False
        self._is_named = False
        self._failure = ""

    def appended(self, seq: int) -> None:
        """An entry is in the kernel's hands.

        Raises:
            BackendError: The disk failed: what was appended may be lost, and nothing more is worth appending.
        """
        if self._failure:
            raise BackendError(self._failure)
        self._appended = seq

    async def wait(self, seq: int) -> None:
        """Return when that entry is on disk.

        Raises:
            BackendError: The disk failed.
        """
        if seq <= self._durable:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._failure:
                raise BackendError(self._failure)
            if seq <= self._durable:
                return
            self._waiting.append((seq, future))
            is_due, self._is_due = self._is_due, True
        if not is_due:
            _threads().submit(self._commit)
        await future

    def sync(self) -> None:
        """Wait for the disk in this thread.

        Raises:
            BackendError: It failed, now or before.
        """
        with self._file:
            self._sync()
        if self._failure:
            raise BackendError(self._failure)

    def close(self) -> None:
        """Let go of the file, once no thread uses it. Idempotent."""
        with self._file:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
            self._settle()

    def _commit(self) -> None:
        with self._file:
            self._sync()
        with self._lock:
            self._is_due = again = bool(self._waiting)
        if again:  # what was appended while the disk was at work
            _threads().submit(self._commit)

    def _sync(self) -> None:
        seq = self._appended
        if self._fd >= 0 and not self._failure:
            try:
                os.fdatasync(self._fd)
                if not self._is_named:
                    _sync_folder(self._path.parent)
                    self._is_named = True
            except OSError as error:  # no second try: the kernel tells once, and may have dropped what it had
                self._failure = f"the trajectory log {self._path} can't be put on disk: {error.strerror}"
            else:
                self._durable = max(self._durable, seq)
        self._settle()

    def _settle(self) -> None:
        """Tell those whose entry is on disk, or never will be."""
        with self._lock:
            if self._fd < 0 and self._durable < self._appended and not self._failure:
                self._failure = f"the trajectory log {self._path} was closed before it was put on disk"
            durable = math.inf if self._failure else self._durable
            told = [future for seq, future in self._waiting if seq <= durable]
            self._waiting = [(seq, future) for seq, future in self._waiting if seq > durable]
        for future in told:
            with suppress(RuntimeError):  # its loop is closed, and nobody waits there any more
                future.get_loop().call_soon_threadsafe(_tell, future, self._failure)


def _tell(future: asyncio.Future[None], failure: str) -> None:
    if future.done():  # cancelled
        return
    if failure:
        future.set_exception(BackendError(failure))
    else:
        future.set_result(None)


def _sync_folder(folder: Path) -> None:
    """Put a new file's name on disk, too."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_pool: ThreadPoolExecutor | None = None
_making = threading.Lock()


def _threads() -> ThreadPoolExecutor:
    """Those of this process; they are started as they are needed."""
    global _pool
    with _making:
        if _pool is None:
            _pool = ThreadPoolExecutor(SYNCS_MAX, thread_name_prefix="trajectory-commits")
        return _pool


def _forget_threads() -> None:
    """A forked process has none of its parent's threads."""
    global _pool, _making
    _pool, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)
