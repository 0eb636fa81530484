"""A lazily kept layer, looked into without a mount: its metadata from the store at once, the rest by the chunk."""

import asyncio
from pathlib import Path

from barchan.errors import BlobUnavailable, Denied, NotFound, TransportError
from barchan.image.blobs import BlobStore
from barchan.image.erofs import Erofs
from barchan.image.stored import LazyLayer, read_chunks, read_lazy

OPERATION_TIMEOUT_S = 30.0
METADATA_BYTES_MAX = 64 << 20  # that is held in memory; a layer of a million files has more
_RUN_CHUNKS = 128  # of one request: 8 MiB
_CHUNKS_KEPT = 256


def open_lazy(path: Path) -> Erofs | None:
    """A layer by the file that stands for it; None if it has too much metadata to look into. Blocking.

    The reader's methods raise as this does, and are for threads without an event loop.

    Raises:
        FileNotFoundError: There is no such file.
        BlobCorrupt: It, or what the store has, is damaged.
        BlobUnavailable: The store is slow or dead, or refuses.
        RequirementMissing: The layer is compressed, as an earlier release made it.
    """
    lazy = read_lazy(path)
    first = lazy.index.first_chunks()
    if len(first) * lazy.index.chunk_bytes > METADATA_BYTES_MAX:
        return None
    return Erofs(_Chunks(lazy, first).read, name=path.name)


class _Chunks:
    def __init__(self, lazy: LazyLayer, first: list[int]) -> None:
        self._index = lazy.index
        self._store = BlobStore.open(lazy.url, timeout_s=OPERATION_TIMEOUT_S)
        self._first = dict.fromkeys(first, b"")  # filled by the first read
        self._others: dict[int, bytes] = {}

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the layer, as far as it goes."""
        chunks = self._index.chunks(offset, offset + size)
        missing = [chunk for chunk in chunks if not self._first.get(chunk) and chunk not in self._others]
        if any(chunk in self._first for chunk in missing):
            self._first |= self._fetch(list(self._first))
            missing = [chunk for chunk in missing if chunk not in self._first]
        if missing:
            if len(self._others) > _CHUNKS_KEPT:
                self._others = {chunk: self._others[chunk] for chunk in chunks if chunk in self._others}
            self._others |= self._fetch(missing)
        data = b"".join(self._first.get(chunk) or self._others[chunk] for chunk in chunks)
        start = offset - chunks.start * self._index.chunk_bytes
        return data[start : start + size]

    def _fetch(self, chunks: list[int]) -> dict[int, bytes]:
        try:
            return asyncio.run(self._fetched(chunks))
        except (TransportError, Denied, NotFound) as error:
            raise BlobUnavailable(f"layer {self._index.layer} can't be looked into: {error}") from error

    async def _fetched(self, chunks: list[int]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for run in _runs(chunks):
            found |= zip(run, await read_chunks(self._store, self._index, run), strict=True)
        return found


def _runs(chunks: list[int]) -> list[range]:
    """Neighbours together; `chunks` is sorted."""
    runs: list[range] = []
    for chunk in chunks:
        if runs and runs[-1].stop == chunk and len(runs[-1]) < _RUN_CHUNKS:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs
