"""Whether a memory snapshot that was made on one host can be restored on another.

Programs have asked the kernel and the processor what they can do, and go on believing it. So the kernel must be of the
same release series, the processor must have every feature that the other one had, and CRIU must not be older.
"""

import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from barchan.errors import SnapshotIncompatible
from barchan.model.snapshot import FORMAT, MemoryRecord

_CPUINFO = Path("/proc/cpuinfo")
_NAMED_MAX = 8  # features that a message lists


class Host(NamedTuple):
    """What matters of a host: CRIU's version, the kernel's release, the architecture, the processor's features."""

    criu: str
    kernel: str
    machine: str
    cpu_features: tuple[str, ...]


def this_host(criu: str) -> Host:
    """This one, with the CRIU of that version; it reads a few kilobytes of /proc."""
    system = platform.uname()
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE)
    return Host(criu, system.release, system.machine, tuple(sorted(flags[1].split())) if flags else ())


def check(record: MemoryRecord, host: Host) -> None:
    """Compare a dump with the host on which it is to be restored.

    Raises:
        SnapshotIncompatible: It can't be restored there; says everything that differs.
    """
    differs = _kind(record, "container")
    if record.format != FORMAT:
        differs.append(f"it has format {record.format}, and this release restores {FORMAT}")
    if record.machine != host.machine:
        differs.append(f"it is of a {record.machine}, and this is a {host.machine}")
    else:
        missing = sorted(set(record.cpu_features) - set(host.cpu_features))
        if missing:
            more = f" and {len(missing) - _NAMED_MAX} more" if len(missing) > _NAMED_MAX else ""
            differs.append(f"this processor lacks {', '.join(missing[:_NAMED_MAX])}{more}, which the other one had")
    if _numbers(record.kernel)[:2] != _numbers(host.kernel)[:2]:
        differs.append(f"it is of Linux {record.kernel}, and this is {host.kernel}")
    if _numbers(host.criu) < _numbers(record.criu):
        differs.append(f"CRIU {record.criu} wrote it, and the one here, {host.criu}, is older")
    _refuse(differs)


def check_engine(record: MemoryRecord, backend: str, engine: Mapping[str, str]) -> None:
    """Compare a dump of a guest that has a kernel of its own with what would run it here.

    Args:
        engine: As the backend would write it now.

    Raises:
        SnapshotIncompatible: It can't be restored; says everything that differs.
    """
    differs = _kind(record, backend)
    machine = platform.uname().machine
    if record.machine != machine:
        differs.append(f"it is of a {record.machine}, and this is a {machine}")
    for key in sorted({*record.engine, *engine}):
        theirs, ours = record.engine.get(key, "none"), engine.get(key, "none")
        if theirs != ours:
            differs.append(f"its {key} is {theirs}, and the one here is {ours}")
    _refuse(differs)


def _kind(record: MemoryRecord, backend: str) -> list[str]:
    return [] if record.backend == backend else [f"it is of a {record.backend} sandbox, and this is a {backend}"]


def _refuse(differs: list[str]) -> None:
    if differs:
        raise SnapshotIncompatible(
            f"the memory snapshot can't be restored on this node: {'; '.join(differs)} "
            "(try: a node like the one it was made on, or a snapshot of the files only)"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """`6.18.5-rc1+` -> 6, 18, 5; a version that has none is older than all."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
