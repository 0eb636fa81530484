"""The memory of all sandboxes of a node, bounded to what they use: the kernel then kills for the host's want of it."""

import errno
from contextlib import suppress
from pathlib import Path

from barchan.errors import RequirementMissing
from barchan.testing.faults.guests import below
from barchan.testing.leaks import CGROUPS

SHARES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.02, 1.05, 1.1, 1.2)  # of what is used
UNBOUNDED = {"v1": b"-1", "v2": b"max"}


class Pressure:
    """The group that holds the memory of one node's sandboxes. It is not always there: the kernel may kill the node's
    supervisor, too, and another node's then removes what that has left, until the next makes it anew.

    Args:
        cgroup: The node's, as `Watch` names it.

    Raises:
        RequirementMissing: No controller counts memory there.
    """

    def __init__(self, cgroup: str) -> None:
        own_hierarchy = CGROUPS / "memory"
        self._version = "v1" if own_hierarchy.is_dir() else "v2"
        self._group = (own_hierarchy if self._version == "v1" else CGROUPS) / "barchan" / cgroup
        controllers = CGROUPS / "cgroup.controllers"
        if self._version == "v2" and not (controllers.exists() and "memory" in controllers.read_text().split()):
            raise RequirementMissing(f"oom-host needs a memory controller over {self._group}")

    def _file(self, what: str) -> Path:
        names = {
            "v1": {
                "limit": "memory.limit_in_bytes",
                "use": "memory.usage_in_bytes",
                "limit with swap": "memory.memsw.limit_in_bytes",
                "use with swap": "memory.memsw.usage_in_bytes",
            },
            "v2": {
                "limit": "memory.max",
                "use": "memory.current",
                "limit with swap": "memory.swap.max",
                "use with swap": "memory.swap.current",
            },
        }
        return self._group / names[self._version][what]

    def squeeze(self) -> None:
        """Leave nothing to take, on swap neither: as little as the kernel lets it be, after it has freed what it can.
        Blocks meanwhile; to be repeated, since sandboxes end and leave room, or use more at that moment than it takes.
        """
        any(self._bound(share) for share in SHARES)

    def _bound(self, share: float) -> bool:
        """Whether the kernel takes so much of what is used as the bound."""
        try:
            for what in ("limit", "limit with swap"):
                if self._file(what).exists():
                    used = int(self._file(what.replace("limit", "use")).read_text())
                    self._file(what).write_bytes(str(int(used * share)).encode())
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EINVAL, errno.ENOENT, errno.ENODEV):
                raise
            return False
        return True

    def release(self) -> None:
        """Lift the bound; harmless where there is none."""
        for what in ("limit with swap", "limit"):
            if self._file(what).exists():
                with suppress(FileNotFoundError):
                    self._file(what).write_bytes(UNBOUNDED[self._version])

    def kills(self) -> int:
        """Programs that the kernel has killed in this node's living sandboxes for want of memory."""
        name = "memory.oom_control" if self._version == "v1" else "memory.events"
        return sum(_kills(file) for file in below(self._group, name))


def _kills(file: Path) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:  # the sandbox has ended meanwhile
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
