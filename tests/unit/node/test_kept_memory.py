"""Memory directories that stay for the next restore: found, bounded, and gone only when nobody uses them."""

from pathlib import Path

import pytest

from barchan.model.snapshot import MemoryRecord
from barchan.node import kept_memory
from barchan.node.kept_memory import KeptMemory

RECORD = MemoryRecord(
    backend="vm",
    engine={},
    kernel="",
    machine="",
    cpu_features=(),
    hostname="",
    network="none",
    layers=(),
    processes=0,
    resident_bytes=0,
)
FILE_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "FREE_BYTES_MIN", 0)


def made(root: Path, name: str) -> Path:
    directory = root / name
    directory.mkdir()
    (directory / "ram").write_bytes(bytes([1]) * FILE_BYTES)
    return directory


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_kept_is_found_until_its_snapshot_is_removed(tmp_path: Path) -> None:
    """It is taken over whole; a second one of the same snapshot stays with whoever made it."""
    kept = KeptMemory(tmp_path)
    kept.keep("one", made(tmp_path, "a"), RECORD)
    kept.keep("one", made(tmp_path, "b"), RECORD)
    with kept.using("one") as found, kept.using("other") as missing:
        assert found is not None and missing is None
        assert (found.directory / "ram").stat().st_size == FILE_BYTES
    assert names(tmp_path) == ["b", "kept-one-a"]
    kept.drop("one")
    kept.drop("one")
    assert names(tmp_path) == ["b"]


def test_one_in_use_goes_when_its_last_user_has_gone(tmp_path: Path) -> None:
    """Nobody new finds it meanwhile."""
    kept = KeptMemory(tmp_path)
    kept.keep("one", made(tmp_path, "a"), RECORD)
    with kept.using("one") as found:
        kept.drop("one")
        assert found is not None and found.directory.exists()
        with kept.using("one") as again:
            assert again is None
    assert names(tmp_path) == []


def test_the_least_used_give_way(tmp_path: Path) -> None:
    """By number and by size; one that is too large alone is not taken."""
    kept = KeptMemory(tmp_path, bytes_max=3 * FILE_BYTES, count_max=2)
    for name in ("one", "two"):
        kept.keep(name, made(tmp_path, f"of-{name}"), RECORD)
    with kept.using("one"):
        pass
    kept.keep("three", made(tmp_path, "of-three"), RECORD)
    assert names(tmp_path) == ["kept-one-of-one", "kept-three-of-three"]
    small = KeptMemory(tmp_path, bytes_max=FILE_BYTES - 1)
    small.keep("four", made(tmp_path, "of-four"), RECORD)
    assert "of-four" in names(tmp_path)
