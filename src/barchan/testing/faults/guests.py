"""The programs of one sandbox as the host numbers them, and signals that reach those and no others."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from barchan.testing.leaks import Watch


class Program:
    """One process of a sandbox, held so that no later process of its number can be meant."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self._fd = fd

    def send(self, number: signal.Signals) -> bool:
        """False: it has ended."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        os.close(self._fd)


def programs(watch: Watch, sandbox_id: str) -> list[Program]:
    """What the guest runs, in the order of its start as far as the numbers tell; the caller closes each."""
    return _held(watch, sandbox_id, is_guest=True)


def inits(watch: Watch, sandbox_id: str) -> list[Program]:
    """Its init, and what the guest is hosted in where that is a process; the caller closes each."""
    return _held(watch, sandbox_id, is_guest=False)


def _held(watch: Watch, sandbox_id: str, *, is_guest: bool) -> list[Program]:
    found: dict[int, Program] = {}
    groups = watch.sandbox_groups(sandbox_id)
    for file in (file for group in groups for file in below(group, "cgroup.procs")):
        if not _is_unified(file) or ("guest" in file.parts) is not is_guest:
            continue
        for pid in _pids(file):
            if pid in found:
                continue
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            if pid in _pids(file):  # still that one, now that it is held
                found[pid] = Program(pid, fd)
            else:
                os.close(fd)
    return [found[pid] for pid in sorted(found)]


def below(group: Path, name: str) -> Iterator[Path]:
    """The files of that name in a group and those in it, which may go meanwhile."""
    for folder, _, names in os.walk(group):
        if name in names:
            yield Path(folder, name)


def _is_unified(file: Path) -> bool:
    """In the hierarchy of version 2, which alone tells the init from what the guest runs."""
    return (file.parent / "cgroup.events").exists()


def _pids(file: Path) -> list[int]:
    try:
        return [int(pid) for pid in file.read_text().split()]
    except OSError:  # removed meanwhile
        return []
