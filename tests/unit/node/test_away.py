"""What a node tells the blob store of its sandboxes, where the store is no help."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from barchan.node import away
from barchan.node.tasks import Tasks
from barchan.snapshot import generations


async def test_no_end_waits_long_for_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing is told meanwhile."""
    told = asyncio.Event()
    answers = asyncio.Event()

    async def slow(_store: object, sandbox_id: str, node_id: str) -> None:
        assert (sandbox_id, node_id) == ("sb_1", "node_1")
        told.set()
        await answers.wait()

    monkeypatch.setattr(generations, "retire", slow)
    monkeypatch.setattr(away, "RETIRE_WAIT_S", 0.01)
    remote = SimpleNamespace(blobs=None)
    sandboxes: Any = SimpleNamespace(node_id="node_1", tasks=Tasks(), templates=SimpleNamespace(remote=remote))
    live: Any = SimpleNamespace(sandbox_id="sb_1", rest=SimpleNamespace(is_published=True))
    async with asyncio.timeout(30):
        await away.retire(sandboxes, live)
    assert told.is_set()
    answers.set()
    await sandboxes.tasks.cancel()
