"""All legal phase changes of a sandbox, in one table."""

from enum import Enum

from barchan.errors import Conflict
from barchan.model.sandbox import Phase


class Fact(Enum):
    """Something observed about a sandbox."""

    PLACED = "placed"
    INIT_UP = "init_up"
    BOOT_FAILED = "boot_failed"
    FROZEN = "frozen"
    THAWED = "thawed"
    MEMORY_STORED = "memory_stored"
    ENDED = "ended"
    INIT_DIED = "init_died"
    NODE_LOST = "node_lost"


F = Fact  # short name for the table only
TRANSITIONS: dict[Phase, dict[Fact, Phase]] = {
    "pending": {F.PLACED: "booting", F.ENDED: "stopped", F.NODE_LOST: "lost"},
    "booting": {F.INIT_UP: "ready", F.ENDED: "stopped", F.BOOT_FAILED: "lost", F.NODE_LOST: "lost"},
    "ready": {F.FROZEN: "paused", F.ENDED: "stopped", F.INIT_DIED: "lost", F.NODE_LOST: "lost"},
    "paused": {
        F.THAWED: "ready",
        F.MEMORY_STORED: "hibernated",
        F.ENDED: "stopped",
        F.INIT_DIED: "lost",
        F.NODE_LOST: "lost",
    },
    "hibernated": {F.PLACED: "booting", F.ENDED: "stopped"},  # holds no RAM: losing a node cannot hurt it
    "stopped": {},
    "lost": {},
}


def next_phase(phase: Phase, fact: Fact) -> Phase:
    """The phase after `fact`.

    Raises:
        Conflict: The fact cannot happen in this phase.
    """
    after = TRANSITIONS[phase].get(fact)
    if after is None:
        raise Conflict(f"a sandbox that is {phase} can't be {fact.value}", phase=phase, fact=fact.value)
    return after
