"""What the pager knows of pages that are not in place: against a plain dictionary of single pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.snapshot.form import CHUNK_PAGES, ZEROS
from barchan.snapshot.pagemap import PAGE_BYTES
from barchan.snapshot.pager.regions import Part, Regions

SPAN = 120  # pages of address space

Pages = dict[int, tuple[int, int]]  # page number -> source, slot


@st.composite
def layouts(draw: st.DrawFn) -> list[Part]:
    """Parts that do not overlap, some of them neighbours."""
    parts, page = [], draw(st.integers(0, 8))
    while page < SPAN:
        length = draw(st.integers(1, 40))
        source = draw(st.sampled_from([ZEROS, 0, 1]))
        slot = 0 if source == ZEROS else draw(st.integers(0, 100))
        parts.append(Part(page * PAGE_BYTES, (page + length) * PAGE_BYTES, source, slot))
        page += length + draw(st.integers(0, 6))
    return parts


def pages_of(regions: Regions) -> Pages:
    found: Pages = {}
    for part in regions.parts:
        for address in range(part.start, part.end, PAGE_BYTES):
            assert address // PAGE_BYTES not in found
            found[address // PAGE_BYTES] = (part.source, part.slot_at(address))
    return found


RANGES = st.tuples(st.integers(0, SPAN), st.integers(1, 50))
STEPS = st.lists(st.tuples(st.sampled_from(["drop", "move"]), RANGES, st.integers(0, SPAN)), max_size=12)


@given(layouts(), STEPS)
def test_dropped_and_moved_pages_are_followed(parts: list[Part], steps: list[tuple[str, tuple[int, int], int]]) -> None:
    """After any drops and moves each page is known by its present address, and only those that are left."""
    regions = Regions(parts)
    expected = pages_of(regions)
    for what, (first, count), target in steps:
        start, end = first * PAGE_BYTES, (first + count) * PAGE_BYTES
        taken = {page: expected.pop(page) for page in range(first, first + count) if page in expected}
        if what == "drop":
            regions.drop(start, end)
        else:
            regions.move(start, end, target * PAGE_BYTES)
            for page in range(target, target + count):
                expected.pop(page, None)
            expected |= {page - first + target: place for page, place in taken.items()}
        assert pages_of(regions) == expected
        assert list(regions.parts) == sorted(regions.parts)
    for page in range(2 * SPAN):
        found = regions.find(page * PAGE_BYTES + 17)
        assert (found is not None) == (page in expected)
        gap = regions.gap(page * PAGE_BYTES, 8 * PAGE_BYTES) // PAGE_BYTES
        assert gap == next((n for n in range(8) if page + n in expected), 8)


@given(layouts())
def test_units_come_out_of_one_chunk(parts: list[Part]) -> None:
    """A unit holds the page that was asked for, in one part and one chunk; all units together are everything."""
    regions = Regions(parts)
    for part in regions.parts:
        for address in range(part.start, part.end, PAGE_BYTES):
            unit = part.unit(address)
            assert part.start <= unit.start <= address < unit.end <= part.end
            assert unit.source == part.source
            assert unit.slot == part.slot_at(unit.start)
            if unit.source != ZEROS:
                assert (
                    unit.slot // CHUNK_PAGES == (unit.slot + (unit.end - unit.start) // PAGE_BYTES - 1) // CHUNK_PAGES
                )
    units = regions.units(1000)
    assert sum(unit.end - unit.start for unit in units) == regions.size_bytes
    assert units[:3] == regions.units(3)


def test_runs_that_go_on_are_one_part() -> None:
    """Runs of a page map are cut at its own bounds; neighbours in memory and in the source are joined."""
    joined = Regions([Part(0x1000, 0x2000, 0, 5), Part(0x2000, 0x4000, 0, 6), Part(0x4000, 0x5000, 0, 9)])
    assert joined.parts == (Part(0x1000, 0x4000, 0, 5), Part(0x4000, 0x5000, 0, 9))


def test_a_copy_stays_as_it_is() -> None:
    """A forked child's record does not change with its parent's."""
    parent = Regions([Part(0x1000, 0x9000, 0, 0)])
    child = parent.copy()
    parent.drop(0x2000, 0x3000)
    assert child.parts == (Part(0x1000, 0x9000, 0, 0),)
    assert len(parent.parts) == 2


def test_overlapping_runs_are_refused() -> None:
    """A damaged page map must not fill a page twice."""
    with pytest.raises(ValueError, match="0x2000"):
        Regions([Part(0x1000, 0x3000, 0, 0), Part(0x2000, 0x4000, 0, 9)])
