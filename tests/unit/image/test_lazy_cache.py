"""The cache of lazily kept layers on disk: what is noted is there, whatever killed its writer."""

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest

from barchan.image.lazy import cache as lazy_cache
from barchan.image.lazy.cache import ABSENT, PRESENT, UNVERIFIED, Cache, CachedLayer

CHUNK = 64 << 10
SIZE = 10 * CHUNK + 123
DIGEST = hashlib.sha256(b"a layer").hexdigest()


def chunk(number: int) -> bytes:
    size = min(CHUNK, SIZE - number * CHUNK)
    return bytes([number + 1]) * size


def filled(cache: Cache, *numbers: int) -> CachedLayer:
    layer = cache.open(DIGEST, SIZE, CHUNK)
    for number in numbers:
        assert layer.write(number, chunk(number))
        cache.keep(layer, number)
    return layer


def blocks(root: Path) -> int:
    return (root / f"{DIGEST}.data").stat().st_blocks * 512


def test_reads_what_is_there_and_nothing_else(tmp_path: Path) -> None:
    """Within chunks, over their borders, up to the end; None as soon as one byte is missing."""
    layer = filled(Cache(tmp_path, 1 << 30), 2, 3, 10)
    assert layer.read(2 * CHUNK + 5, 10) == chunk(2)[:10]
    assert layer.read(3 * CHUNK - 1, 2) == chunk(2)[:1] + chunk(3)[:1]
    assert layer.read(10 * CHUNK, 4096) == chunk(10)
    assert layer.read(SIZE, 4096) == layer.read(SIZE + CHUNK, 1) == b""
    assert layer.read(2 * CHUNK - 1, 2) is None
    assert layer.read(3 * CHUNK, CHUNK + 1) is None


def test_the_next_reader_finds_what_was_kept(tmp_path: Path) -> None:
    """In the same boot it is trusted, and counts."""
    filled(Cache(tmp_path, 1 << 30), 0, 7).close()
    again = Cache(tmp_path, 1 << 30)
    layer = again.open(DIGEST, SIZE, CHUNK)
    assert [layer.note(number) for number in range(11)] == [PRESENT, *[ABSENT] * 6, PRESENT, *[ABSENT] * 3]
    assert layer.read(7 * CHUNK, CHUNK) == chunk(7)
    assert again.statistics().bytes_cached == 2 * CHUNK


def test_after_another_boot_nothing_is_trusted(tmp_path: Path) -> None:
    """Every note says so, also when a reader was killed between marking them and taking the new boot's id."""
    filled(Cache(tmp_path, 1 << 30), 1, 4).close()
    state = tmp_path / f"{DIGEST}.state"
    data = bytearray(state.read_bytes())
    data[20:56] = b"0" * 36
    state.write_bytes(data)
    layer = Cache(tmp_path, 1 << 30).open(DIGEST, SIZE, CHUNK)
    assert [layer.note(1), layer.note(2), layer.note(4)] == [UNVERIFIED, ABSENT, UNVERIFIED]
    assert layer.read(CHUNK, 1) is None
    assert layer.read_unverified(1) == chunk(1)
    layer.close()
    assert Cache(tmp_path, 1 << 30).open(DIGEST, SIZE, CHUNK).note(1) == UNVERIFIED


def test_what_was_written_and_not_noted_is_freed(tmp_path: Path) -> None:
    """As a killed writer leaves it: it is absent, and takes no room."""
    layer = filled(Cache(tmp_path, 1 << 30), 5)
    assert layer.write(8, chunk(8))
    layer.close()
    assert blocks(tmp_path) == 2 * CHUNK
    layer = Cache(tmp_path, 1 << 30).open(DIGEST, SIZE, CHUNK)
    assert [layer.note(5), layer.note(8)] == [PRESENT, ABSENT]
    assert blocks(tmp_path) == CHUNK


@pytest.mark.parametrize("damage", ["gone", "short", "other"])
def test_a_damaged_note_means_nothing_is_there(tmp_path: Path, damage: str) -> None:
    """The layer is cached anew."""
    filled(Cache(tmp_path, 1 << 30), 3).close()
    state = tmp_path / f"{DIGEST}.state"
    data = state.read_bytes()
    if damage == "gone":
        state.unlink()
    elif damage == "short":
        state.write_bytes(data[:-1])
    else:
        state.write_bytes(data[:16] + struct.pack("=I", CHUNK // 2) + data[20:])
    layer = Cache(tmp_path, 1 << 30).open(DIGEST, SIZE, CHUNK)
    assert all(layer.note(number) == ABSENT for number in range(11))
    assert blocks(tmp_path) == 0


def test_the_budget_takes_the_least_recently_used_and_no_pinned_ones(tmp_path: Path) -> None:
    """What goes is no longer readable, and its room is free."""
    cache = Cache(tmp_path, 4 * CHUNK)
    layer = cache.open(DIGEST, SIZE, CHUNK)
    layer.pinned.add(0)
    for number in range(4):
        layer.now_s = number + 1
        filled(cache, number)
    layer.now_s = 10
    assert layer.read(CHUNK, 1) is not None  # used now: chunk 2 is the oldest that may go
    filled(cache, 4)
    assert [number for number in range(11) if layer.note(number)] == [0, 1, 4]
    assert layer.read(2 * CHUNK, 1) is None
    assert blocks(tmp_path) == 3 * CHUNK
    assert cache.statistics().evictions == 2


def test_looking_for_what_may_go_pays_however_much_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pins beyond the budget leave a fifth of it for the rest, and all chunks are not looked at for each that comes."""
    looked, unpinned = list[CachedLayer](), lazy_cache._unpinned

    def look(layer: CachedLayer) -> Iterable[int]:
        looked.append(layer)
        return unpinned(layer)

    monkeypatch.setattr(lazy_cache, "_unpinned", look)
    cache = Cache(tmp_path, 100 * CHUNK)
    layer = cache.open(DIGEST, 1000 * CHUNK, CHUNK)
    layer.pinned.update(range(200))
    most = 0
    for number in range(1000):
        assert layer.write(number, b"x" * CHUNK)
        cache.keep(layer, number)
        most = max(most, cache.statistics().bytes_cached)
    assert all(layer.note(number) == PRESENT for number in range(200))
    assert most <= 221 * CHUNK
    assert [layer.note(number) for number in range(990, 1000)] == [PRESENT] * 10
    assert 0 < len(looked) <= 100


def test_layers_of_an_earlier_reader_go_first(tmp_path: Path) -> None:
    """Whole, once room is needed; a removed layer leaves no file."""
    filled(Cache(tmp_path, 1 << 30), 1, 2, 3).close()
    cache = Cache(tmp_path, 4 * CHUNK)
    assert cache.statistics().bytes_cached == 3 * CHUNK
    other = hashlib.sha256(b"another").hexdigest()
    layer = cache.open(other, SIZE, CHUNK)
    for number in range(2):
        assert layer.write(number, chunk(number))
        cache.keep(layer, number)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{other}.data", f"{other}.state"]
    cache.remove(other)
    assert list(tmp_path.iterdir()) == []
    assert cache.statistics().bytes_cached == 0


def test_a_removed_layer_is_empty_to_threads_that_are_still_in_it(tmp_path: Path) -> None:
    """They read nothing, and what they write goes nowhere: not into a file that was opened since."""
    cache = Cache(tmp_path, 1 << 30)
    layer = filled(cache, 1, 2)
    cache.remove(DIGEST)
    with (tmp_path / "other").open("w+b") as other:
        assert layer.read(CHUNK, 10) is None
        assert layer.write(3, chunk(3))
        assert other.read() == b""
    assert cache.statistics().bytes_cached == 0
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_first_reads_are_noted_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may ever ask for them."""
    monkeypatch.setattr(lazy_cache, "RECORDED_BYTES_MAX", 2 * CHUNK)
    layer = filled(Cache(tmp_path, 1 << 30), *range(6))
    layer.touched = {}
    for number in range(6):
        layer.read(number * CHUNK, 1)
    assert list(layer.touched) == [0, 1]
