"""Chunks that are fetched before anybody reads them."""

import asyncio
import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from barchan.image.chunks import CHUNK_BYTES, encode_layer
from barchan.image.lazy.cache import PRESENT, Cache
from barchan.image.lazy.fetch import LOADS_AT_ONCE, Fetcher, StorePair, Traffic
from barchan.image.stored import data_key

CONTENT = random.Random(3).randbytes(64 * CHUNK_BYTES)
WANTED = [40, 41, 7, 60, 20, 2, 50, 51, 30, 11]


async def test_a_load_goes_in_the_order_asked_for_and_several_at_once(tmp_path: Path) -> None:
    """The first requests under way are for what is wanted first, though it lies behind; all of it comes."""
    (tmp_path / "layer").write_bytes(CONTENT)
    index, _ = encode_layer(tmp_path / "layer", hashlib.sha256(CONTENT).hexdigest(), tmp_path / "encoded")
    data = tmp_path / "store" / data_key(index)
    cache, pool = Cache(tmp_path / "cache", 1 << 30), ThreadPoolExecutor(2)
    layer = cache.open(index.layer, index.raw_bytes, index.chunk_bytes)
    fetcher = Fetcher(StorePair.open(str(tmp_path / "store"), 60), index, layer, Traffic(cache, pool, 60))
    asked: list[int] = []
    begin = fetcher._start

    def note(run: range) -> dict[int, asyncio.Future[bytes]]:
        asked.append(run.start)
        return begin(run)

    fetcher._start = note  # type: ignore[method-assign]
    loading = asyncio.create_task(fetcher.load(WANTED))
    await asyncio.sleep(0.1)  # the store has no data yet: nothing comes
    assert asked == [40, 7, 60, 20] and len(asked) == LOADS_AT_ONCE
    data.parent.mkdir(parents=True)
    (tmp_path / "encoded").rename(data)
    await loading
    assert asked == [40, 7, 60, 20, 2, 50, 30, 11]
    assert all(layer.note(chunk) == PRESENT for chunk in WANTED)
    await fetcher.close()
    pool.shutdown()
    layer.close()
