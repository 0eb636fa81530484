"""A queue that is fair to those who queue: who has much waiting holds up nobody who has little."""

from collections import deque
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Takes from each owner in turn, and of one owner's in their order.

    Args:
        held: Owners whose turn does not come while they are in there.
    """

    def __init__(self, held: Collection[Hashable] = ()) -> None:
        self._held = held
        self._of: dict[Hashable, deque[T]] = {}  # in the order of turns
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, owner: Hashable, item: T) -> None:
        self._of.setdefault(owner, deque()).append(item)
        self._count += 1

    @property
    def is_ready(self) -> bool:
        """Somebody's turn can come."""
        return self._next() is not None

    def _next(self) -> Hashable | None:
        return next((owner for owner in self._of if owner not in self._held), None)

    def pop(self) -> T:
        """The next one; its owner's turn comes again after all others'.

        Raises:
            IndexError: There is none whose turn can come.
        """
        owner = self._next()
        if owner is None:
            raise IndexError("nobody's turn can come")
        items = self._of.pop(owner)
        item = items.popleft()
        if items:
            self._of[owner] = items
        self._count -= 1
        return item

    def drop(self, owner: Hashable, item: T) -> bool:
        """Take one out; False: it is not there."""
        items = self._of.get(owner)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._of[owner]
        self._count -= 1
        return True

    def drop_owner(self, owner: Hashable) -> list[T]:
        """Take out all of one owner's."""
        items = self._of.pop(owner, ())
        self._count -= len(items)
        return list(items)

    def clear(self) -> list[T]:
        """Take out all."""
        found = [item for items in self._of.values() for item in items]
        self._of.clear()
        self._count = 0
        return found
