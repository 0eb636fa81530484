"""How long reads have waited for their bytes, and whose they were: no program is to be blamed for that time."""

from collections import deque
from pathlib import Path
from typing import Final

WAITS_MAX: Final = 4096  # that are over and remembered
_GROUPS_BYTES_MAX: Final = 4096


class Waits:
    """Of all layers of one reader; times are of its event loop's clock, in seconds."""

    def __init__(self) -> None:
        self._now: dict[int, tuple[str, float]] = {}
        self._past: deque[tuple[str, float, float]] = deque(maxlen=WAITS_MAX)

    def begin(self, unique: int, pid: int, began: float) -> None:
        """Note a read that waits since `began`; of a process that is gone nobody will ask."""
        if unique not in self._now:
            self._now[unique] = (_groups(pid), began)

    def end(self, unique: int, now: float) -> None:
        found = self._now.pop(unique, None)
        if found is not None:
            self._past.append((*found, now))

    def of(self, group: str, since: float, now: float) -> tuple[float, float]:
        """For how much of the time since then some read of a control group waited, and for how long one does now."""
        waiting = [began for groups, began in self._now.values() if _is_in(group, groups)]
        spans = [(began, end) for groups, began, end in self._past if end > since and _is_in(group, groups)]
        waited, reached = 0.0, since
        for began, end in sorted(spans + [(began, now) for began in waiting]):
            waited += max(0.0, end - max(began, reached))
            reached = max(reached, end)
        return waited, max((now - began for began in waiting), default=0.0)


def _groups(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()[:_GROUPS_BYTES_MAX]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_in(group: str, groups: str) -> bool:
    """Whether one of a process's groups is that one, one beside it for the platform's programs, or below."""
    return any(f"{group}{end}" in groups for end in ("/", ".platform", "\n"))
