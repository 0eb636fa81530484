"""What shortage of memory asks for, step by step."""

import pytest

from barchan.core.density import Pressure, Step, step


def _pressure(available_mib: int, **stalled: float) -> Pressure:
    return Pressure(memory_total_mib=10_000, memory_available_mib=available_mib, **stalled)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pressure", "expected"),
    [
        (_pressure(9000), "none"),
        (_pressure(2000), "none"),
        (_pressure(1999), "tiers"),
        (_pressure(5000, memory_stalled=0.06), "tiers"),
        (_pressure(5000, memory_stalled=0.05), "none"),
        (_pressure(5001, memory_stalled=0.9), "none"),
        (_pressure(511), "refuse"),
        (_pressure(5000, memory_stalled_full=0.3), "refuse"),
        (_pressure(5001, memory_stalled_full=0.9), "none"),
        (_pressure(255), "evict"),
    ],
)
def test_less_memory_asks_for_more(pressure: Pressure, expected: Step) -> None:
    """First tiers, then no more creates, then the disk; where the kernel tells of waits, by those too, unless there is
    so much memory that it is one guest which waits for some beyond its own limit.
    """
    assert step(pressure, 512) == expected
