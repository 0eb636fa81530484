"""What a sentry stores comes through pipes: it has no descriptor of the node's disk, nor a say in how much it takes."""

import os
import select
from collections.abc import Sequence
from contextlib import ExitStack
from fcntl import F_SETPIPE_SZ, fcntl
from pathlib import Path

from barchan.backends.hosted.target import Target
from barchan.errors import BackendError

PIPE_BYTES = 1 << 20


class Intake:
    """Pipes into new files. `run` moves what comes, in a thread, until `stop`; then it has all that was written before.

    Args:
        bytes_max: Of all files together.

    Attributes:
        ends: The descriptors to write to; they belong to this.
    """

    def __init__(self, files: Sequence[Path], bytes_max: int) -> None:
        self.ends: list[int] = []
        self._files = files
        self._left = bytes_max
        self._pipes: list[int] = []
        self._stop = -1
        try:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            for _ in files:
                reader, writer = os.pipe2(os.O_CLOEXEC)
                self._pipes.append(reader)
                self.ends.append(writer)
                os.set_blocking(reader, False)
                fcntl(reader, F_SETPIPE_SZ, PIPE_BYTES)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """After `run`, or instead of it."""
        for fd in (*self._pipes, *self.ends, self._stop):
            if fd >= 0:
                os.close(fd)
        self._pipes, self.ends, self._stop = [], [], -1

    def stop(self) -> None:
        """Nothing more will be written."""
        os.eventfd_write(self._stop, 1)

    def run(self) -> None:
        """Raises `OSError`: no room. `BackendError`: it is more than it may be. Who writes is told by a broken pipe."""
        try:
            with ExitStack() as opened:
                targets = [opened.enter_context(Target(path)) for path in self._files]
                self._move(dict(zip(self._pipes, targets, strict=True)))
        finally:
            for fd in self._pipes:
                os.close(fd)
            self._pipes = []

    def _move(self, targets: dict[int, Target]) -> None:
        poll = select.poll()
        for fd in (*targets, self._stop):
            poll.register(fd, select.POLLIN)
        is_stopped = False
        while targets and not is_stopped:
            ready = [fd for fd, _ in poll.poll()]
            is_stopped = self._stop in ready  # what was written before is there
            for fd in list(targets) if is_stopped else ready:
                if not self._take(fd, targets[fd]):
                    poll.unregister(fd)
                    del targets[fd]

    def _take(self, pipe: int, target: Target) -> bool:
        """Move what is in a pipe; False: nothing will come any more."""
        while True:
            target.will_have(PIPE_BYTES)
            try:
                count = os.splice(pipe, target.fd, PIPE_BYTES)
            except BlockingIOError:
                return True
            self._left -= count
            if self._left < 0:
                raise BackendError("what runs the guest wrote more than its memory has")
            if count == 0:
                return False
