"""What a thread waits for, by the call that the kernel has it in."""

import os
import platform
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

# By the machine: calls that wait, by number. Descriptors are looked at; the rest is where the limit of time stands
# among the arguments: an integer of milliseconds, or a pointer to one.
_FD: dict[str, frozenset[int]] = {
    "x86_64": frozenset({0, 19, 43, 45, 47, 288}),  # read, readv, accept, recvfrom, recvmsg, accept4
    "aarch64": frozenset({63, 65, 202, 207, 212, 242}),
}
_MILLISECONDS: dict[str, dict[int, int]] = {
    "x86_64": {7: 2, 232: 3, 281: 3},  # poll, epoll_wait, epoll_pwait
    "aarch64": {22: 3},
}
_POINTER: dict[str, dict[int, int]] = {
    "x86_64": {23: 4, 202: 3, 270: 4, 271: 2, 441: 3},  # select, futex, pselect6, ppoll, epoll_pwait2
    "aarch64": {72: 4, 73: 2, 98: 3, 441: 3},
}
_ENDLESS: dict[str, frozenset[int]] = {
    "x86_64": frozenset({34, 61, 130, 247}),  # pause, wait4, rt_sigsuspend, waitid
    "aarch64": frozenset({95, 133, 260}),
}
_MACHINE = platform.machine()
# Of these descriptors a program may wait as for any other, and they have timers of their own.
_WITH_TIMERS = ("anon_inode:[timerfd]", "anon_inode:[io_uring]")


def waits_for_event(pid: int, thread: str) -> bool:
    """Whether it does nothing until an event comes, however long that takes. One that is gone does nothing."""
    try:
        call = call_of(pid, thread)
        return call is not None and is_endless(*call, lambda fd: _kind(pid, fd))
    except OSError:
        return True


def call_of(pid: int, thread: str) -> tuple[int, list[int]] | None:
    """The call that a thread is in, and its arguments; None: it runs, or was caught between calls."""
    number, *arguments = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
    if not arguments or not number.isdigit():
        return None
    return int(number), [int(word, 16) for word in arguments]


def is_endless(number: int, arguments: Sequence[int], kind: Callable[[int], int]) -> bool:
    """Whether a call returns only when something happens.

    Args:
        kind: What a descriptor is, as `st_mode` has it.
    """
    if number in _ENDLESS.get(_MACHINE, ()):
        return True
    if (at := _POINTER.get(_MACHINE, {}).get(number)) is not None:
        return arguments[at] == 0
    if (at := _MILLISECONDS.get(_MACHINE, {}).get(number)) is not None:
        return bool(arguments[at] & 0x80000000)  # as 32 bits, less than none
    if number in _FD.get(_MACHINE, ()):
        mode = kind(arguments[0])
        return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)
    return False


def has_timers(pid: int) -> bool:
    """Whether a process has timers that can be seen. What `alarm` and `setitimer` have set can't."""
    try:
        if Path(f"/proc/{pid}/timers").read_text():
            return True
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(os.readlink(entry) in _WITH_TIMERS for entry in entries)
    except OSError:
        return False  # it has just ended


def _kind(pid: int, fd: int) -> int:
    return os.stat(f"/proc/{pid}/fd/{fd}").st_mode
