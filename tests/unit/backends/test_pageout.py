"""What page-out asks the kernel for, by what a group's counters say."""

from pathlib import Path

import pytest

from barchan.backends.container import pageout


@pytest.mark.parametrize(
    ("cache", "mapped", "is_emptied"),
    [(64 << 20, 4 << 20, True), (9 << 20, 6 << 20, False), (0, 0, False)],
    ids=["files of its own", "files of an image", "none"],
)
def test_mapped_files_are_left_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: int, mapped: int, is_emptied: bool
) -> None:
    """A group is emptied only where most of its page cache is mapped by nobody."""
    monkeypatch.setattr(pageout, "has_swap", lambda: False)
    (tmp_path / "memory.usage_in_bytes").write_text("70000000\n")
    (tmp_path / "memory.force_empty").write_text("")
    (tmp_path / "memory.stat").write_text(f"cache 1\ntotal_cache {cache}\ntotal_mapped_file {mapped}\n")
    assert pageout.page_out(str(tmp_path), str(tmp_path), has_reclaim=False) == 0
    assert (tmp_path / "memory.force_empty").read_text() == ("0" if is_emptied else "")
