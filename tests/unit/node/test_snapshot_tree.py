"""The tree of snapshots: looking for many holds up nothing else."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from barchan.image.store import ImageStore
from barchan.image.template import Template, TemplateConfig
from barchan.model.sandbox import SandboxSpec
from barchan.node import snapshot_tree
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


class Restored:
    """A sandbox that goes on from a snapshot, and what became of it."""

    is_destroyed = False

    async def destroy(self) -> None:
        self.is_destroyed = True


@pytest.fixture
def restoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SnapshotTree, Restored]:
    """A tree with a snapshot of memory, whose processes are made of nothing."""
    restored = Restored()

    @asynccontextmanager
    async def unpacked(*where: Any) -> AsyncIterator[Any]:
        where[-1].mkdir()
        yield SimpleNamespace(record=None, pager=None)

    async def start(*_: Any) -> Restored:
        return restored

    monkeypatch.setattr(snapshot_tree, "unpacked", unpacked)
    monkeypatch.setattr(snapshot_tree, "from_memory", lambda *_: start)
    monkeypatch.setattr(snapshot_tree, "check_backend", lambda *_: None)
    tree = SnapshotTree(SimpleNamespace(shelf=None), tmp_path / "journal", tmp_path / "folder")  # type: ignore[arg-type]
    spec = SandboxSpec(template="debian", backend="microvm")
    tree._journal.write(
        SnapshotRow(
            snapshot_id="snap_1",
            kind="memory",
            image="i",
            digest="d",
            parent="",
            is_named=True,
            sandbox_id="sb_1",
            spec=spec,
            metadata={},
            created_unix_s=1.0,
        )
    )
    return tree, restored


def started(tree: SnapshotTree) -> "asyncio.Task[Any]":
    start = tree.start_of(SandboxSpec(template="snap_1"))
    assert start is not None
    backend: Any = SimpleNamespace(capabilities=SimpleNamespace(shares_memory=True))
    live: Any = SimpleNamespace(spec=SandboxSpec(template="snap_1", backend="microvm"), sandbox_id="sb_2")
    return asyncio.ensure_future(start(backend, live))  # type: ignore[arg-type]


async def test_a_cancelled_start_leaves_no_sandbox(
    restoring: tuple[SnapshotTree, Restored], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs already when its memory is put by for the next one, and nobody else knows of it."""
    tree, restored = restoring
    began, goes_on = threading.Event(), threading.Event()

    def keep(*_: Any) -> None:
        began.set()
        goes_on.wait(10)

    monkeypatch.setattr(tree.kept, "keep", keep)
    task = started(tree)
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert restored.is_destroyed
    tree.close()


async def test_memory_that_can_not_be_kept_fails_no_start(
    restoring: tuple[SnapshotTree, Restored], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next restore unpacks it again."""
    tree, restored = restoring
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))

    def keep(*_: Any) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(tree.kept, "keep", keep)
    assert await started(tree) is restored
    assert not restored.is_destroyed and [error.errno for error in told] == [28]
    tree.close()


async def test_memory_of_a_snapshot_that_is_gone_is_not_kept(
    restoring: tuple[SnapshotTree, Restored], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was removed while a sandbox was made of it."""
    tree, _ = restoring
    kept: list[str] = []

    def keep(snapshot_id: str, *_: Any) -> None:
        kept.append(snapshot_id)

    monkeypatch.setattr(tree.kept, "keep", keep)
    monkeypatch.setattr(tree.kept, "drop", kept.remove)
    await started(tree)
    assert kept == ["snap_1"]
    task = started(tree)
    tree._journal.remove(tree._journal.whole()[0])
    kept.clear()
    await task
    assert kept == []
    tree.close()
