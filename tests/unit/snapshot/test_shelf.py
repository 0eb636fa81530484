"""The memory snapshots of a node: added, opened, removed; a file stays as long as somebody needs pages of it."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from barchan.errors import BackendError, CapacityError, Conflict, NotFound, SnapshotCorrupt
from barchan.snapshot.shelf import Entry, Shelf
from tests.memory_dirs import content, make_memory


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    shelf = Shelf(tmp_path / "shelf", free_bytes_min=0)
    assert shelf.start() == []
    return shelf


def names(shelf: Shelf) -> list[str]:
    return sorted(path.name for path in shelf.root.iterdir())


def unpacked(shelf: Shelf, snapshot_id: str, target: Path) -> dict[str, bytes | None]:
    with shelf.open(snapshot_id) as opened:
        opened.unpack(target)
    return content(target)


def test_a_snapshot_is_found_again(shelf: Shelf, tmp_path: Path) -> None:
    """What was packed is listed and comes back, also in the next process, and is gone when it is removed."""
    memory = make_memory(tmp_path / "memory", [1, 2, 3])
    packed = shelf.pack("snap_1", memory)
    entry = Entry(snapshot_id="snap_1", digest=packed.digest, file_bytes=packed.file_bytes, bases=())
    for here in (shelf, again := Shelf(shelf.root)):
        if here is again:
            assert again.start() == []
        assert (here.entries(), here.entry("snap_1")) == ([entry], entry)
        assert unpacked(here, "snap_1", tmp_path / f"again-{id(here)}") == content(memory)
    again.remove("snap_1")
    again.remove("snap_1")
    assert (again.entries(), names(again)) == ([], [])
    for wrong in ("snap_1", "../memory", ""):
        with pytest.raises(NotFound):
            again.open(wrong)


def test_an_id_is_given_once(shelf: Shelf, tmp_path: Path) -> None:
    """A second snapshot of the same id is refused, and the first stays as it is; the same content is kept once."""
    memory = make_memory(tmp_path / "memory", [1, 2, 3])
    packed = shelf.pack("one", memory)
    with pytest.raises(Conflict):
        shelf.pack("one", make_memory(tmp_path / "other", [7]))
    assert shelf.pack("two", memory).digest == packed.digest
    assert names(shelf) == sorted([f"{packed.digest}.mem", "one", "two"])
    shelf.remove("one")
    assert unpacked(shelf, "two", tmp_path / "again") == content(memory)
    for wrong in ("a/b", "", "x" * 200):
        with pytest.raises(Conflict):
            shelf.pack(wrong, memory)


def test_a_base_lives_as_long_as_its_children(shelf: Shelf, tmp_path: Path) -> None:
    """A removed snapshot breaks none that has pages of it; its file goes with the last of those, no later."""
    pages = [list(range(1, 9)), list(range(1, 12)), list(range(1, 14))]
    memories = [make_memory(tmp_path / f"memory-{n}", found) for n, found in enumerate(pages)]
    first = shelf.pack("0", memories[0])
    second = shelf.pack("1", memories[1], base="0")
    third = shelf.pack("2", memories[2], base="1")
    assert (second.bases, third.bases) == ((first.digest,), (second.digest, first.digest))
    shelf.remove("0")
    shelf.remove("1")
    again = Shelf(shelf.root, free_bytes_min=0)
    assert again.start() == []
    assert (again.statistics().files, again.statistics().bases) == (3, 2)
    assert unpacked(again, "2", tmp_path / "again") == content(memories[2])
    with again.open("2") as opened:
        again.remove("2")
        opened.unpack(tmp_path / "still")
    assert content(tmp_path / "still") == content(memories[2])
    assert names(again) == []


def test_a_base_that_is_no_good_is_left_aside(shelf: Shelf, tmp_path: Path) -> None:
    """A snapshot is made whole where the one to build upon is gone or damaged."""
    memory = make_memory(tmp_path / "memory", [1, 2, 3])
    assert shelf.pack("one", memory, base="gone").bases == ()
    (path := shelf.find(shelf.entry("one").digest)).write_bytes(path.read_bytes()[:-1])
    assert shelf.pack("two", make_memory(tmp_path / "other", [1, 2, 4]), base="one").bases == ()


def test_damage_is_named_and_kept(shelf: Shelf, tmp_path: Path) -> None:
    """At the start, files that are cut or not what their name says are told; the whole ones are served."""
    for number in (1, 2, 3):
        shelf.pack(f"snap_{number}", make_memory(tmp_path / str(number), [number]))
    cut, lost = (shelf.find(shelf.entry(f"snap_{number}").digest) for number in (1, 2))
    os.truncate(cut, cut.stat().st_size - 1)
    lost.unlink()
    again = Shelf(shelf.root)
    assert again.start() == [cut.name, "snap_1", "snap_2"]
    assert [entry.snapshot_id for entry in again.entries()] == ["snap_3"]
    for number in (1, 2):
        with pytest.raises(SnapshotCorrupt):
            again.open(f"snap_{number}")
        with pytest.raises(SnapshotCorrupt):
            again.entry(f"snap_{number}")
        again.remove(f"snap_{number}")
    assert names(again) == sorted(["snap_3", f"{again.entry('snap_3').digest}.mem"])


def test_what_a_killed_process_left_goes_at_the_start(shelf: Shelf, tmp_path: Path) -> None:
    """Unfinished files, and whole ones that no snapshot has, are removed; snapshots stay."""
    shelf.pack("one", make_memory(tmp_path / "memory", [1]))
    whole = names(shelf)
    shelf.beside().write_bytes(b"half")
    other = Shelf(tmp_path / "other", free_bytes_min=0)
    other.start()
    other.pack("two", make_memory(tmp_path / "second", [2]))
    unnamed = other.find(other.entry("two").digest)
    shutil.copy(unnamed, shelf.root)
    assert Shelf(shelf.root).start() == []
    assert names(shelf) == whole


def test_a_full_disk_is_no_room_and_leaves_nothing(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the pack by what is free, in its middle by what the kernel says: CapacityError, and no file."""
    memory = make_memory(tmp_path / "memory", list(range(100)))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("barchan.snapshot.pack.os.fsync", full)
        with pytest.raises(CapacityError) as caught:
            shelf.pack("one", memory)
        assert caught.value.details["retry_after_ms"]
    with monkeypatch.context() as patched:
        usage = namedtuple("usage", "total used free")
        patched.setattr("barchan.snapshot.shelf.shutil.disk_usage", lambda path: usage(1 << 40, 0, 400_000))
        with pytest.raises(CapacityError, match="are free"):
            shelf.pack("one", memory)
    assert names(shelf) == []
    shelf.pack("one", memory)


def test_a_refused_dump_leaves_nothing(shelf: Shelf, tmp_path: Path) -> None:
    """What is no whole dump makes no snapshot, and holds no base."""
    shelf.pack("one", make_memory(tmp_path / "memory", [1]))
    (tmp_path / "memory/record.json").unlink()
    with pytest.raises(BackendError):
        shelf.pack("two", tmp_path / "memory", base="one")
    shelf.remove("one")
    assert names(shelf) == []


class Shelves(RuleBasedStateMachine):
    """Snapshots made on top of any other, and removed in any order, with restarts between."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(os.environ["PYTEST_SHELVES"]) / str(id(self))
        self.shelf = Shelf(self.folder / "shelf", free_bytes_min=0)
        self.shelf.start()
        self.made = 0
        self.alive: dict[str, dict[str, bytes | None]] = {}

    @rule(pages=st.lists(st.integers(0, 30), max_size=40), choice=st.integers(0, 10))
    def pack(self, pages: list[int], choice: int) -> None:
        self.made += 1
        memory = make_memory(self.folder / f"m{self.made}", pages)
        bases = [None, *self.alive]
        self.shelf.pack(f"s{self.made}", memory, base=bases[choice % len(bases)])
        self.alive[f"s{self.made}"] = content(memory)

    @rule(choice=st.integers(0, 10))
    def remove(self, choice: int) -> None:
        if self.alive:
            name = sorted(self.alive)[choice % len(self.alive)]
            self.shelf.remove(name)
            del self.alive[name]

    @rule()
    def restart(self) -> None:
        self.shelf = Shelf(self.shelf.root, free_bytes_min=0)
        assert self.shelf.start() == []

    @invariant()
    def all_are_whole(self) -> None:
        needed = set()
        for number, (name, expected) in enumerate(self.alive.items()):
            entry = self.shelf.entry(name)
            needed |= {entry.digest, *entry.bases}
            target = self.folder / f"u{number}"
            assert unpacked(self.shelf, name, target) == expected
            shutil.rmtree(target)
        files = {path.stem for path in self.shelf.root.iterdir() if path.suffix == ".mem"}
        assert files == needed
        assert {entry.snapshot_id for entry in self.shelf.entries()} == set(self.alive)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


def test_any_order_of_making_and_removing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every snapshot that was not removed comes back whole, and no file is kept that none of them needs."""
    monkeypatch.setenv("PYTEST_SHELVES", str(tmp_path))
    run = Shelves.TestCase
    run.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
    run().runTest()
