"""The synchronous face of a snapshot."""

from typing import Any

from barchan.model.snapshot_info import SnapshotPush
from barchan.sdk.aio.snapshot import TRANSFER_TIMEOUT_S, AsyncSnapshot, SnapshotFacts
from barchan.sdk.background import run


class Snapshot(SnapshotFacts):
    """One snapshot, given to `client.create()` to start from. Picklable, without the token."""

    def __init__(self, twin: AsyncSnapshot) -> None:
        """Not called by users."""
        self.info = twin.info
        self.twin = twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.twin,)

    def push(self, *, timeout_s: float = TRANSFER_TIMEOUT_S) -> SnapshotPush:
        """Send it to the node's blob store, from where other nodes have it: `client.pull_snapshot(id)`. It stays here.

        What is there already is not sent again.

        Raises:
            Conflict: The node has no store.
            BlobUnavailable: The store is slow or dead.
        """
        return run(self.twin.push(timeout_s=timeout_s))

    def remove(self) -> None:
        """Forget it with its image; sandboxes, and snapshots that came of it, stay.

        Raises:
            NotFound: It is not there any more.
        """
        run(self.twin.remove())
