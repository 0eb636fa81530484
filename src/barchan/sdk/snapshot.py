"""The synchronous face of a snapshot."""

from typing import Any

from barchan.sdk.aio.snapshot import AsyncSnapshot, SnapshotFacts
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

    def remove(self) -> None:
        """Forget it with its image; sandboxes, and snapshots that came of it, stay.

        Raises:
            NotFound: It is not there any more.
        """
        run(self.twin.remove())
