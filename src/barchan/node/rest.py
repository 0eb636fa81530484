"""How far down one sandbox is, and what is on its way with it."""

import asyncio

from msgspec import Struct
from msgspec.structs import replace

from barchan.image.template import Template
from barchan.model.sandbox import SandboxStats
from barchan.model.tiers import Tier


class Used(Struct, frozen=True, kw_only=True):
    """What a sandbox had used when it was on disk the last time: the kernel counts anew then, as `SandboxStats`."""

    cpu_s: float = 0.0
    oom_kills: int = 0
    memory_peak_bytes: int = 0

    def and_then(self, stats: SandboxStats) -> SandboxStats:
        """All together, with what was counted since."""
        return replace(
            stats,
            cpu_s=self.cpu_s + stats.cpu_s,
            oom_kills=self.oom_kills + stats.oom_kills,
            memory_peak_bytes=max(self.memory_peak_bytes, stats.memory_peak_bytes),
        )


class Stored(Struct, frozen=True, kw_only=True):
    """Where a hibernated sandbox is: all that a wake needs, as the journal keeps it.

    Attributes:
        snapshot_id: Of its memory file on this node's shelf.
        template: What it comes back from: its own image's layers, above them one of what it has written since.
        own_layers: How many of those, from the top, are its own.
        frozen_s: For how long its guest had stood still, by the guest's own clock, when it was stored.
        memory_bytes: What it took before.
        used: What it had used by then.
        shell: What its shell commands are run by, so that one that is asked for again is the same; empty: not known.
    """

    snapshot_id: str
    template: Template
    own_layers: int
    frozen_s: float
    memory_bytes: int
    used: Used = Used()
    shell: str = ""


class Rest:
    """The tier of one sandbox. `turn` is held by whoever moves it; times are the event loop's."""

    def __init__(self) -> None:
        self.tier: Tier = "running"
        self.turn = asyncio.Lock()
        self.is_descending = False
        self.wanted = asyncio.Event()  # somebody waits for it to be awake
        self.woken = asyncio.Event()  # cleared as it goes to sleep; set as it wakes or ends
        self.waking: asyncio.Task[None] | None = None
        self.is_asked = False  # asleep because somebody asked for it
        self.frozen_at = 0.0
        self.freed_bytes = 0
        self.memory_bytes = 0  # when it was last looked at, asleep
        self.left_bytes = self.out_bytes = 0  # after the last page-out: that it took, and that were out
        self.storing_mib = 0  # that it may take beside its limit, while its memory is stored
        self.refused = ""  # why it is not as far down as it was asked to be
        self.can_be_stored = True  # nobody has found out otherwise since it was last awake
        self.stored: Stored | None = None
        self.own_layers = 0  # of its template: what it had written when it was hibernated
        self.before = Used()
        self.is_published = False  # it is, or was, in the blob store
        self.images: set[str] = set()  # that keep those
        self.idle_from = 0.0  # its idle time counts from here, if it was last used earlier
        # of the policy
        self.waiting_since: float | None = None  # when nothing was asked of it any more
        self.look_at = 0.0
        self.judged_at: float | None = None  # when it was last used, as it was last looked at
        self.cpu_s = -1.0
        self.quiet_since = 0.0

    @property
    def is_stored(self) -> bool:
        """It is on disk, and nobody is waking it."""
        return self.stored is not None and self.waking is None
