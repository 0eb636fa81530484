"""Where the areas of an address space lie that lack pages, after what programs do to them.

The kernel tells of an unmapped, dropped or moved area after it was done, and two threads may be told of in another
order than they acted. But nobody knows where an area has gone before the kernel has told us, and none moves to where
another one is: a move to such a place waits until it is known how that became free. A move is told of twice: its
thread's next news is that the old place was unmapped, where another thread may have put something by then.
"""

from barchan.snapshot.pager import uffd
from barchan.snapshot.pager.regions import Regions


class Layout:
    """Follows one address space. No I/O.

    Args:
        areas: All that the kernel watches, whether something is missing there or not.
        missing: What is not in place.
    """

    def __init__(self, areas: Regions, missing: Regions) -> None:
        self.areas = areas
        self.missing = missing
        self._waiting: list[uffd.Event] = []  # moves
        self._left: list[tuple[int, int]] = []  # by moves whose second news is to come
        self._before: tuple[Regions, Regions] | None = None
        self._children: list[tuple[int, Layout]] = []

    @property
    def is_certain(self) -> bool:
        """Whether nothing is left to `settle`."""
        return not self._waiting and not self._children and self._before is None

    def take(self, event: uffd.Event) -> None:
        """News of the kernel: FORK, REMAP, REMOVE or UNMAP."""
        if event.kind == uffd.FORK:
            self._children.append((event.a, Layout(self.areas.copy(), self.missing.copy())))
            return
        if event.kind == uffd.UNMAP and (event.a, event.b) in self._left:
            self._left.remove((event.a, event.b))
            return
        if event.kind == uffd.REMAP:
            self._left.append((event.a, event.a + event.c))
            self._waiting.append(event)
        else:
            self._drop(event)
        while free := next(filter(self._is_free, self._waiting), None):
            self._waiting.remove(free)
            self._move(free)

    def settle(self) -> list[tuple[int, "Layout"]]:
        """Everything that has happened was told: put the rest in place.

        Returns:
            Children by their descriptors. Where an area was moved at the time of a fork, the child's record has it in
            both places: in one of them the child has no area, and nothing is ever filled there.
        """
        for event in self._waiting:
            self._move(event)
        self._waiting.clear()
        self._left.clear()
        children, self._children = self._children, []
        for _, child in children if self._before else ():
            assert self._before is not None
            for areas, missing in (self._before, (self.areas, self.missing)):
                child.areas.add(areas)
                child.missing.add(missing)
        self._before = None
        return children

    def _is_free(self, move: uffd.Event) -> bool:
        return not self.areas.overlap(move.b, move.b + move.c)

    def _move(self, event: uffd.Event) -> None:
        if self._before is None:
            self._before = (self.areas.copy(), self.missing.copy())
        self.areas.move(event.a, event.a + event.c, event.b)
        self.missing.move(event.a, event.a + event.c, event.b)

    def _drop(self, event: uffd.Event) -> None:
        self.missing.drop(event.a, event.b)
        if event.kind == uffd.UNMAP:
            self.areas.drop(event.a, event.b)
