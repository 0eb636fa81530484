"""userfaultfd: its messages and the requests that fill pages."""

import errno
import fcntl
import os
import struct
from typing import Final, NamedTuple

FAULT: Final = 0x12
FORK: Final = 0x13
REMAP: Final = 0x14
REMOVE: Final = 0x15
UNMAP: Final = 0x16

_COPY, _ZEROPAGE, _WAKE = 0xC028AA03, 0xC020AA04, 0x8010AA02
_MESSAGES = 32
_MESSAGE = struct.Struct("=B7xQQQ")
_UFD = struct.Struct("=I")
_COPY_ARGUMENT = struct.Struct("=QQQQq")
_ZERO_ARGUMENT = struct.Struct("=QQQq")
_RANGE = struct.Struct("=QQ")


class Event(NamedTuple):
    """One message. By kind: FAULT `a` = flags, `b` = address; FORK `a` = the child's descriptor;
    REMAP `a` -> `b`, `c` bytes; REMOVE and UNMAP `a` to `b`."""

    kind: int
    a: int
    b: int
    c: int


class Filled(NamedTuple):
    """How far a request came, and what stopped it (0: nothing)."""

    done_bytes: int
    number: int


def read(fd: int) -> list[Event]:
    """What waits to be known; empty when nothing does. The descriptor must not block.

    Raises:
        OSError: A forked child's descriptor could not be made; the event stays queued.
    """
    try:
        data = os.read(fd, _MESSAGES * _MESSAGE.size)
    except BlockingIOError:
        return []
    events = []
    for kind, a, b, c in _MESSAGE.iter_unpack(data):
        events.append(Event(kind, a & 0xFFFFFFFF if kind == FORK else a, b, c))
    return events


def copy(fd: int, start: int, length: int, source: int) -> Filled:
    """Put pages in place from an address of our own, and wake who waits for them."""
    argument = bytearray(_COPY_ARGUMENT.pack(start, source, length, 0, 0))
    return _fill(fd, _COPY, argument, length)


def zero(fd: int, start: int, length: int) -> Filled:
    """Put pages of zeros in place, and wake who waits for them."""
    argument = bytearray(_ZERO_ARGUMENT.pack(start, length, 0, 0))
    return _fill(fd, _ZEROPAGE, argument, length)


def wake(fd: int, start: int, length: int) -> None:
    """Have those who wait for a range look again."""
    fcntl.ioctl(fd, _WAKE, _RANGE.pack(start, length))


def _fill(fd: int, request: int, argument: bytearray, length: int) -> Filled:
    number = 0
    try:
        fcntl.ioctl(fd, request, argument, True)
    except OSError as error:
        number = error.errno or errno.EIO
    (done,) = struct.unpack_from("=q", argument, len(argument) - 8)
    if number and done < 0:
        return Filled(0, -done)
    if number and done > 0:
        return Filled(done, 0)  # the kernel says "again" after a part: whatever stands in the way shows then
    return Filled(length if not number else 0, number)
