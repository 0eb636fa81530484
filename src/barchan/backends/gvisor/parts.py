"""The programs of the host that run a gVisor guest: the starter, its gofer and its sentry, told from the guest's own.

The guest's programs are processes of the host, too, which descend from the sentry, and which the kernel shall kill
first where their memory is full. When it kills one of these three, the guest is gone: so it counts such kills apart,
where it can.
"""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from barchan.backends.container.backend import ContainerHandle

_STOPPED = "Tt"
_OWN = "RssAnon:"


class _Process(NamedTuple):
    state: str
    parent: int


def set_apart(outer: ContainerHandle) -> None:
    """Have the kernel count its kills of those three apart; before anything of the guest runs. Blocks for a while.

    Raises:
        OSError: One of them has ended.
    """
    found = {pid: _process(pid) for pid in outer.counters.charged()}
    starters = {pid for pid, process in found.items() if process.parent == outer.pid}
    outer.counters.set_apart(pid for pid, process in found.items() if pid in starters or process.parent in starters)


def is_stopped(outer: ContainerHandle) -> bool:
    """Whether somebody on the host has stopped one of them by a signal. False where they were not set apart."""
    for pid in outer.counters.charged(apart=True):
        with suppress(OSError):  # it has just ended
            if _process(pid).state in _STOPPED:
                return True
    return False


def own_bytes(outer: ContainerHandle) -> int:
    """Memory that the three have for themselves; the guest's is shared by what runs its programs. 0 where they were not
    set apart.
    """
    found = 0
    for pid in outer.counters.charged(apart=True):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
                if line.startswith(_OWN):
                    found += int(line.split()[1]) << 10
    return found


def _process(pid: int) -> _Process:
    """Raises `OSError`: it is gone."""
    words = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return _Process(state=words[0], parent=int(words[1]))
