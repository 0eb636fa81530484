"""What a container's programs wait for, by what the kernel says of each thread."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from barchan.backends.base import Activity

THREADS_MAX = 64  # more than that, and nobody looks: such a sandbox counts as being at work
# Numbers of read and of wait4 and waitid: calls that come back only when somebody else does something.
_CALLS = {"x86_64": (0, (61, 247)), "aarch64": (63, (260, 95))}
_FED = re.compile(r"pipe:\[\d+\]|/dev/pts/\d+|/\d+")  # a pty is shown without its directory where that is out of reach


def activity(guest: str, threads: int, cpu_s: float) -> Activity:
    """How a guest's programs are.

    Args:
        guest: The directory of its group in the version 2 hierarchy.
        threads: How many there are, as the kernel counts them.
        cpu_s: That they have used.
    """
    if threads > THREADS_MAX:
        return Activity(has_programs=True, waits_for_client=False, cpu_s=cpu_s)
    found = [(pid, thread) for pid in pids(guest) for thread in _threads(pid)]
    waiting = all(_waits(pid, thread) for pid, thread in found[: 2 * THREADS_MAX])
    return Activity(has_programs=bool(found), waits_for_client=waiting, cpu_s=cpu_s)


def pids(guest: str) -> list[int]:
    """Every process of a group and of those below it."""
    found: list[int] = []
    for directory, _, _ in os.walk(guest):
        with suppress(OSError):  # a group that went while we looked
            found += [int(line) for line in Path(directory, "cgroup.procs").read_text().split()]
    return found


def _threads(pid: int) -> Iterator[str]:
    with suppress(OSError):
        yield from os.listdir(f"/proc/{pid}/task")


def _waits(pid: int, thread: str) -> bool:
    """Whether it does nothing until its client feeds it, or another program of the guest ends or feeds it."""
    read, waits = _CALLS.get(platform.machine(), (-1, ()))
    try:
        number, *arguments = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
        if not arguments or not number.isdigit():  # it runs, or was caught between calls
            return False
        if int(number) in waits:
            return True
        return int(number) == read and bool(_FED.fullmatch(os.readlink(f"/proc/{pid}/fd/{int(arguments[0], 16)}")))
    except OSError:
        return True  # it has just ended
