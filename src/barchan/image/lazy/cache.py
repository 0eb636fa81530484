"""The local cache of lazily kept layers: what was read of each, in a sparse file, and a note of which parts are there.

    ROOT/DIGEST.data    the layer's bytes, as far as they are here
    ROOT/DIGEST.state   header; for each chunk 4 bytes: last use (s); for each chunk 1 byte: absent, present, unverified

A chunk is written before it is noted, so that a reader that is killed leaves a chunk unnoted at worst. A host that goes
down may have kept the note and lost the data: after another boot every chunk is unverified until its sha256 is checked.
One process at a time owns ROOT. Threads may read; everything else is done by one thread.
"""

import ctypes
import errno
import mmap
import os
import struct
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from msgspec import Struct

ABSENT, PRESENT, UNVERIFIED = 0, 1, 2
RECORDED_BYTES_MAX: Final = 64 << 20  # of first reads of one layer that are noted
LOW_WATER: Final = 0.9  # evicting goes on to this share of the budget, so that it is not done for every chunk
_MAGIC = b"BARLAZY1"
_HEADER = struct.Struct("=8sQI36s8x")
_PUNCH_HOLE, _KEEP_SIZE = 2, 1

_libc = ctypes.CDLL(None, use_errno=True)


class CacheStatistics(Struct, frozen=True, kw_only=True):
    """Of one reader since its start; `bytes_cached` is what is there now."""

    bytes_cached: int
    budget_bytes: int
    evictions: int
    uncached: int  # chunks served without being kept, for want of disk space


def boot_id() -> bytes:
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()


def read_notes(root: Path, digest: str, chunk_count: int) -> bytes:
    """What is noted of each chunk of a layer, for others than the process that owns ROOT; empty if nothing is."""
    try:
        data = (root / f"{digest}.state").read_bytes()
    except FileNotFoundError:
        return b""
    start = _HEADER.size + 4 * chunk_count
    return data[start:] if len(data) == start + chunk_count else b""


class CachedLayer:
    """What is here of one layer."""

    def __init__(self, root: Path, digest: str, size_bytes: int, chunk_bytes: int) -> None:
        self.digest = digest
        self.size_bytes = size_bytes
        self.chunk_bytes = chunk_bytes
        self.chunk_count = -(-size_bytes // chunk_bytes)
        self.pinned: set[int] = set()
        self.touched: dict[int, None] | None = None  # chunks by first use, while that is recorded
        self.hits = 0
        self.now_s = 1
        self._evicted = 0
        self._data_path, self._state_path = root / f"{digest}.data", root / f"{digest}.state"
        self._data = os.open(self._data_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Threads may still be in a layer that was removed: its file is closed once none of them has it.
        self._close = weakref.finalize(self, os.close, self._data)
        if os.fstat(self._data).st_size != size_bytes or not self._is_state_good():
            self._reset()
        with self._state_path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        view = memoryview(self._map)
        self._uses = view[_HEADER.size : _HEADER.size + 4 * self.chunk_count].cast("I")
        self._notes = view[_HEADER.size + 4 * self.chunk_count :]
        self._distrust()
        self._drop_unnoted()

    def _is_state_good(self) -> bool:
        try:
            data = self._state_path.read_bytes()
        except FileNotFoundError:
            return False
        if len(data) != _HEADER.size + 5 * self.chunk_count:
            return False
        magic, size_bytes, chunk_bytes, _ = _HEADER.unpack_from(data)
        return (magic, size_bytes, chunk_bytes) == (_MAGIC, self.size_bytes, self.chunk_bytes)

    def _reset(self) -> None:
        """The note goes first and comes last: without it nothing is believed to be there."""
        self._state_path.unlink(missing_ok=True)
        os.ftruncate(self._data, 0)
        os.ftruncate(self._data, self.size_bytes)
        fresh = self._state_path.with_suffix(".new")
        header = _HEADER.pack(_MAGIC, self.size_bytes, self.chunk_bytes, boot_id())
        fresh.write_bytes(header + bytes(5 * self.chunk_count))
        fresh.replace(self._state_path)

    def _distrust(self) -> None:
        """After another boot: first mark every chunk, then take over the new boot's id."""
        if _HEADER.unpack_from(self._map)[3] == boot_id():
            return
        for chunk in range(self.chunk_count):
            if self._notes[chunk] == PRESENT:
                self._notes[chunk] = UNVERIFIED
        _HEADER.pack_into(self._map, 0, _MAGIC, self.size_bytes, self.chunk_bytes, boot_id())

    def _drop_unnoted(self) -> None:
        """Free what a killed reader had written and not noted."""
        if os.fstat(self._data).st_blocks * 512 <= self.bytes_cached():
            return
        notes, at = bytes(self._notes), 0
        while at < self.chunk_count:
            end = next((chunk for chunk in range(at, self.chunk_count) if notes[chunk]), self.chunk_count)
            if end > at:
                self._punch(at, end - at)
            at = next((chunk for chunk in range(end, self.chunk_count) if not notes[chunk]), self.chunk_count)

    def close(self) -> None:
        """Only when no thread uses it."""
        self._close()

    def remove(self) -> None:
        """Remove what is here of it; to threads that are still in it, it is empty."""
        self._notes[:] = bytes(self.chunk_count)
        self._evicted += 1
        os.ftruncate(self._data, 0)
        self._state_path.unlink(missing_ok=True)
        self._data_path.unlink(missing_ok=True)

    # what is there

    def bytes_of(self, chunk: int) -> int:
        return min(self.chunk_bytes, self.size_bytes - chunk * self.chunk_bytes)

    def bytes_cached(self) -> int:
        return (self.chunk_count - bytes(self._notes).count(ABSENT)) * self.chunk_bytes

    def note(self, chunk: int) -> int:
        return self._notes[chunk]

    def chunks(self, offset: int, size: int) -> range:
        """The chunks that hold those bytes."""
        end = min(offset + size, self.size_bytes)
        return range(offset // self.chunk_bytes, -(-end // self.chunk_bytes)) if end > offset else range(0)

    def read(self, offset: int, size: int) -> bytes | None:
        """Bytes of the layer, cut at its end; None if not all are here. For any thread."""
        chunks = self.chunks(offset, size)
        evicted = self._evicted
        for chunk in chunks:
            if self._notes[chunk] != PRESENT:
                return None
            self._uses[chunk] = self.now_s
        self.touch(chunks)
        data = os.pread(self._data, min(size, max(0, self.size_bytes - offset)), offset)
        # A note is withdrawn before its data goes: what was read with the count unchanged was whole.
        if self._evicted != evicted:
            return None
        self.hits += 1
        return data

    def touch(self, chunks: range) -> None:
        """Note who was read first, while that is recorded and not more than is ever told."""
        touched = self.touched
        if touched is not None and len(touched) < RECORDED_BYTES_MAX // self.chunk_bytes:
            touched.update(dict.fromkeys(chunks))

    def read_unverified(self, chunk: int) -> bytes:
        return os.pread(self._data, self.bytes_of(chunk), chunk * self.chunk_bytes)

    def last_use(self, chunk: int) -> int:
        return self._uses[chunk]

    # changes, by the one thread

    def trust(self, chunk: int) -> None:
        """The chunk's bytes were checked."""
        self._uses[chunk] = self.now_s
        self._notes[chunk] = PRESENT

    def write(self, chunk: int, data: bytes) -> bool:
        """Put a chunk's bytes into the file, not noted yet; False: there is no room on the disk."""
        try:
            done = os.pwrite(self._data, data, chunk * self.chunk_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return False
        return done == len(data)

    def evict(self, chunk: int) -> None:
        self._notes[chunk] = ABSENT
        self._evicted += 1
        self._punch(chunk, 1)

    def _punch(self, first: int, count: int) -> None:
        start = first * self.chunk_bytes
        length = min(count * self.chunk_bytes, self.size_bytes - start)
        mode = _PUNCH_HOLE | _KEEP_SIZE
        if _libc.fallocate(self._data, mode, ctypes.c_longlong(start), ctypes.c_longlong(length)) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"freeing a part of {self._data_path}: {os.strerror(number)}")


class Cache:
    """The layers of one directory under one budget.

    Args:
        budget_bytes: Of cached data. What is pinned stays even beyond it, and a fifth of it is there for all else.
    """

    def __init__(self, root: Path, budget_bytes: int) -> None:
        self.root = root
        self.budget_bytes = budget_bytes
        self.layers: dict[str, CachedLayer] = {}
        self.evictions = 0
        self.uncached = 0
        root.mkdir(mode=0o700, exist_ok=True)
        self._idle = {path.stem: path.stat().st_blocks * 512 for path in root.glob("*.data")}
        self._bytes = sum(self._idle.values())

    def open(self, digest: str, size_bytes: int, chunk_bytes: int) -> CachedLayer:
        """The layer of this digest, with what an earlier reader left of it."""
        layer = self.layers.get(digest)
        if layer is None:
            layer = CachedLayer(self.root, digest, size_bytes, chunk_bytes)
            layer.now_s = int(time.time())
            self._bytes += layer.bytes_cached() - self._idle.pop(digest, 0)
            self.layers[digest] = layer
        return layer

    def remove(self, digest: str) -> None:
        layer = self.layers.pop(digest, None)
        if layer is not None:
            self._bytes -= layer.bytes_cached()
            layer.remove()
        else:
            self._remove_idle(digest)

    def rest(self, digest: str) -> None:
        """Nobody reads a layer for now: what is here of it stays until room is needed, pinned or not."""
        layer = self.layers.pop(digest, None)
        if layer is not None:
            self._idle[digest] = layer.bytes_cached()

    def _remove_idle(self, digest: str) -> None:
        self._bytes -= self._idle.pop(digest, 0)
        for suffix in ("state", "data"):
            (self.root / f"{digest}.{suffix}").unlink(missing_ok=True)

    def tick(self) -> None:
        """Take over the time; called about every second."""
        now_s = int(time.time())
        for layer in self.layers.values():
            layer.now_s = now_s

    def keep(self, layer: CachedLayer, chunk: int) -> None:
        """A chunk was written: note it, and evict others if that is too much."""
        if layer.note(chunk) == ABSENT:
            self._bytes += layer.chunk_bytes
        layer.trust(chunk)
        if self._bytes > self.budget_bytes:
            self._make_room()

    def lose(self, layer: CachedLayer, chunk: int) -> None:
        """A chunk is not what it should be, or has to go."""
        if layer.note(chunk) != ABSENT:
            layer.evict(chunk)
            self._bytes -= layer.chunk_bytes

    def _make_room(self) -> None:
        """First whole layers unused since this reader came, then single chunks, least recently used first."""
        at_once = int(self.budget_bytes * (1 - LOW_WATER))
        for digest in sorted(self._idle, key=self._idle_since):
            if self._bytes <= self.budget_bytes - at_once:
                return
            self._remove_idle(digest)
            self.evictions += 1
        # Looking at all chunks has to pay, however much is pinned: were there no room beside that, it would be done for
        # every chunk that comes.
        pinned_bytes = sum(len(layer.pinned) * layer.chunk_bytes for layer in self.layers.values())
        most = max(self.budget_bytes, pinned_bytes + 2 * at_once)
        if self._bytes <= most:
            return
        goal = most - at_once
        candidates = sorted(
            (layer.last_use(chunk), digest, chunk)
            for digest, layer in self.layers.items()
            for chunk in _unpinned(layer)
        )
        for _, digest, chunk in candidates:
            if self._bytes <= goal:
                return
            self.lose(self.layers[digest], chunk)
            self.evictions += 1

    def _idle_since(self, digest: str) -> float:
        try:
            return (self.root / f"{digest}.data").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def statistics(self) -> CacheStatistics:
        return CacheStatistics(
            bytes_cached=self._bytes,
            budget_bytes=self.budget_bytes,
            evictions=self.evictions,
            uncached=self.uncached,
        )


def _unpinned(layer: CachedLayer) -> Iterable[int]:
    return (chunk for chunk in range(layer.chunk_count) if layer.note(chunk) and chunk not in layer.pinned)
