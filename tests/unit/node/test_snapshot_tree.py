"""The tree of snapshots: looking for many holds up nothing else."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from barchan.image.store import ImageStore
from barchan.image.template import Template, TemplateConfig
from barchan.model.sandbox import SandboxSpec
from barchan.node.snapshot_journal import SnapshotJournal, SnapshotRow
from barchan.node.snapshot_tree import SnapshotTree
from barchan.node.tasks import Tasks


async def test_images_are_looked_for_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file each; those that are gone are forgotten."""
    store = ImageStore(tmp_path / "images")
    template = store.commit(TemplateConfig(name="there"), ())
    journal = SnapshotJournal(tmp_path / "journal")
    for name in ("there", "gone"):
        journal.write(
            SnapshotRow(
                snapshot_id=f"snap_{name}",
                kind="fs",
                image=name,
                digest=template.digest,
                parent="",
                is_named=True,
                sandbox_id="sb_1",
                spec=SandboxSpec(template="debian"),
                metadata={},
                created_unix_s=1.0,
            )
        )
    sandboxes: Any = SimpleNamespace(images=store, tasks=Tasks())
    tree = SnapshotTree(sandboxes, tmp_path / "journal", tmp_path / "folder")
    found: list[tuple[str, threading.Thread]] = []
    find = store.find

    def noted(name: str) -> Template | None:
        found.append((name, threading.current_thread()))
        return find(name)

    monkeypatch.setattr(store, "find", noted)
    assert [info.snapshot_id for info in await tree.listed({})] == ["snap_there"]
    here = threading.current_thread()
    assert sorted(name for name, thread in found if thread is not here) == ["gone", "there"]
    assert [name for name, thread in found if thread is here] == ["gone"]  # once more, before it is forgotten
    assert [row.snapshot_id for row in journal.whole()] == ["snap_there"]
    tree.close()
    journal.close()
