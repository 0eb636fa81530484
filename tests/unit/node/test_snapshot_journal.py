"""The table of snapshots: what is whole, what came of what, and what a removal does to the tree."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from barchan.model.sandbox import SandboxSpec
from barchan.node.snapshot_journal import SnapshotJournal, SnapshotRow


def row(snapshot_id: str, parent: str = "", **changes: object) -> SnapshotRow:
    made = SnapshotRow(
        snapshot_id=snapshot_id,
        kind="fs",
        image=f"snap-{snapshot_id}",
        digest="d" * 64,
        parent=parent,
        is_named=False,
        sandbox_id="sb_1",
        spec=SandboxSpec(template="debian", env={"A": "ä\n"}),
        metadata={"step": "1"},
        created_unix_s=1.5,
    )
    return replace(made, **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def test_what_was_written_is_there_for_the_next_one(path: Path) -> None:
    """Rows come back as they were; one that is being made is no snapshot yet."""
    journal = SnapshotJournal(path)
    kept, begun = row("snap_1", memory_bytes=7, frozen_s=0.25), row("snap_2", digest=None)
    journal.write(kept)
    journal.write(begun)
    journal.close()
    journal = SnapshotJournal(path)
    assert (journal.find("snap_1"), journal.find("snap_2")) == (kept, None)
    assert (journal.whole(), journal.begun()) == ([kept], [begun])
    whole = replace(begun, digest="e" * 64)
    journal.write(whole)
    assert (journal.find("snap_2"), journal.begun()) == (whole, [])
    journal.close()


def test_the_children_of_what_is_removed_come_of_its_parent(path: Path) -> None:
    """Whatever is removed, and in whatever order, every parent that is named is there."""
    journal = SnapshotJournal(path)
    chain = [row("a"), row("b", "a"), row("c", "b"), row("d", "b"), row("e", "c")]
    for one in chain:
        journal.write(one)
    journal.remove(chain[1])
    assert {one.snapshot_id: one.parent for one in journal.whole()} == {"a": "", "c": "a", "d": "a", "e": "c"}
    journal.remove(chain[0])
    journal.remove(chain[0])
    assert {one.snapshot_id: one.parent for one in journal.whole()} == {"c": "", "d": "", "e": "c"}
    journal.close()


def test_snapshots_are_found_by_image_and_by_sandbox(path: Path) -> None:
    """The latest of a sandbox first."""
    journal = SnapshotJournal(path)
    journal.write(row("a", created_unix_s=1.0))
    journal.write(row("b", created_unix_s=2.0, image="named"))
    journal.write(row("c", created_unix_s=3.0, sandbox_id="sb_2"))
    assert [one.snapshot_id for one in journal.of_sandbox("sb_1")] == ["b", "a"]
    assert [one.snapshot_id for one in journal.of_image("named")] == ["b"]
    assert journal.of_image("none") == journal.of_sandbox("sb_3") == []
    journal.close()
