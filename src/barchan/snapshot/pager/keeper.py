"""A process that outlives a killed pager for a moment, so that no sandbox ever runs on pages that nobody fills.

When the last copy of a userfaultfd is closed, the kernel gives zeros for every page that is still missing. The keeper
shares the pager's table of descriptors, so each descriptor that the pager ever has, also one that it has just got,
stays open until the keeper ends too; before that it kills the sandboxes whose memory was not complete.
"""

import ctypes
import errno
import mmap
import os
import select
import signal
import struct
import time
import traceback
from typing import Final

from barchan.errors import CapacityError, RequirementMissing

SERVED_MAX: Final = 1024
GRACE_S: Final = 1.0  # for a node, which may end the sandboxes with a better record of why
KILL_S: Final = 10.0  # for killed processes to be gone
_PAUSE_S = 0.01
_CLONE_FILES = 0x400
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_ENTRY = struct.Struct("=ii")
_libc = ctypes.PyDLL(None, use_errno=True)


class Group:
    """A sandbox's control group of version 2: its files stay open, so that it can be ended without looking for it.

    Raises:
        OSError: There is no such group.
    """

    def __init__(self, path: str) -> None:
        self.kill_fd = os.open(f"{path}/cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
        try:
            self.events_fd = os.open(f"{path}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(self.kill_fd)
            raise

    def kill(self) -> None:
        """End all processes in it and below; fine when it is gone."""
        _kill(self.kill_fd)

    def wait_empty(self, seconds: float) -> None:
        """Block until no process is left in it, or for that long."""
        _wait_empty([self.events_fd], seconds)

    def close(self) -> None:
        os.close(self.kill_fd)
        os.close(self.events_fd)


class Keeper:
    """Starts the process. Only while there is one thread: it is a plain copy of this one.

    Raises:
        RequirementMissing: This kind of machine is not known here.
    """

    def __init__(self) -> None:
        machine = os.uname().machine
        if machine not in _SYS_CLONE:
            raise RequirementMissing(f"memory on demand is not made for {machine} machines; restore without it")
        self._table = mmap.mmap(-1, SERVED_MAX * _ENTRY.size)
        self._free = list(range(SERVED_MAX))
        pager = os.pidfd_open(os.getpid())
        self.pid = _libc.syscall(_SYS_CLONE[machine], _CLONE_FILES | signal.SIGCHLD, None, None, None, None)
        if self.pid < 0:
            raise OSError(ctypes.get_errno(), "the pager's keeper could not be started")
        if self.pid == 0:
            try:
                self._keep(pager)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        self.ended = os.pidfd_open(self.pid)

    def enter(self, group: Group) -> int:
        """From now on the group does not outlive this process. Returns what `leave` wants.

        Raises:
            CapacityError: Too many sandboxes are being filled.
        """
        if not self._free:
            raise CapacityError(f"the memory of {SERVED_MAX} sandboxes is coming in already", retry_after_ms=1000)
        entry = self._free.pop()
        _ENTRY.pack_into(self._table, entry * _ENTRY.size, group.kill_fd, group.events_fd)
        return entry

    def leave(self, entry: int) -> None:
        """The group may go on without us; call it before its files are closed."""
        _ENTRY.pack_into(self._table, entry * _ENTRY.size, 0, 0)
        self._free.append(entry)

    def _entries(self) -> list[tuple[int, int]]:
        return [(kill, events) for kill, events in _ENTRY.iter_unpack(self._table) if kill]

    def _keep(self, pager: int) -> None:
        os.setsid()  # what ends a session of the pager does not end this
        select.select([pager], [], [])
        left = self._entries()
        events = [events for _, events in left]
        _wait_empty(events, GRACE_S)
        errors = []
        for kill, _ in left:
            try:
                _kill(kill)
            except OSError as error:
                errors.append(error)
        _wait_empty(events, KILL_S)
        if errors:
            raise ExceptionGroup("sandboxes could not be ended", errors)


def _kill(fd: int) -> None:
    try:
        os.write(fd, b"1")
    except OSError as error:
        if error.errno != errno.ENODEV:  # the group was removed, so it was empty
            raise


def _wait_empty(events: list[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not all(map(_is_empty, events)):
        time.sleep(_PAUSE_S)


def _is_empty(fd: int) -> bool:
    try:
        return b"populated 0" in os.pread(fd, 4096, 0)
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        return True
