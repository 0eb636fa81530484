"""One sandbox to disk and back: its memory file on the node's shelf, and what it has written as a layer of its own."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from barchan.errors import NotSnapshotable
from barchan.node.live import Live

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes


async def store(sandboxes: "Sandboxes", live: Live, check: Callable[[], None]) -> None:
    raise NotSnapshotable("memory snapshots are not here yet")


async def clean(sandboxes: "Sandboxes", known: set[str]) -> None:
    """Remove what a killed node has left half made."""


async def remove(sandboxes: "Sandboxes", live: Live) -> None:
    """Of one that has ended: what it has on disk."""


async def restore(sandboxes: "Sandboxes", live: Live) -> None:
    raise NotSnapshotable("memory snapshots are not here yet")
