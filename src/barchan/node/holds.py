"""The layers of this node's sandboxes stay in the image store for as long as the sandboxes live."""

import asyncio
import errno
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from barchan.core.finished import finished
from barchan.errors import CapacityError
from barchan.image.disk import NO_ROOM
from barchan.image.holds import Holder
from barchan.image.store import ImageStore
from barchan.image.template import Template


class Holds:
    """Counts what uses each layer, and notes it in the store. What has ended is let go of by the next `settle`.

    Args:
        journal: The file that knows the sandboxes on disk.
    """

    def __init__(self, store: ImageStore, node_id: str, journal: Path) -> None:
        self._store = store
        self._node_id = node_id
        self._journal = journal
        self._stored: set[str] = set()  # sandboxes on disk
        self._told: bool | None = None  # whether there are some; None: what the node before this one said
        self._opening = asyncio.Lock()
        self._holder: Holder | None = None
        self._of: dict[str, frozenset[str]] = {}  # by sandbox
        self._uses: Counter[str] = Counter()
        self._ended: set[str] = set()

    @property
    def is_due(self) -> bool:
        return bool(self._ended)

    async def hold(self, sandbox_id: str, template: Template, *, is_stored: bool = False) -> None:
        """Keep what a sandbox is made of until `release`; of one on disk, also while there is no node."""
        digests = self._of[sandbox_id] = frozenset(layer.digest for layer in template.layers)
        self._uses.update(digests)
        with _as_far_as_can_be():
            async with self._opening:
                if self._holder is None:
                    self._holder = await finished(asyncio.to_thread(self._store.hold_as, self._node_id))
                    self._ended |= self._holder.noted  # by the node before this one
            for digest in digests:
                if self._uses[digest]:  # else it has ended meanwhile
                    self._holder.note(digest)
        if is_stored and sandbox_id in self._of:
            self._stored.add(sandbox_id)
            self._tell_stored()

    def woke(self, sandbox_id: str) -> None:
        """A sandbox is on disk no more; the next `settle` tells that."""
        self._stored.discard(sandbox_id)

    def _tell_stored(self) -> None:
        is_some = bool(self._stored)
        if self._holder is not None and is_some != self._told:
            with _as_far_as_can_be():
                self._holder.tell_stored(self._journal if is_some else None)
                self._told = is_some

    def release(self, sandbox_id: str) -> None:
        self.woke(sandbox_id)
        for digest in self._of.pop(sandbox_id, ()):
            self._uses[digest] -= 1
            if not self._uses[digest]:
                del self._uses[digest]
                self._ended.add(digest)

    async def settle(self, unmount: Callable[[Iterable[str]], Awaitable[None]]) -> None:
        """Let go of what no sandbox here needs any more; of what no image needs, nothing stays."""
        ended, self._ended = [digest for digest in self._ended if not self._uses[digest]], set()
        self._tell_stored()
        with _as_far_as_can_be():
            if self._holder is not None:
                for digest in ended:
                    self._holder.drop(digest)
            if await finished(asyncio.to_thread(self._store.settle)):
                await unmount(ended)

    def close(self) -> None:
        if self._holder is not None:
            if not self._of:  # nobody is to wait for a node that has no sandboxes
                for digest in set(self._holder.noted):
                    self._holder.drop(digest)
            self._holder.close()


@contextmanager
def _as_far_as_can_be() -> Iterator[None]:
    """A full disk or one that can't be written stops no sandbox: only what it is made of may go sooner."""
    try:
        yield
    except CapacityError:
        pass
    except OSError as error:
        if error.errno not in (*NO_ROOM, errno.EROFS, errno.EACCES):
            raise
