"""Where the pager reads pages: packed memory files, and the chunks of them that were read last."""

import ctypes
import threading
from collections import OrderedDict
from typing import Final

from barchan.errors import SnapshotCorrupt
from barchan.snapshot.form import CHUNK_PAGES, OWN, ZEROS
from barchan.snapshot.memory_file import MemoryFile
from barchan.snapshot.pagemap import PAGE_BYTES
from barchan.snapshot.pager.areas import AREAS_BYTES_MAX, decode_areas
from barchan.snapshot.pager.regions import Part, Regions
from barchan.snapshot.pager.space import Chunk

CHUNKS_MAX: Final = 256
"""Of 128 KiB each, for all sandboxes together: siblings of one snapshot share them."""

WARMED_MAX: Final = 224
"""How many of them are read for one sandbox before it is restored."""

LATE_BYTES_MIN: Final = 16 << 20
DISTINCT_MIN: Final = 0.8
"""Of the pages of a snapshot whose memory may come on demand, this part must be different from one another."""


class Chunks:
    """The chunks that were used last; for several threads."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[tuple[str, int], Chunk] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str, chunk: int) -> Chunk | None:
        with self._lock:
            found = self._chunks.get((digest, chunk))
            if found is not None:
                self._chunks.move_to_end((digest, chunk))
            return found

    def has(self, digest: str, chunk: int) -> bool:
        return (digest, chunk) in self._chunks

    def clear(self) -> None:
        with self._lock:
            self._chunks.clear()

    def put(self, digest: str, chunk: int, content: bytes) -> Chunk:
        address = ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value
        assert address is not None
        made = Chunk(content, address)
        with self._lock:
            self._chunks[digest, chunk] = made
            while len(self._chunks) > CHUNKS_MAX:
                self._chunks.popitem(last=False)
        return made


class Source:
    """One snapshot's memory, open until `close`."""

    def __init__(self, file: MemoryFile, chunks: Chunks) -> None:
        self._file = file
        self._chunks = chunks
        self._digests = (file.digest, *file.bases)
        self._maps = file.page_maps()

    def close(self) -> None:
        self._file.close()

    def regions(self, pid: int) -> Regions:
        """What a process lacks, by its pid in the snapshot.

        Raises:
            SnapshotCorrupt: The snapshot has no such process.
        """
        runs = self._maps.get(f"criu/pagemap-{pid}.img")
        if runs is None:
            raise SnapshotCorrupt(f"the snapshot holds no memory of its process {pid}; restore another snapshot")
        parts = []
        for run in runs:
            for place in self._file.places(run.first, run.pages) if run.is_lazy else ():
                start = run.address + (place.first - run.first) * PAGE_BYTES
                parts.append(Part(start, start + place.pages * PAGE_BYTES, place.source, place.slot))
        return Regions(parts)

    def areas(self, pid: int) -> Regions:
        """Where CRIU has the kernel watch a process: all its private anonymous memory that is not locked.

        Raises:
            SnapshotCorrupt: The snapshot does not say.
        """
        try:
            found = decode_areas(self._file.read_file(f"criu/mm-{pid}.img"))
        except ValueError as error:
            raise SnapshotCorrupt(f"the areas of the snapshot's process {pid}: {error}; restore another one") from error
        return Regions(Part(area.start, area.end, ZEROS, 0) for area in found if area.is_watched)

    def chunks(self) -> list[tuple[int, int]]:
        """Those that have pages which come late: the first `WARMED_MAX`, in the order they are filled unasked."""
        found: dict[tuple[int, int], None] = {}
        for runs in self._maps.values():
            for run in runs:
                for place in self._file.places(run.first, run.pages) if run.is_lazy else ():
                    if place.source == ZEROS:
                        continue
                    for chunk in range(place.slot // CHUNK_PAGES, -(-(place.slot + place.pages) // CHUNK_PAGES)):
                        found[place.source, chunk] = None
                        if len(found) == WARMED_MAX:
                            return list(found)
        return list(found)

    def has(self, source: int, chunk: int) -> bool:
        """Whether a chunk is at hand."""
        return self._chunks.has(self._digests[source], chunk)

    def load(self, source: int, chunk: int) -> Chunk:
        """A chunk, verified. Raises `SnapshotCorrupt`."""
        digest = self._digests[source] if OWN <= source < len(self._digests) else ""
        found = self._chunks.get(digest, chunk)
        return found or self._chunks.put(digest, chunk, self._file.read_chunk(source, chunk))


def may_come_late(file: MemoryFile) -> bool:
    """Whether to restore a snapshot with its memory on demand.

    A small one is there at once anyway, and one with thousands of areas takes long to begin. Pages that processes share
    since a fork, which a plain restore shares again, would be filled for each of them. It reads the page maps, so it
    blocks.

    Raises:
        SnapshotCorrupt: A page map is damaged.
    """
    if any(size > AREAS_BYTES_MAX for name, size in file.files().items() if name.startswith("criu/mm-")):
        return False
    stored = []
    for runs in file.page_maps().values():
        for run in runs:
            for place in file.places(run.first, run.pages) if run.is_lazy else ():
                if place.source != ZEROS:
                    stored.append((place.source, place.slot, place.slot + place.pages))
    distinct, last, end = 0, OWN, 0
    for source, start, stop in sorted(stored):
        if source != last:
            last, end = source, 0
        distinct += max(0, stop - max(start, end))
        end = max(end, stop)
    pages = sum(stop - start for _, start, stop in stored)
    return pages * PAGE_BYTES >= LATE_BYTES_MIN and distinct >= DISTINCT_MIN * pages
