"""What a container's programs wait for, by what the kernel says of each thread."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from barchan.backends.base import Activity

THREADS_MAX = 64  # more than that, and nobody looks: such a sandbox counts as being at work
_READ = {"x86_64": 0, "aarch64": 63}  # the number of the call
_PIPE = re.compile(r"pipe:\[\d+\]")
_PTY = re.compile(r"/dev/pts/\d+|/\d+")  # shown without its directory where that is out of reach


def activity(guest: str, threads: int, cpu_s: float) -> Activity:
    """How a guest's programs are.

    Args:
        guest: The directory of its group in the version 2 hierarchy.
        threads: How many there are, as the kernel counts them.
        cpu_s: That they have used.
    """
    if threads == 0:
        return Activity(has_programs=False, waits_for_client=True, cpu_s=cpu_s)
    if threads > THREADS_MAX:
        return Activity(has_programs=True, waits_for_client=False, cpu_s=cpu_s)
    found = [(pid, thread) for pid in pids(guest) for thread in _threads(pid)]
    fed = _pipes_of_init(guest)
    waiting = all(_waits(pid, thread, fed) for pid, thread in found[: 2 * THREADS_MAX])
    return Activity(has_programs=bool(found), waits_for_client=waiting, cpu_s=cpu_s)


def pids(guest: str) -> list[int]:
    """Every process of a group and of those below it."""
    found: list[int] = []
    for directory, _, _ in os.walk(guest):
        found += _members(directory)
    return found


def _members(group: str) -> list[int]:
    with suppress(OSError):  # a group that went while we looked
        return [int(line) for line in Path(group, "cgroup.procs").read_text().split()]
    return []


def _threads(pid: int) -> Iterator[str]:
    with suppress(OSError):
        yield from os.listdir(f"/proc/{pid}/task")


def _pipes_of_init(guest: str) -> set[str]:
    """Those that a client's input comes through, among others."""
    above, pipes = os.path.dirname(guest), set[str]()
    for group in (above, os.path.join(above, "init")):  # where it is with version 1, and with version 2
        for pid in _members(group):
            with suppress(OSError):  # it ended while we looked
                pipes |= {os.readlink(entry) for entry in os.scandir(f"/proc/{pid}/fd")}
    return {pipe for pipe in pipes if _PIPE.fullmatch(pipe)}


def _waits(pid: int, thread: str, fed: set[str]) -> bool:
    """Whether it reads its client's input. Who reads another program's, or waits for one to end, may have a timer that
    nobody sees from outside.
    """
    try:
        number, *arguments = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
        if not arguments or not number.isdigit():  # it runs, or was caught between calls
            return False
        if int(number) != _READ.get(platform.machine(), -1):
            return False
        source = os.readlink(f"/proc/{pid}/fd/{int(arguments[0], 16)}")
        return source in fed or bool(_PTY.fullmatch(source))
    except OSError:
        return True  # it has just ended
