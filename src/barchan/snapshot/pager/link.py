"""What whoever restores a sandbox holds of the pager."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec import Struct


class Placed(Struct, frozen=True, kw_only=True):
    """A sandbox's memory is in place.

    Attributes:
        faults: How many accesses had to wait for their pages.
        faulted_bytes: What came because of them; `streamed_bytes`: what came unasked.
        elapsed_ms: From the restore to the last page.
    """

    faults: int
    faulted_bytes: int
    streamed_bytes: int
    elapsed_ms: int


class PagerLink:
    """The memory of one sandbox that comes in while it runs.

    Attributes:
        directory: CRIU finds `lazy-pages.socket` there, so it must be its work directory.
    """

    def __init__(self, sandbox_id: str, directory: Path, drop: Callable[[], Awaitable[None]]) -> None:
        self.sandbox_id = sandbox_id
        self.directory = directory
        self.placed: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        self._drop = drop

    async def complete(self) -> Placed:
        """Wait until nothing is missing: before that a sandbox can't be dumped, nor its processes copied.

        Raises:
            SnapshotCorrupt: The snapshot is damaged, and the sandbox was ended.
            BackendError: The pager is gone, and the sandbox was ended.
        """
        return await asyncio.shield(self.placed)

    async def drop(self) -> None:
        """The restore failed, or the sandbox's processes are gone. Safe to repeat."""
        await self._drop()
