"""Fetching chunks from a store in a directory: each once, right or not at all."""

import asyncio
import hashlib
import random
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from barchan.errors import BlobUnavailable
from barchan.image.blobs import REQUESTS_AT_ONCE
from barchan.image.chunks import CHUNK_BYTES, encode_layer
from barchan.image.lazy.cache import ABSENT, PRESENT, Cache
from barchan.image.lazy.fetch import Fetcher, StorePair, Traffic
from barchan.image.stored import data_key

CHUNKS = 96
CONTENT = random.Random(9).randbytes(64 * CHUNK_BYTES) + bytes(32 * CHUNK_BYTES - 100)


class Stored:
    """One layer in a store, and a fetcher for it."""

    def __init__(self, root: Path, budget_bytes: int = 1 << 30, wait_s: float = 0.5) -> None:
        source = root / "layer"
        source.write_bytes(CONTENT)
        digest = hashlib.sha256(CONTENT).hexdigest()
        self.index, _ = encode_layer(source, digest, root / "encoded")
        self.data = root / "store" / data_key(self.index)
        self.data.parent.mkdir(parents=True)
        (root / "encoded").rename(self.data)
        self.cache = Cache(root / "cache", budget_bytes)
        self.pool = ThreadPoolExecutor(2)
        self.traffic = Traffic(self.cache, self.pool, wait_s)
        self.layer = self.cache.open(digest, self.index.raw_bytes, self.index.chunk_bytes)
        self.fetcher = Fetcher(StorePair.open(str(root / "store"), wait_s), self.index, self.layer, self.traffic)

    async def read(self, offset: int, size: int) -> bytes:
        return await self.fetcher.read(offset, size)

    def spoil(self, chunk: int) -> None:
        place = self.index.stored(chunk)
        with self.data.open("r+b") as file:
            file.seek(place.offset + place.length // 2)
            file.write(b"spoilt")


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[Stored]:
    stored = Stored(tmp_path)
    yield stored
    await stored.fetcher.close()
    stored.pool.shutdown()
    stored.layer.close()


async def test_any_range_is_right(stored: Stored) -> None:
    """At any offset and of any size, cut at the end, also where the layer is all zeros."""
    source = random.Random(1)
    for _ in range(60):
        offset, size = source.randrange(len(CONTENT) + 10), source.randrange(1, 300_000)
        assert await stored.read(offset, size) == CONTENT[offset : offset + size]
    assert await stored.read(0, len(CONTENT)) == CONTENT


async def test_many_who_want_one_chunk_ask_the_store_once(stored: Stored) -> None:
    """And neighbours come by one request."""
    await asyncio.gather(*(stored.read(20 * CHUNK_BYTES + n, 100) for n in range(50)))
    assert stored.traffic.requests == 1
    await stored.read(40 * CHUNK_BYTES, 8 * CHUNK_BYTES)
    assert stored.traffic.requests == 2
    assert await stored.read(20 * CHUNK_BYTES, 100) == CONTENT[20 * CHUNK_BYTES :][:100]
    assert stored.traffic.requests == 2


async def test_who_reads_in_order_is_read_ahead_for(stored: Stored) -> None:
    """With ever larger requests; who jumps about gets only what was asked for."""
    for chunk in range(64):
        await stored.read(chunk * CHUNK_BYTES, CHUNK_BYTES)
    assert stored.traffic.requests < 20
    before = sum(stored.layer.note(chunk) == PRESENT for chunk in range(CHUNKS))
    await stored.read(90 * CHUNK_BYTES, 1)
    assert sum(stored.layer.note(chunk) == PRESENT for chunk in range(CHUNKS)) <= before + 1


async def test_zeros_are_not_fetched(stored: Stored) -> None:
    """The index says that they are zeros."""
    assert await stored.read(70 * CHUNK_BYTES, 4 * CHUNK_BYTES) == bytes(4 * CHUNK_BYTES)
    assert stored.traffic.requests == stored.traffic.bytes_fetched == 0


async def test_a_spoilt_chunk_is_unavailable_and_its_neighbours_are_not(stored: Stored) -> None:
    """It was asked for again before it was given up; nothing of it is kept."""
    stored.spoil(33)
    with pytest.raises(BlobUnavailable, match="chunk 33"):
        await stored.read(30 * CHUNK_BYTES, 6 * CHUNK_BYTES)
    assert stored.layer.note(33) == ABSENT
    assert stored.traffic.requests >= 1 + 3
    assert await stored.read(30 * CHUNK_BYTES, 3 * CHUNK_BYTES) == CONTENT[30 * CHUNK_BYTES : 33 * CHUNK_BYTES]
    assert await stored.read(34 * CHUNK_BYTES, CHUNK_BYTES) == CONTENT[34 * CHUNK_BYTES : 35 * CHUNK_BYTES]


async def test_a_store_that_is_gone_is_asked_until_the_time_is_over(stored: Stored) -> None:
    """Then the reason is told; when it is back, reading works again."""
    away = stored.data.with_name("away")
    stored.data.rename(away)
    with pytest.raises(BlobUnavailable, match=r"not had within 0\.5 s: no layers/"):
        await stored.read(0, 1)
    assert stored.traffic.retries > 1
    away.rename(stored.data)
    assert await stored.read(0, 5) == CONTENT[:5]


async def test_a_store_too_slow_for_a_run_gives_it_chunk_by_chunk(stored: Stored) -> None:
    """Each chunk has the whole time for itself."""
    ask = stored.fetcher._ask

    async def slowly(run: range) -> list[bytes]:
        await asyncio.sleep(0.15 * len(run))
        return await ask(run)

    stored.fetcher._ask = slowly  # type: ignore[method-assign]
    assert await stored.read(8 * CHUNK_BYTES, 6 * CHUNK_BYTES) == CONTENT[8 * CHUNK_BYTES : 14 * CHUNK_BYTES]


async def test_nothing_is_asked_ahead_of_a_store_that_is_slow(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a run was too much: whoever waits has all that the store gives. Later it is tried again."""
    real = Fetcher._ask
    asked: list[range] = []

    async def slow(fetcher: Fetcher, run: range) -> list[bytes]:
        asked.append(run)
        if len(run) > 1:
            await asyncio.sleep(60)
        return await real(fetcher, run)

    monkeypatch.setattr(Fetcher, "_ask", slow)
    assert await stored.read(0, 4 * CHUNK_BYTES) == CONTENT[: 4 * CHUNK_BYTES]
    assert max(map(len, asked)) > 1
    asked.clear()
    for chunk in range(4, 12, 2):
        await stored.read(chunk * CHUNK_BYTES, 2 * CHUNK_BYTES)
    assert sorted(asked, key=lambda run: run.start) == [range(chunk, chunk + 1) for chunk in range(4, 12)]
    monkeypatch.setattr(Fetcher, "_ask", real)
    is_ahead = False
    for chunk in range(12, 40, 2):
        stored.fetcher._slow_until = 0.0  # a busy host may be slow, too
        await stored.read(chunk * CHUNK_BYTES, 2 * CHUNK_BYTES)
        await asyncio.sleep(0.05)
        is_ahead |= stored.layer.note(chunk + 2) == PRESENT
    assert is_ahead


async def test_what_another_boot_left_is_checked(stored: Stored) -> None:
    """A chunk that is whole is used without the store; one that is not comes from there."""
    await stored.read(3 * CHUNK_BYTES, 2 * CHUNK_BYTES)
    state = stored.cache.root / f"{stored.index.layer}.state"
    stored.layer.close()
    data = bytearray(state.read_bytes())
    data[20:56] = b"0" * 36
    state.write_bytes(data)
    with (stored.cache.root / f"{stored.index.layer}.data").open("r+b") as file:
        file.seek(4 * CHUNK_BYTES + 1000)
        file.write(b"lost in a crash")
    cache = Cache(stored.cache.root, 1 << 30)
    stored.layer = cache.open(stored.index.layer, stored.index.raw_bytes, stored.index.chunk_bytes)
    traffic = Traffic(cache, stored.pool, 0.5)
    fetcher = Fetcher(StorePair.open(str(stored.data.parents[2]), 0.5), stored.index, stored.layer, traffic)
    assert await fetcher.read(3 * CHUNK_BYTES, 10) == CONTENT[3 * CHUNK_BYTES :][:10]
    assert traffic.requests == 0
    assert await fetcher.read(4 * CHUNK_BYTES, CHUNK_BYTES) == CONTENT[4 * CHUNK_BYTES : 5 * CHUNK_BYTES]
    assert traffic.requests == 1
    await fetcher.close()


async def test_a_tiny_budget_is_right(tmp_path: Path) -> None:
    """Less room than one read needs: chunks go as they come, and the bytes are right."""
    stored = Stored(tmp_path, budget_bytes=2 * CHUNK_BYTES)
    for _ in range(2):
        assert await stored.read(0, len(CONTENT)) == CONTENT
    assert stored.cache.statistics().bytes_cached <= 2 * CHUNK_BYTES
    await stored.fetcher.close()
    stored.pool.shutdown()
    stored.layer.close()


async def test_whatever_goes_wrong_is_told(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what nobody thought of: a reader that was only cancelled would see an error that nobody reported."""

    def odd(*_: object) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(stored.cache, "keep", odd)
    with pytest.raises(BlobUnavailable, match="odd"):
        await stored.read(0, 1)
    monkeypatch.undo()
    assert await stored.read(0, 5) == CONTENT[:5]


async def test_a_store_that_never_answers_takes_nothing_from_another(tmp_path: Path) -> None:
    """It takes connections and says nothing: reads of a healthy store come at once meanwhile, also many together."""
    stored = Stored(tmp_path, wait_s=2.0)
    with socket.create_server(("127.0.0.1", 0), backlog=4 * REQUESTS_AT_ONCE) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/store"
        layer = stored.cache.open("0" * 64, stored.index.raw_bytes, stored.index.chunk_bytes)
        hole = Fetcher(StorePair.open(url, 2.0), stored.index, layer, stored.traffic)
        waiting = [asyncio.create_task(hole.read(2 * n * CHUNK_BYTES, 1)) for n in range(REQUESTS_AT_ONCE)]
        while stored.traffic.requests < REQUESTS_AT_ONCE:
            await asyncio.sleep(0.01)
        assert await stored.read(0, 8 * CHUNK_BYTES) == CONTENT[: 8 * CHUNK_BYTES]
        assert not any(task.done() for task in waiting)
        await hole.close()
        await asyncio.gather(*waiting, return_exceptions=True)
    await stored.fetcher.close()
    stored.pool.shutdown()
    layer.close()
    stored.layer.close()


async def test_a_closed_fetcher_fetches_no_more(stored: Stored) -> None:
    """And says so, instead of writing for a layer that is gone."""
    await stored.fetcher.close()
    with pytest.raises(BlobUnavailable, match="no more"):
        await stored.read(0, 1)
