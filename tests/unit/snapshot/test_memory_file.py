"""The packed file of a memory snapshot: what goes in comes out, and what was changed is found."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from barchan.errors import BackendError, SnapshotCorrupt
from barchan.image.zstd import decompress
from barchan.snapshot.form import (
    BASES_MAX,
    CHUNK_PAGES,
    FORMAT,
    INDEX_BYTES_MAX,
    ZEROS,
    Header,
    IndexForm,
    Place,
    encode_header,
    encode_index,
)
from barchan.snapshot.memory_file import MemoryFile, PageRun, read_header
from barchan.snapshot.pack import PackedMemory, pack
from barchan.snapshot.pagemap import PAGE_BYTES, PageMap, Run, encode_pagemap
from tests.memory_dirs import ADDRESS, RECORD, content, make_memory, page

NOISE = random.Random(5).randbytes(300_000)


def packed(root: Path, *processes: list[int], base: Path | None = None, **more: object) -> tuple[Path, PackedMemory]:
    """A memory directory at `root` and its packed file beside it."""
    make_memory(root, *processes, **more)  # type: ignore[arg-type]
    target = root.with_suffix(".mem")
    if base is None:
        return target, pack(root, target)
    with MemoryFile.open(base, find_in(base.parent)) as opened:
        return target, pack(root, target, base=opened)


def find_in(folder: Path) -> Callable[[str], Path]:
    """Bases by digest, among the packed files of a folder."""
    return lambda digest: next(path for path in folder.glob("*.mem") if read_header(path).digest == digest)


def unpacked(file: Path, target: Path, *, leave_lazy: bool = False) -> dict[str, bytes | None]:
    with MemoryFile.open(file, find_in(file.parent)) as opened:
        opened.unpack(target, leave_lazy=leave_lazy)
    return content(target)


numbers = st.lists(st.integers(0, 60), max_size=150)
names = st.sampled_from(["spool/1", "criu/core-1.img", "criu/ghost-file-2.img", "extra/deep/file"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(numbers, max_size=3), st.dictionaries(names, st.sampled_from([b"", b"text", NOISE])), numbers)
def test_what_goes_in_comes_out(processes: list[list[int]], files: dict[str, bytes], more: list[int]) -> None:
    """Any pages and files come back, packed alone or on top of another snapshot; nothing is stored twice."""
    with TemporaryDirectory() as name:
        root = Path(name)
        below, first = packed(root / "below", *processes, files=files)
        above, second = packed(root / "above", *processes, more, base=below)
        assert unpacked(below, root / "below-again") == content(root / "below")
        assert unpacked(above, root / "above-again") == content(root / "above")
    held = [number for pages in processes for number in pages]
    assert (first.pages, first.pages_zero, first.pages_own) == (len(held), held.count(0), len(set(held) - {0}))
    assert (second.pages_own, second.bases) == (
        len({*more} - {*held, 0}),
        (first.digest,) if set(held) - {0} else (),
    )
    assert (second.pages, second.pages_zero) == (len([*held, *more]), [*held, *more].count(0))


def test_the_same_dump_makes_the_same_file(tmp_path: Path) -> None:
    """The digest is that of the content, so equal snapshots are one blob in a store."""
    one, first = packed(tmp_path / "one", [1, 2, 0, 3])
    two, second = packed(tmp_path / "two", [1, 2, 0, 3])
    assert (first, one.read_bytes()) == (second, two.read_bytes())
    assert first.file_bytes == one.stat().st_size


def test_pages_are_read_at_any_place(tmp_path: Path) -> None:
    """A pager gets each run's addresses, where its pages lie, and their bytes, without unpacking anything."""
    numbers = [0, 1, 1, *range(2, 100), 0, 0, 5]
    path, _ = packed(tmp_path / "one", numbers, [7, 8], lazy=2)
    with MemoryFile.open(path) as opened:
        runs = opened.page_maps()
        assert list(runs) == ["criu/pagemap-1.img", "criu/pagemap-2.img"]
        assert runs["criu/pagemap-1.img"][:2] == [
            PageRun(ADDRESS, 4, 0, True),
            PageRun(ADDRESS + 8 * PAGE_BYTES, 4, 4, False),
        ]
        assert runs["criu/pagemap-2.img"] == [PageRun(ADDRESS, 2, len(numbers), True)]
        assert opened.places(0, 4) == [Place(0, 1, ZEROS, 0), Place(1, 1, 0, 0), Place(2, 2, 0, 0)]
        assert opened.read_chunk(0, 1) == b"".join(map(page, range(1 + CHUNK_PAGES, 1 + 2 * CHUNK_PAGES)))
        assert opened.read_pages(30, 70) == b"".join(map(page, numbers[30:100]))
        assert opened.read_pages(len(numbers) - 3, 5) == b"".join(map(page, [0, 0, 5, 7, 8]))
        with pytest.raises(IndexError):
            opened.read_pages(len(numbers), 3)
        with pytest.raises(SnapshotCorrupt):
            opened.read_chunk(0, 4)
        assert (opened.read_file("record.json"), opened.files()["criu/inventory.img"]) == (b"{}", 9)
        with pytest.raises(SnapshotCorrupt):
            opened.read_file("criu/pages-1.img")


def test_lazy_pages_can_be_left_out(tmp_path: Path) -> None:
    """Without them a pages file has its whole size, what must be there at once, and holes."""
    numbers = list(range(1, 100))
    path, _ = packed(tmp_path / "one", numbers, [3, 200], lazy=3)
    found = unpacked(path, tmp_path / "two", leave_lazy=True)
    expected = [0 if at // 4 % 3 == 0 else number for at, number in enumerate(numbers)]
    assert found["criu/pages-1.img"] == b"".join(map(page, expected))
    assert found["criu/pages-2.img"] == bytes(2 * PAGE_BYTES)
    assert found.keys() == content(tmp_path / "one").keys()


def test_the_record_is_read(tmp_path: Path) -> None:
    """What the backend wrote of the dump comes back as a value; anything else there is damage."""
    path, _ = packed(tmp_path / "one", [1], files={"record.json": msgspec.json.encode(RECORD)})
    with MemoryFile.open(path) as opened:
        assert opened.record == RECORD
    path, _ = packed(tmp_path / "two", [1])
    with MemoryFile.open(path) as opened, pytest.raises(SnapshotCorrupt, match="record"):
        _ = opened.record


def test_unpacked_files_are_private(tmp_path: Path) -> None:
    """What a guest had in memory is readable by the owner of the node only."""
    path, _ = packed(tmp_path / "one", [1], files={"spool/0": b"output"})
    unpacked(path, tmp_path / "two")
    modes = {entry.stat().st_mode & 0o077 for entry in [path, tmp_path / "two", *(tmp_path / "two").rglob("*")]}
    assert modes == {0}


def test_a_chain_of_snapshots_stays_flat(tmp_path: Path) -> None:
    """Each file names all files that it needs, at most four; older ones' pages are stored anew."""
    base: Path | None = None
    history: list[int] = []
    for number in range(1, 9):
        history += range(10 * number, 10 * number + 10)
        base, found = packed(tmp_path / str(number), list(history), base=base)
        assert len(found.bases) == min(number - 1, BASES_MAX)
        assert found.pages_own + found.pages_base == 10 * number
        assert unpacked(base, tmp_path / f"{number}-again") == content(tmp_path / str(number))


def test_a_base_must_be_the_one(tmp_path: Path) -> None:
    """A base that is missing, or another, or that was not opened, gives an error and no pages."""
    below, _ = packed(tmp_path / "below", [1, 2, 3])
    above, _ = packed(tmp_path / "above", [1, 2, 9], base=below)
    other, _ = packed(tmp_path / "other", [4, 5, 6])
    with pytest.raises(SnapshotCorrupt, match="instead of its base"):
        MemoryFile.open(above, lambda digest: other)
    with pytest.raises(FileNotFoundError):
        MemoryFile.open(above, lambda digest: tmp_path / digest)
    with MemoryFile.open(above) as opened:
        assert opened.read_pages(2, 1) == page(9)
        with pytest.raises(SnapshotCorrupt, match="not opened"):
            opened.read_pages(0, 3)


def test_every_cut_and_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """A file that is shorter, longer or changed anywhere is never unpacked."""
    path, _ = packed(tmp_path / "one", [1, 2, 0], files={"spool/0": b"output"})
    whole = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with pytest.raises(SnapshotCorrupt), MemoryFile.open(path) as opened:
            opened.verify()

    for size in range(len(whole)):
        check(whole[:size])
    check(whole + b"\0")
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        check(bytes(changed))
    path.write_bytes(whole)
    with MemoryFile.open(path) as opened:
        opened.verify()


def form_of(path: Path) -> tuple[IndexForm, bytes]:
    """The index of a file, and everything before it."""
    header, data = read_header(path), path.read_bytes()
    raw = decompress(data[header.index_start :], INDEX_BYTES_MAX)
    return msgspec.msgpack.decode(raw, type=IndexForm), data[: header.index_start]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"files": (("../../etc/passwd", 2),)}, "file of the name"),
        ({"files": (("/etc/passwd", 2),)}, "file of the name"),
        ({"files": (("nowhere/file", 2),)}, "no folder"),
        ({"files": (("a", 1), ("a", 1))}, "file of the name"),
        ({"files": (("a", 1 << 40),)}, "can't be read"),
        ({"folders": ("criu/inner",)}, "no folder"),
        ({"pages_files": (("criu/pages-1.img", 7),)}, "pages"),
        ({"slots": 9}, "chunks|disagree"),
        ({"run_pages": b"\1\0\0\0"}, "runs"),
        ({"run_slots": b"\x02\0\0\0\0\0\0\0"}, "past its"),
        ({"run_sources": b"\x01\xff"}, "nowhere"),
        ({"lengths": b"\xff\xff\xff\x0f" * 2}, "is said to be stored"),
        ({"hashes": b""}, "does not describe"),
        ({"format": FORMAT + 1}, "disagree"),
        ({"bases": ("0" * 64,)}, "disagree"),
    ],
)
def test_an_index_that_says_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], why: str) -> None:
    """Even with the right sha256, nothing outside of the directory is written and no more is taken than may be."""
    path, _ = packed(tmp_path / "one", [1, 2, 0])
    form, before = form_of(path)
    stored = encode_index(msgspec.structs.replace(form, **change))
    header = Header(hashlib.sha256(stored).hexdigest(), (), len(before), len(stored))
    head = encode_header(header)
    path.write_bytes(head + before[len(head) :] + stored)
    with pytest.raises(SnapshotCorrupt, match=why):
        MemoryFile.open(path)


def with_parent(root: Path) -> None:
    data = bytearray(encode_pagemap(PageMap(1, (Run(ADDRESS, 1),))))
    data[-3] = 5
    assert data[-4:] == b"\x20\x05\x28\x01"
    (root / "criu/pagemap-1.img").write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda root: (root / "record.json").unlink(), "no record.json"),
        (with_parent, "parent"),
        (lambda root: (root / "criu/pagemap-1.img").unlink(), "belongs to no page map"),
        (lambda root: (root / "criu/pages-1.img").unlink(), "disagree on how many"),
        (lambda root: (root / "criu/pages-1.img").write_bytes(page(1)), "disagree on how many"),
        (lambda root: (root / "criu/pages-1.img").write_bytes(b"123"), "no whole pages"),
        (lambda root: (root / "criu/pagemap-1.img").write_bytes(b"123"), "no page map"),
        (lambda root: (root / "criu/link").symlink_to("/etc/passwd"), "no plain file"),
        (lambda root: (root / "criu/folder").symlink_to("/etc"), "no plain file"),
    ],
)
def test_what_is_no_whole_dump_is_not_packed(tmp_path: Path, spoil: Callable[[Path], None], why: str) -> None:
    """A dump that lacks something, or leans on another one, is refused, and nothing is left of the try."""
    make_memory(tmp_path / "one", [1, 2, 3])
    spoil(tmp_path / "one")
    with pytest.raises(BackendError, match=why):
        pack(tmp_path / "one", tmp_path / "one.mem")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
