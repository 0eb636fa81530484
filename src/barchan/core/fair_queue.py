"""A queue that is fair to those who queue: who has much waiting holds up nobody who has little."""

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Takes from each owner in turn, and of one owner's in their order."""

    def __init__(self) -> None:
        self._of: dict[Hashable, deque[T]] = {}  # in the order of turns
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, owner: Hashable, item: T) -> None:
        self._of.setdefault(owner, deque()).append(item)
        self._count += 1

    def pop(self) -> T:
        """The next one; its owner's turn comes again after all others'.

        Raises:
            IndexError: There is none.
        """
        if not self._of:
            raise IndexError("an empty queue")
        owner, items = next(iter(self._of.items()))
        del self._of[owner]
        item = items.popleft()
        if items:
            self._of[owner] = items
        self._count -= 1
        return item

    def of(self, owner: Hashable) -> list[T]:
        return list(self._of.get(owner, ()))

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

    def clear(self) -> list[T]:
        """Take out all."""
        found = [item for items in self._of.values() for item in items]
        self._of.clear()
        self._count = 0
        return found
