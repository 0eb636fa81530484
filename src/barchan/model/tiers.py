"""Tiers of waiting: what a sandbox costs while nobody asks anything of it."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

# running; frozen with its memory kept; its cold memory given away; all of it on disk
Tier = Literal["running", "paused", "paged_out", "hibernated"]
WAIT_S_MAX = 31_536_000.0  # a year


class Waiting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node may do by itself with a sandbox that waits; asking for a tier is always allowed.

    Attributes:
        pause: Stop its programs.
        page_out: Give its cold memory away, where the host has swap.
        hibernate: Put its processes and memory on disk.
        after_s: Go down to the deepest of the allowed tiers after this long with nothing asked of it. None: by what
            memory is short of, and how long sandboxes of its lease have waited before.
    """

    pause: bool = True
    page_out: bool = True
    hibernate: bool = True
    after_s: Annotated[float, Meta(gt=0, le=WAIT_S_MAX)] | None = None


class TierRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bring many sandboxes to one tier: those with these ids, or those that have all these labels.

    `all` stands for every sandbox of the node, and goes with neither.
    """

    tier: Tier
    sandbox_ids: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    all: bool = False


class TierChange(Struct, frozen=True, kw_only=True):
    """Where one sandbox is now.

    Attributes:
        freed_bytes: Memory that it does not take any more, since it was running.
        refused: Why it is not where it was asked to be; empty: it is.
        took_ms: From its turn to its end.
    """

    sandbox_id: str
    tier: Tier
    freed_bytes: int = 0
    refused: str = ""
    took_ms: float = 0.0


class AdoptRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who holds a sandbox that comes from another node; with no lease it is detached."""

    lease_id: str | None = None
