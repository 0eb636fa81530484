"""Which pages of an address space still lie in a memory file, and where. No I/O."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from barchan.snapshot.form import CHUNK_BYTES, CHUNK_PAGES, ZEROS
from barchan.snapshot.pagemap import PAGE_BYTES


class Part(NamedTuple):
    """Pages that follow each other both in memory and in one source.

    Attributes:
        start: The first byte's address.
        end: The address behind the last byte.
        source: Of a memory file: ZEROS, 0 for the file itself, or which of its bases.
        slot: The first page's place in the source; meaningless for zeros.
    """

    start: int
    end: int
    source: int
    slot: int

    def slot_at(self, address: int) -> int:
        return self.slot if self.source == ZEROS else self.slot + (address - self.start) // PAGE_BYTES

    def cut(self, start: int, end: int) -> "Part":
        """What of it lies between two addresses inside it."""
        return Part(start, end, self.source, self.slot_at(start))

    def unit(self, address: int) -> "Part":
        """The stretch around an address that comes out of one chunk."""
        if self.source == ZEROS:
            start = address - address % CHUNK_BYTES
        else:
            start = address - address % PAGE_BYTES - self.slot_at(address) % CHUNK_PAGES * PAGE_BYTES
        return self.cut(max(self.start, start), min(self.end, start + CHUNK_BYTES))


class Regions:
    """The parts of one address space that are not in place yet, in order of their addresses; none overlap."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._parts: list[Part] = []
        for part in sorted(parts):
            last = self._parts[-1] if self._parts else None
            if last and last.end == part.start and last.source == part.source and last.slot_at(last.end) == part.slot:
                self._parts[-1] = last._replace(end=part.end)
            elif last and last.end > part.start:
                raise ValueError(f"two parts have address {part.start:#x}")
            else:
                self._parts.append(part)

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._parts)

    @property
    def size_bytes(self) -> int:
        return sum(part.end - part.start for part in self._parts)

    def copy(self) -> "Regions":
        copied = Regions()
        copied._parts = self._parts.copy()
        return copied

    def first(self) -> Part:
        return self._parts[0]

    def units(self, count: int) -> list[Part]:
        """The first `count` units, or fewer: what would be filled next if nobody asked for anything."""
        found: list[Part] = []
        for part in self._parts[:count]:
            at = part.start
            while at < part.end and len(found) < count:
                found.append(part.unit(at))
                at = found[-1].end
        return found

    def find(self, address: int) -> Part | None:
        """The part that has this address."""
        index = bisect_right(self._parts, address, key=_start) - 1
        return self._parts[index] if index >= 0 and address < self._parts[index].end else None

    def gap(self, address: int, length: int) -> int:
        """How many bytes from an address on belong to no part; at most `length`."""
        if self.find(address):
            return 0
        index = bisect_right(self._parts, address, key=_start)
        return min(length, self._parts[index].start - address) if index < len(self._parts) else length

    def overlap(self, start: int, end: int) -> bool:
        """Whether anything between two addresses belongs to a part."""
        return bisect_right(self._parts, start, key=_end) < bisect_left(self._parts, end, key=_start)

    def add(self, other: "Regions") -> None:
        """Take in what of another record lies where this one has nothing."""
        for part in other._parts:
            at = part.start
            while at < part.end:
                length = self.gap(at, part.end - at)
                if length:
                    self._parts.insert(bisect_left(self._parts, at, key=_start), part.cut(at, at + length))
                found = self.find(at + length) if at + length < part.end else None
                at = found.end if found else at + length

    def drop(self, start: int, end: int) -> None:
        """Forget the pages between two addresses: they are in place, or gone."""
        self._take(start, end)

    def move(self, start: int, end: int, target: int) -> None:
        """Pages went elsewhere in the address space; what was known of that place is forgotten."""
        shift = target - start
        moved = [part._replace(start=part.start + shift, end=part.end + shift) for part in self._take(start, end)]
        self._take(target, target + end - start)
        index = bisect_left(self._parts, target, key=_start)
        self._parts[index:index] = moved

    def _take(self, start: int, end: int) -> list[Part]:
        """Cut out what lies between two addresses."""
        first = bisect_right(self._parts, start, key=_end)
        last = bisect_left(self._parts, end, key=_start)
        if first >= last:
            return []
        inside = self._parts[first:last]
        kept = []
        if inside[0].start < start:
            kept.append(inside[0].cut(inside[0].start, start))
            inside[0] = inside[0].cut(start, inside[0].end)
        if inside[-1].end > end:
            kept.append(inside[-1].cut(end, inside[-1].end))
            inside[-1] = inside[-1].cut(inside[-1].start, end)
        self._parts[first:last] = kept
        return inside


def _start(part: Part) -> int:
    return part.start


def _end(part: Part) -> int:
    return part.end
