"""What the pager reads of a memory file: each page of each process, from wherever it lies."""

from pathlib import Path

import pytest

from barchan.errors import SnapshotCorrupt
from barchan.snapshot.form import CHUNK_PAGES, ZEROS
from barchan.snapshot.memory_file import MemoryFile
from barchan.snapshot.pack import pack
from barchan.snapshot.pagemap import PAGE_BYTES
from barchan.snapshot.pager import source as pager_source
from barchan.snapshot.pager.source import CHUNKS_MAX, Chunks, Source, may_come_late
from tests.memory_dirs import ADDRESS, make_memory, page


def packed(root: Path, *processes: list[int], lazy: int = 1, base: Path | None = None) -> Path:
    """A memory file at `root`.mem."""
    target = root.with_suffix(".mem")
    if base is None:
        pack(make_memory(root, *processes, lazy=lazy), target)
    else:
        with MemoryFile.open(base) as opened:
            pack(make_memory(root, *processes, lazy=lazy), target, base=opened)
    return target


def read(source: Source, pid: int) -> dict[int, bytes]:
    """Every page that may come late, by its address."""
    found = {}
    for part in source.regions(pid).parts:
        for address in range(part.start, part.end, PAGE_BYTES):
            slot = part.slot_at(address)
            if part.source == ZEROS:
                found[address] = bytes(PAGE_BYTES)
            else:
                content = source.load(part.source, slot // CHUNK_PAGES).content
                found[address] = content[slot % CHUNK_PAGES * PAGE_BYTES :][:PAGE_BYTES]
    return found


def expected(pages: list[int], lazy: int = 1) -> dict[int, bytes]:
    """As `make_memory` lays them out."""
    return {
        ADDRESS + (2 * (n - n % 4) + n % 4) * PAGE_BYTES: page(number)
        for n, number in enumerate(pages)
        if n // 4 % lazy == 0
    }


def test_each_process_has_its_own_pages(tmp_path: Path) -> None:
    """Zeros, duplicates, pages of a base, and runs that CRIU reads itself."""
    older = packed(tmp_path / "older", list(range(100)))
    first, second = [*range(50, 150), 0, 0, 7, 7], [0, *range(140, 200)]
    path = packed(tmp_path / "newer", first, second, lazy=3, base=older)
    source = Source(MemoryFile.open(path, lambda _: older), Chunks())
    assert read(source, 1) == expected(first, 3)
    assert read(source, 2) == expected(second, 3)
    with pytest.raises(SnapshotCorrupt, match="process 3"):
        source.regions(3)
    source.close()


def test_siblings_read_a_chunk_once(tmp_path: Path) -> None:
    """Until others have been used since; memory for them is bounded."""
    path, chunks = packed(tmp_path / "one", list(range(1, 1 + 3 * CHUNK_PAGES))), Chunks()
    one, other = Source(MemoryFile.open(path), chunks), Source(MemoryFile.open(path), chunks)
    chunk = one.load(0, 1)
    assert other.load(0, 1) is chunk
    for number in range(CHUNKS_MAX):
        chunks.put("elsewhere", number, b"")
    assert other.load(0, 1) is not chunk
    one.close()
    other.close()


def test_what_comes_late_is_known_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk once, in the order it will be wanted, and no more of them than can be kept."""
    path = packed(tmp_path / "one", list(range(1, 1 + 3 * CHUNK_PAGES)), [0, *range(1, 5)])
    source = Source(MemoryFile.open(path), Chunks())
    assert source.chunks() == [(0, 0), (0, 1), (0, 2)]
    assert not source.has(0, 1)
    source.load(0, 1)
    assert source.has(0, 1)
    monkeypatch.setattr(pager_source, "WARMED_MAX", 2)
    assert source.chunks() == [(0, 0), (0, 1)]
    source.close()


def test_what_is_small_or_shared_comes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that processes share since a fork would be filled for each of them."""
    distinct = [packed(tmp_path / "distinct", list(range(1, 101)), list(range(101, 201)))]
    shared = [packed(tmp_path / "shared", list(range(1, 101)), list(range(1, 101)))]
    for path in (*distinct, *shared):
        with MemoryFile.open(path) as file:
            assert not may_come_late(file)
    monkeypatch.setattr(pager_source, "LATE_BYTES_MIN", 200 * PAGE_BYTES)
    found = []
    for path in (*distinct, *shared):
        with MemoryFile.open(path) as file:
            found.append(may_come_late(file))
    assert found == [True, False]
