"""One address space whose pages come later: what happens to it, and the filling of its pages.

What was unmapped, dropped or moved is known before anything is filled: the kernel refuses to fill (EAGAIN) while there
is such news that was not read, and everything here runs in one thread.
"""

import errno
import os
from collections.abc import Callable
from typing import Final, NamedTuple

from barchan.errors import SnapshotCorrupt
from barchan.snapshot.form import CHUNK_PAGES, ZEROS
from barchan.snapshot.pagemap import PAGE_BYTES
from barchan.snapshot.pager import uffd
from barchan.snapshot.pager.layout import Layout
from barchan.snapshot.pager.regions import Part, Regions

LOWEST: Final = 16 * PAGE_BYTES
"""No program may ask for a lower address."""
GAP_BYTES: Final = 64 << 10
"""As much fresh memory is filled with zeros at once as a fault asks for any."""


class SpaceGone(Exception):
    """All processes of this address space have ended, or execute something else now."""


class Chunk(NamedTuple):
    """Pages in our memory, and where: `content` keeps them there."""

    content: bytes
    address: int


class Counts:
    """Of one sandbox."""

    def __init__(self) -> None:
        self.faults = 0
        self.faulted_bytes = 0
        self.streamed_bytes = 0


class Space:
    """Owns the descriptor of one userfaultfd, which must not block.

    Args:
        load: Gives a chunk of a source; SnapshotCorrupt if it can't.
        forked: Told of a child: its descriptor, which it owns from then on, and its record.
    """

    def __init__(
        self,
        fd: int,
        layout: Layout,
        counts: Counts,
        load: Callable[[int, int], Chunk],
        forked: Callable[[int, Layout], None],
    ) -> None:
        self.fd = fd
        self._layout = layout
        self._counts = counts
        self._load = load
        self._forked = forked
        self._wanted: dict[int, None] = {}

    @property
    def regions(self) -> Regions:
        """What is not in place."""
        return self._layout.missing

    def close(self) -> None:
        """From now on the kernel gives zeros: only when nothing is missing, or nobody is left."""
        os.close(self.fd)

    def attend(self) -> bool:
        """Learn what has happened, and answer who waits.

        Returns:
            False: Somebody waits still, for pages that can't be filled now; ask again soon.

        Raises:
            SpaceGone, SnapshotCorrupt
            OSError: The kernel refused something for another reason.
        """
        for event in uffd.read(self.fd):  # not to the last: programs can make more of them than anybody can read
            if event.kind == uffd.FAULT:
                self._counts.faults += 1
                self._wanted[event.b - event.b % PAGE_BYTES] = None
            elif event.kind in (uffd.FORK, uffd.REMAP, uffd.REMOVE, uffd.UNMAP):
                self._layout.take(event)
            else:
                raise OSError(errno.EPROTO, f"userfaultfd told of an unknown event {event.kind}")
        if not self._layout.is_certain:
            number = self._probe()
            if number == errno.EAGAIN:  # more has happened than we know of
                return False
            for fd, child in self._layout.settle():
                self._forked(fd, child)
            if number == errno.ESRCH:
                raise SpaceGone
        for address in list(self._wanted):
            if not self._answer(address):
                return False
            del self._wanted[address]
        return True

    def stream(self) -> bool:
        """Fill the next few pages that nobody asked for; False as for `attend`."""
        if not self._layout.is_certain:
            return False
        first = self.regions.first()
        unit = first.unit(first.start)
        if not self._fill(unit):
            return False
        self._counts.streamed_bytes += unit.end - unit.start
        return True

    def is_gone(self) -> bool:
        """Whether the address space has ended, which the kernel does not tell by itself."""
        return self._layout.is_certain and self._probe() == errno.ESRCH

    def _probe(self) -> int:
        """Fill nothing: EAGAIN says that something happens to the address space, ESRCH that it has ended."""
        address = LOWEST
        while self.regions.find(address):  # zeros are right wherever nothing is missing
            address += PAGE_BYTES
        return uffd.zero(self.fd, address, PAGE_BYTES).number

    def _answer(self, address: int) -> bool:
        part = self.regions.find(address)
        if part is None:
            return self._fill(Part(address, address + self.regions.gap(address, GAP_BYTES), ZEROS, 0))
        unit = part.unit(address)
        if not self._fill(unit):
            return False
        self._counts.faulted_bytes += unit.end - unit.start
        return True

    def _fill(self, unit: Part) -> bool:
        """Put a unit in place as far as there are pages for it; False: not now."""
        source = self._source(unit)
        at, step = unit.start, unit.end - unit.start
        while at < unit.end:
            if unit.source == ZEROS:
                done, number = uffd.zero(self.fd, at, step)
            else:
                done, number = uffd.copy(self.fd, at, step, source + at - unit.start)
            if number in (errno.EEXIST, errno.ENOENT) and step > PAGE_BYTES:
                step = max(PAGE_BYTES, step // 2 // PAGE_BYTES * PAGE_BYTES)  # areas end where programs like
                continue
            if number in (errno.EEXIST, errno.ENOENT):  # there already, or no longer a place for it
                uffd.wake(self.fd, at, PAGE_BYTES)
                done = PAGE_BYTES
            elif number in (errno.EAGAIN, errno.ENOMEM):
                return False
            elif number == errno.ESRCH:
                raise SpaceGone
            elif number:
                raise OSError(number, f"filling {step} bytes at {at:#x}: {os.strerror(number)}")
            self.regions.drop(at, at + done)
            at += done
            step = unit.end - at
        return True

    def _source(self, unit: Part) -> int:
        """The address of a unit's pages here."""
        if unit.source == ZEROS:
            return 0
        chunk = self._load(unit.source, unit.slot // CHUNK_PAGES)
        offset = unit.slot % CHUNK_PAGES * PAGE_BYTES
        if offset + unit.end - unit.start > len(chunk.content):
            raise SnapshotCorrupt(
                f"a chunk of the memory file has {len(chunk.content)} bytes, fewer than its index says: "
                "the file is damaged; restore another snapshot"
            )
        return chunk.address + offset
