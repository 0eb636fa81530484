"""What a container's programs wait for, by what the kernel says of each thread."""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from barchan.backends.base import Activity
from barchan.backends.container.waits import call_of, has_timers, waits_for_event

THREADS_MAX = 64  # more than that, and nobody looks: such a sandbox counts as being at work
_READ = {"x86_64": 0, "aarch64": 63}  # the number of the call
_PIPE = re.compile(r"pipe:\[\d+\]")
_PTY = re.compile(r"/dev/pts/\d+|/\d+")  # shown without its directory where that is out of reach


def activity(guest: str, threads: int, cpu_s: float, *, is_closed: bool) -> Activity:
    """How a guest's programs are.

    Args:
        guest: The directory of its group in the version 2 hierarchy.
        threads: How many there are, as the kernel counts them.
        cpu_s: That they have used.
        is_closed: Nothing reaches them but what their client sends: the sandbox has no network.
    """
    if threads == 0:
        return Activity(has_programs=False, waits_for_client=True, cpu_s=cpu_s)
    if threads > THREADS_MAX:
        return Activity(has_programs=True, waits_for_client=False, cpu_s=cpu_s)
    found = [(pid, thread) for pid in pids(guest) for thread in _threads(pid)]
    fed = _pipes_of_init(guest)
    waiting = all(_waits(pid, thread, fed) for pid, thread in found[: 2 * THREADS_MAX])
    return Activity(
        has_programs=bool(found),
        waits_for_client=waiting,
        cpu_s=cpu_s,
        waits_for_events=waiting or (is_closed and _wait_for_events(found[: 2 * THREADS_MAX])),
    )


def _wait_for_events(found: Sequence[tuple[int, str]]) -> bool:
    if not all(waits_for_event(pid, thread) for pid, thread in found):
        return False
    return not any(has_timers(pid) for pid in {pid for pid, _ in found})


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
            with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # it may end while we look
                pipes |= {os.readlink(entry) for entry in entries}
    return {pipe for pipe in pipes if _PIPE.fullmatch(pipe)}


def _waits(pid: int, thread: str, fed: set[str]) -> bool:
    """Whether it reads its client's input. Who reads another program's, or waits for one to end, may have a timer that
    nobody sees from outside.
    """
    try:
        call = call_of(pid, thread)
        if call is None or call[0] != _READ.get(platform.machine(), -1):
            return False
        source = os.readlink(f"/proc/{pid}/fd/{call[1][0]}")
        return source in fed or bool(_PTY.fullmatch(source))
    except OSError:
        return True  # it has just ended
