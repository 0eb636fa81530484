"""What a node keeps ready for creates to come."""

from typing import Annotated

from msgspec import Meta, Struct

SLOTS_MAX = 4096


class PoolRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many slots to keep ready at least; 0: none, every create starts cold. More are kept where many were taken."""

    slots: Annotated[int, Meta(ge=0, le=SLOTS_MAX)]


class PoolInfo(Struct, frozen=True, kw_only=True):
    """A node's warm pool. A slot is a sandbox but for its files, limits and name, which come with the claim.

    Attributes:
        wanted: What the pool is filled up to now.
        ready, filling: Slots that can be claimed, and those being made.
        claimed_total, cold_total: Creates that found a slot, and those that did not or could not use one.
        filled_total, died_total: Slots made; those of them that ended unclaimed and unasked.
        fill_ms: What making one takes, on average.
    """

    wanted: int
    ready: int
    filling: int
    claimed_total: int
    cold_total: int
    filled_total: int
    died_total: int
    fill_ms: float
