"""Getting the chunks of one layer from its store: each once, neighbours together, ahead of who reads in order."""

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from typing import Final, Self

from msgspec import Struct

from barchan.errors import BarchanError, BlobCorrupt, BlobUnavailable
from barchan.image.blobs import BlobStore
from barchan.image.chunks import ChunkIndex
from barchan.image.lazy.cache import ABSENT, PRESENT, UNVERIFIED, Cache, CachedLayer
from barchan.image.stored import data_key, decode_all, stored_range

REQUEST_BYTES_MAX: Final = 4 << 20  # raw bytes of one request to the store
AHEAD_BYTES_MAX: Final = 8 << 20
AHEAD_REQUESTS_MAX: Final = 16  # under way at once for one layer, when reading ahead may add to them
LOADS_AT_ONCE: Final = 4  # requests of one load, in order
STREAMS_MAX: Final = 16  # readers in order that are told apart in one layer
CORRUPT_MAX: Final = 2  # times that a chunk which is not what its index says is fetched again
TOGETHER_SHARE: Final = 0.25  # of the time, for several chunks at once; then they are asked for singly
SLOW_S: Final = 60.0  # nothing is asked for together or ahead after that took too long
PAUSE_S: Final = 0.05
PAUSE_S_MAX: Final = 2.0

_log = logging.getLogger(__name__)


class Traffic:
    """What one reader process asks of stores, counted.

    Args:
        wait_s: How long a chunk may take to come, with all repetitions.
        pool: Where chunks are unpacked, checked and written.
    """

    def __init__(self, cache: Cache, pool: Executor, wait_s: float) -> None:
        self.cache = cache
        self.pool = pool
        self.wait_s = wait_s
        self.requests = 0
        self.bytes_fetched = 0
        self.retries = 0


class StorePair(Struct, frozen=True):
    """One store, opened twice, with threads each: what one of them waits for takes no thread of the other.

    Attributes:
        single: For single chunks, which may take the whole time.
        group: For several chunks at once, which are given up early.
    """

    single: BlobStore
    group: BlobStore

    @classmethod
    def open(cls, url: str, wait_s: float) -> Self:
        """Raises as `BlobStore.open`. Repeating is the fetcher's work, and a thread ends when it is given up."""
        return cls(
            BlobStore.open(url, timeout_s=wait_s, retries=0),
            BlobStore.open(url, timeout_s=wait_s * TOGETHER_SHARE, retries=0),
        )


class _Stream(Struct):
    """Somebody who reads in order: the chunk read last, the first one not read ahead, how far ahead is right."""

    last: int
    ahead: int
    window: int


class Fetcher:
    """Chunks of one layer, on demand. All methods belong to one event loop."""

    def __init__(self, store: StorePair, index: ChunkIndex, layer: CachedLayer, traffic: Traffic) -> None:
        self.index = index
        self.layer = layer
        self._store = store
        self._key = data_key(index)
        self._traffic = traffic
        self._flying: dict[int, asyncio.Future[bytes]] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self._streams: list[_Stream] = []
        self._is_closed = False
        self._run_max = max(1, REQUEST_BYTES_MAX // index.chunk_bytes)
        self._slow_until = 0.0  # of the event loop's clock

    async def read(self, offset: int, size: int) -> bytes:
        """Bytes of the layer, cut at its end.

        Raises:
            BlobUnavailable: They could not be had in time, or are not what they should be.
        """
        chunks = self.layer.chunks(offset, size)
        if not chunks:
            return b""
        self.layer.touch(chunks)
        size = min(size, self.layer.size_bytes - offset)
        while (data := self.layer.read(offset, size)) is None:
            got = await self._get(chunks)
            if len(got) == len(chunks):
                whole = b"".join(got[chunk] for chunk in chunks)
                start = offset - chunks.start * self.index.chunk_bytes
                return whole[start : start + size]
        return data

    async def load(self, chunks: Iterable[int]) -> None:
        """Have those chunks in the cache, as far as there is room; begun in that order, several at once.

        Raises as `read`.
        """
        missing = [chunk for chunk in dict.fromkeys(chunks) if self.layer.note(chunk) != PRESENT]
        runs = _runs(missing, self._run_max)

        async def work() -> None:
            for run in runs:
                await self._get(run)

        loop = asyncio.get_running_loop()
        workers = [loop.create_task(work()) for _ in range(LOADS_AT_ONCE)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def close(self) -> None:
        """Give up what is being fetched; nothing more is."""
        self._is_closed = True
        for task in self._loads:
            task.cancel()
        await asyncio.gather(*self._loads, return_exceptions=True)

    async def _get(self, chunks: range) -> dict[int, bytes]:
        """Those chunks; one may be missing that was in the cache and is no more."""
        for chunk in chunks:
            if self.layer.note(chunk) == UNVERIFIED and chunk not in self._flying:
                await self._verify(chunk)
        # Now, for while others are fetched these may have to go.
        got: dict[int, bytes] = {}
        for chunk in chunks:
            data = self.layer.read(chunk * self.index.chunk_bytes, self.index.size(chunk))
            if data is not None:
                got[chunk] = data
        joined = {chunk: self._flying[chunk] for chunk in chunks if chunk in self._flying}
        missing = [chunk for chunk in chunks if chunk not in joined and self.layer.note(chunk) == ABSENT]
        own: dict[int, asyncio.Future[bytes]] = {}
        for run in _runs(missing, 1 if self._is_slow else self._run_max):
            own |= self._start(run)
        if missing or joined:
            self._read_ahead(chunks)
        for chunk, flying in joined.items():
            try:
                got[chunk] = await asyncio.shield(flying)
            except BlobUnavailable:  # whoever asked for it began to wait earlier
                flying = self._flying.get(chunk) or self._start(range(chunk, chunk + 1))[chunk]
                own[chunk] = flying
        for chunk, flying in own.items():
            got[chunk] = await asyncio.shield(flying)
        return got

    async def _verify(self, chunk: int) -> None:
        """The host was started anew since this chunk was written: is it whole?"""
        loop = asyncio.get_running_loop()

        def is_whole() -> bool:
            return hashlib.sha256(self.layer.read_unverified(chunk)).digest() == self.index.sha256(chunk)

        whole = await loop.run_in_executor(self._traffic.pool, is_whole)
        if self.layer.note(chunk) != UNVERIFIED:
            return
        if whole:
            self.layer.trust(chunk)
        else:
            self._traffic.cache.lose(self.layer, chunk)

    @property
    def _is_slow(self) -> bool:
        """The store gives so little that what nobody waits for would keep it from those who wait."""
        return asyncio.get_running_loop().time() < self._slow_until

    def _read_ahead(self, chunks: range) -> None:
        """Twice as far as the last time for who goes on where somebody left off; not at all for who comes anew."""
        if self._is_slow:
            return
        first, last = chunks.start, chunks.stop - 1
        for stream in self._streams:
            if stream.last <= first <= max(stream.ahead, stream.last + 1):
                break
        else:
            self._streams = [*self._streams[-STREAMS_MAX + 1 :], _Stream(last, last + 1, 0)]
            return
        self._streams.remove(stream)
        self._streams.append(stream)
        window_max = max(1, AHEAD_BYTES_MAX // self.index.chunk_bytes)
        if last > stream.last:
            stream.window = min(window_max, max(2, 2 * stream.window))
        stream.last = max(last, stream.last)
        start, stream.ahead = max(last + 1, stream.ahead), min(self.index.count, last + 1 + stream.window)
        missing = [c for c in range(start, stream.ahead) if self.layer.note(c) == ABSENT and c not in self._flying]
        for run in _runs(missing, self._run_max):
            if len(self._loads) < AHEAD_REQUESTS_MAX:
                self._start(run)

    def _start(self, run: range) -> dict[int, asyncio.Future[bytes]]:
        if self._is_closed:
            raise BlobUnavailable("the layer is served no more")
        loop = asyncio.get_running_loop()
        futures: dict[int, asyncio.Future[bytes]] = {chunk: loop.create_future() for chunk in run}
        self._flying |= futures
        task = loop.create_task(self._load(run, futures))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return futures

    async def _load(self, run: range, futures: dict[int, asyncio.Future[bytes]]) -> None:
        """Fetch a run and keep it; if that fails, chunk by chunk: one is corrupt, or all at once are too much."""
        began, wait_s = asyncio.get_running_loop().time(), self._traffic.wait_s
        try:
            try:
                if len(run) > 1:
                    parts = await self._fetch(run, 0, began + TOGETHER_SHARE * wait_s)
                else:
                    parts = await self._fetch(run, CORRUPT_MAX, began + wait_s)
            except (BlobCorrupt, BlobUnavailable) as error:
                if len(run) == 1:
                    raise
                if isinstance(error, BlobUnavailable):
                    self._slow_until = asyncio.get_running_loop().time() + SLOW_S
                await self._load_singly(run, futures, began + wait_s)
                return
            for chunk, data in zip(run, parts, strict=True):
                await self._keep(chunk, data)
                self._landed(chunk, futures[chunk], data)
        except Exception as error:  # whoever waits may see no error that was not reported, whatever it is
            if not isinstance(error, BarchanError | OSError):
                _log.exception("fetching chunks of layer %s failed", self.index.layer)
            for future in futures.values():
                _fail(future, error)
        finally:
            for chunk, future in futures.items():
                if self._flying.get(chunk) is future:
                    del self._flying[chunk]
                future.cancel()

    async def _load_singly(self, run: range, futures: dict[int, asyncio.Future[bytes]], deadline: float) -> None:
        """Each chunk has the whole time after the one before came; once one is late, so are the rest."""
        loop = asyncio.get_running_loop()
        for chunk in run:
            try:
                (data,) = await self._fetch(range(chunk, chunk + 1), CORRUPT_MAX, deadline)
            except BlobCorrupt as error:
                _fail(futures[chunk], error)
                continue
            await self._keep(chunk, data)
            self._landed(chunk, futures[chunk], data)
            deadline = loop.time() + self._traffic.wait_s

    def _landed(self, chunk: int, future: asyncio.Future[bytes], data: bytes) -> None:
        self._flying.pop(chunk, None)
        future.set_result(data)

    async def _keep(self, chunk: int, data: bytes) -> None:
        if self.layer.note(chunk) == PRESENT:
            return
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(self._traffic.pool, self.layer.write, chunk, data):
            self._traffic.cache.keep(self.layer, chunk)
        else:
            self._traffic.cache.uncached += 1

    async def _fetch(self, run: range, corrupt_max: int, deadline: float) -> list[bytes]:
        """One request to the store, repeated until it succeeds or the time is over.

        Raises:
            BlobCorrupt: What came is wrong, and was as often as `corrupt_max` says.
            BlobUnavailable: The time is over; the message names the last reason.
        """
        loop = asyncio.get_running_loop()
        pause_s, corrupt, cause = PAUSE_S, 0, "no answer"
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._ask(run)
            except BlobCorrupt as error:
                corrupt += 1
                if corrupt > corrupt_max:
                    raise
                cause = str(error)
            except TimeoutError:
                raise BlobUnavailable(f"not had within {self._traffic.wait_s:g} s: {cause}") from None
            except (BarchanError, OSError) as error:
                cause = str(error)
            if loop.time() + pause_s > deadline:
                raise BlobUnavailable(f"not had within {self._traffic.wait_s:g} s: {cause}")
            self._traffic.retries += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _ask(self, run: range) -> list[bytes]:
        start, end = stored_range(self.index, run)
        stored = b""
        if end > start:
            self._traffic.requests += 1
            store = self._store.group if len(run) > 1 else self._store.single
            stored = await store.get_range(self._key, start, end)
            self._traffic.bytes_fetched += len(stored)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._traffic.pool, lambda: list(decode_all(self.index, run, stored)))


def _fail(future: asyncio.Future[bytes], error: Exception) -> None:
    if not future.done():
        future.set_exception(
            error if isinstance(error, BlobUnavailable) else BlobUnavailable(str(error) or repr(error))
        )
        future.exception()  # reading ahead has nobody to tell


def _runs(chunks: list[int], longest: int) -> Iterator[range]:
    """Numbers, in their order, as ranges of neighbours of bounded length."""
    start = 0
    for at in range(1, len(chunks) + 1):
        if at == len(chunks) or chunks[at] != chunks[at - 1] + 1 or at - start == longest:
            yield range(chunks[start], chunks[at - 1] + 1)
            start = at
