"""How short a host is of memory and processors, and what that asks for. Pure: readings in, decision out.

Short of memory, a node first moves waiting sandboxes down their tiers, then lets no new ones in, and last has the least
valuable of the waiting ones saved to disk. Nothing here ends a running one.
"""

from typing import Literal

from msgspec import Struct

Step = Literal["none", "tiers", "refuse", "evict"]

TIERS_SHARE = 0.20  # of the host's memory: with less available, what waits gives its memory back
REFUSE_STALLED = 0.25  # of the last ten seconds, in which every program that could run waited for memory
TIERS_STALLED = 0.05  # of them, in which some program did
STALLS_SHARE = 0.5  # with more of the memory available, who waits for some is in a group that has reached its own limit
EVICT_RESERVE_SHARE = 0.5  # of the reserve: with less left of it, refusing alone is too late


class Pressure(Struct, frozen=True, kw_only=True):
    """A host's memory and how its programs wait, at one moment.

    Attributes:
        memory_total_mib, memory_available_mib: Of the host; available is what can be had without swapping.
        swap_free_mib: Where paged-out memory can still go: 0 where the host has no swap.
        memory_stalled: Share of the last ten seconds in which some program waited for memory; None: not known here.
        memory_stalled_full: The same, for every program that could have run.
        cpu_stalled: Share in which some program waited for a processor.
    """

    memory_total_mib: int
    memory_available_mib: int
    swap_free_mib: int = 0
    memory_stalled: float | None = None
    memory_stalled_full: float | None = None
    cpu_stalled: float | None = None

    @property
    def memory_available_share(self) -> float:
        """Of the host's memory, 0 to 1."""
        return self.memory_available_mib / max(1, self.memory_total_mib)


def step(pressure: Pressure, reserve_mib: int) -> Step:
    """What to do about the memory: each step asks for those before it, too.

    Args:
        reserve_mib: Host memory that must stay available.
    """
    available, share = pressure.memory_available_mib, pressure.memory_available_share
    stalled, stalled_full = pressure.memory_stalled or 0.0, pressure.memory_stalled_full or 0.0
    if share > STALLS_SHARE:
        stalled = stalled_full = 0.0
    if available < reserve_mib * EVICT_RESERVE_SHARE:
        return "evict"
    if available < reserve_mib or stalled_full > REFUSE_STALLED:
        return "refuse"
    if share < TIERS_SHARE or stalled > TIERS_STALLED:
        return "tiers"
    return "none"
