"""Memory directories of snapshots that stay for the next restore, which then takes no time to unpack one.

Only of backends whose sandboxes read such a directory and never write to it: what several of them have come of is in
the host's memory once. The packed file on the shelf stays what counts; these may go at any time.
"""

import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from barchan.model.snapshot import MemoryRecord

BYTES_MAX = 2 << 30  # on disk, all together
COUNT_MAX = 8
FREE_BYTES_MIN = 4 << 30  # that the disk has besides; else nothing is kept
PREFIX = "kept-"


class Kept(Struct, kw_only=True):
    """One of them. `is_gone`: nobody finds it any more, and the last user removes it."""

    directory: Path
    record: MemoryRecord
    size_bytes: int
    users: int = 0
    is_gone: bool = False


class KeptMemory:
    """Those of one node, the least used of which go first. Its methods block, and may be called from any thread.

    Args:
        root: On the file system of the directories that are given to it; emptied by whoever starts the node.
    """

    def __init__(self, root: Path, *, bytes_max: int = BYTES_MAX, count_max: int = COUNT_MAX) -> None:
        self._root = root
        self._bytes_max = bytes_max
        self._count_max = count_max
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def keep(self, snapshot_id: str, directory: Path, record: MemoryRecord) -> None:
        """Take over a directory that is whole, unless it is too large or there already: then it stays where it is."""
        size = sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
        if size > self._bytes_max or shutil.disk_usage(directory).free < FREE_BYTES_MIN:
            return
        with self._lock:
            if snapshot_id in self._kept:
                return
            target = self._root / f"{PREFIX}{snapshot_id}-{directory.name}"
            directory.rename(target)
            self._kept[snapshot_id] = Kept(directory=target, record=record, size_bytes=size)
            gone = [self._take_out(name) for name in self._beyond()]
        self._remove(gone)

    @contextmanager
    def using(self, snapshot_id: str) -> Iterator[Kept | None]:
        """Inside, the directory of that snapshot stays, if there is one."""
        with self._lock:
            kept = self._kept.get(snapshot_id)
            if kept is not None:
                self._kept.move_to_end(snapshot_id)
                kept.users += 1
        try:
            yield kept
        finally:
            if kept is not None:
                with self._lock:
                    kept.users -= 1
                self._remove([kept] if kept.is_gone else [])

    def drop(self, snapshot_id: str) -> None:
        """Its snapshot was removed. If there is none, nothing."""
        with self._lock:
            gone = [self._take_out(snapshot_id)] if snapshot_id in self._kept else []
        self._remove(gone)

    def _beyond(self) -> list[str]:
        """Those that are too many or too large together, the least used first."""
        names, total = list(self._kept), sum(kept.size_bytes for kept in self._kept.values())
        beyond = []
        for index, name in enumerate(names):
            if total <= self._bytes_max and len(names) - index <= self._count_max:
                break
            total -= self._kept[name].size_bytes
            beyond.append(name)
        return beyond

    def _take_out(self, snapshot_id: str) -> Kept:
        kept = self._kept.pop(snapshot_id)
        kept.is_gone = True
        return kept

    @staticmethod
    def _remove(gone: list[Kept]) -> None:
        for kept in gone:
            if not kept.users:
                shutil.rmtree(kept.directory, ignore_errors=True)
