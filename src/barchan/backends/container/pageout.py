"""Give the memory of a stopped guest away: to swap where there is some, else what the page cache holds for it.

Version 2 has memory.reclaim. Elsewhere process_madvise(2) pushes out what each process alone has mapped, and
memory.force_empty what is left in the group, where most of it is mapped by nobody. Pages of an image's files that
processes have mapped are left alone: for each, the kernel looks at every sandbox that has mapped the file (with 1,000
a second of CPU for one page-out), takes it from all of them, and the next one to read it pays for it again.
"""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from barchan.backends.container.activity import pids

_SYS_PROCESS_MADVISE = 440
_MADV_PAGEOUT = 21
_RANGES_MAX = 1024  # of one call
_MAPS_MAX = 1 << 16  # of one process: the kernel's own bound, unless it was raised
_PIECE_BYTES = 64 << 20  # of one range: a call that goes on for long holds the process's memory map
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def page_out(guest: str, memory: str, *, has_reclaim: bool) -> int:
    """Free what can be freed of a stopped guest's memory; returns by how many bytes its group has shrunk. Blocks.

    Args:
        guest: The directory of its group in the version 2 hierarchy.
        memory: That of the group that its memory is counted in.
        has_reclaim: `memory` is of version 2.
    """
    usage = f"{memory}/{'memory.current' if has_reclaim else 'memory.usage_in_bytes'}"
    before = _number(usage)
    if has_reclaim:
        _ask(f"{memory}/memory.reclaim", str(before))
    else:
        if has_swap():
            for pid in pids(guest):
                _page_out_process(pid)
        if _is_mostly_unmapped(f"{memory}/memory.stat"):
            _ask(f"{memory}/memory.force_empty", "0")
    return max(0, before - _number(usage))


def has_swap() -> bool:
    """Whether anything but the page cache can be given away."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("SwapFree:"):
            return int(line.split()[1]) > 0
    return False


def _page_out_process(pid: int) -> None:
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            batch: list[tuple[int, int]] = []
            for start, end in _private(pid):
                batch.append((start, end - start))
                if len(batch) == _RANGES_MAX:
                    _advise(pidfd, batch)
                    batch = []
            if batch:
                _advise(pidfd, batch)
        finally:
            os.close(pidfd)


def _private(pid: int) -> Iterator[tuple[int, int]]:
    """Ranges of a process's memory that are its own to write: the rest is shared with others, or clean already."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            for _, line in zip(range(_MAPS_MAX), maps, strict=False):
                span, access, *_ = line.split(" ", 2)
                if access.startswith("rw") and access.endswith("p"):
                    start, end = (int(number, 16) for number in span.split("-"))
                    while start < end:
                        yield start, min(end, start + _PIECE_BYTES)
                        start += _PIECE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return


def _advise(pidfd: int, batch: list[tuple[int, int]]) -> None:
    """Push ranges out. The kernel stops at the first that can't be advised (mapped by a device, locked): it is left."""
    at = 0
    while at < len(batch):
        ranges = (_Range * (len(batch) - at))(*(_Range(*span) for span in batch[at:]))
        wanted = sum(length for _, length in batch[at:])
        done = _libc.syscall(
            ctypes.c_long(_SYS_PROCESS_MADVISE),
            ctypes.c_int(pidfd),
            ranges,
            ctypes.c_size_t(len(ranges)),
            ctypes.c_int(_MADV_PAGEOUT),
            ctypes.c_uint(0),
        )
        if done < 0:
            number = ctypes.get_errno()
            if number == errno.ESRCH:
                return
            if number not in (errno.EINVAL, errno.ENOMEM):
                raise OSError(number, f"process_madvise: {os.strerror(number)}")
            at += 1
        elif done >= wanted:
            return
        else:
            for _, length in batch[at:]:
                at += 1
                if done < length:
                    break
                done -= length


def _is_mostly_unmapped(path: str) -> bool:
    """Whether more of a group's page cache (files it wrote, tmpfs) is mapped by no process than is."""
    with suppress(OSError):
        counts = dict(line.split() for line in Path(path).read_text().splitlines())
        return int(counts["total_cache"]) > 2 * int(counts["total_mapped_file"])
    return False


def _ask(path: str, text: str) -> None:
    """Write to a control file; that the kernel could not free as much as it was asked to is no failure."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EBUSY, errno.ENOENT, errno.ENODEV, errno.EINTR):
            raise


def _number(path: str) -> int:
    with suppress(OSError):
        return int(Path(path).read_text())
    return 0
