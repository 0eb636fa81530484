"""What a node says about itself."""

import time
from typing import Annotated, Literal

from msgspec import Meta, Struct

from barchan.errors import Preempted
from barchan.model.image import TemplateKind
from barchan.model.lease import HolderId, LeaseEnd, LeasePhase, Preemption
from barchan.model.sandbox import Env, Label, Name, Need
from barchan.model.tiers import Waiting

PRIORITY_MAX = 100
GRACE_S_MAX = 86_400.0
METADATA_VALUE_MAX = 4096


class NodeMemory(Struct, frozen=True, kw_only=True):
    """A host's memory, and what of it the sandboxes of a node ask for and take.

    Attributes:
        requested_mib: Memory limits of those that are awake, added up; at most `requested_max_mib` are let in.
        used_mib: What all of them take now, with the files that the kernel has read for them.
        reclaimable_mib: Of that: the cache of files, and what paused ones hold.
        step: What is done about it: nothing, move waiting sandboxes down, refuse new ones, save some to disk.
        memory_stalled, cpu_stalled: Share of the last ten seconds in which some program of the host waited for it.
    """

    total_mib: int
    available_mib: int
    requested_mib: int
    requested_max_mib: int
    used_mib: int
    reclaimable_mib: int
    step: Literal["none", "tiers", "refuse", "evict"]
    memory_stalled: float | None = None
    cpu_stalled: float | None = None


class NodeInfo(Struct, frozen=True, kw_only=True):
    """A node's identity and load.

    Attributes:
        sandboxes_running: Those that have processes here; `sandboxes_paused` of them stand still.
        sandboxes_hibernated: Those that are on its disk, beside them.
        store: The URL of the blob store it has images from; empty: none.
        start_s_max: What a create takes at most, with what only the first of its kind takes; by backend that runs.
    """

    node_id: str
    version: str
    pid: int
    uptime_s: float
    sandboxes_running: int
    sandboxes_starting: int
    sandboxes_queued: int
    running_max: int
    starting_max: int
    leases: int
    creates_total: int
    create_failures_total: int
    memory_available_mib: int
    backends: tuple[str, ...]
    store: str = ""
    memory: NodeMemory | None = None
    sandboxes_paused: int = 0
    sandboxes_hibernated: int = 0
    start_s_max: dict[str, float] = {}


class Budget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the sandboxes of one lease may use; None: no bound of its own.

    Attributes:
        sandboxes_max: At once, with those on their way.
        memory_mib_max: Sum of the memory limits of those that are not on disk; what a wake adds may go beyond it.
        sandbox_s_max: Seconds that its sandboxes live, all added up; then they end, and no other starts.
        tokens_max: Prompt and completion tokens of its rollouts, as its holders tell them; then likewise.
    """

    sandboxes_max: Annotated[int, Meta(ge=1)] | None = None
    memory_mib_max: Annotated[int, Meta(ge=1)] | None = None
    sandbox_s_max: Annotated[float, Meta(gt=0)] | None = None
    tokens_max: Annotated[int, Meta(ge=1)] | None = None


class LeaseUse(Struct, frozen=True, kw_only=True):
    """What a lease has used of its budget: `sandboxes` and `memory_mib` now, the rest since it was opened.

    Those on disk take no memory.
    """

    sandboxes: int = 0
    memory_mib: int = 0
    sandbox_s: float = 0.0
    tokens: int = 0


class LeaseRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Open a lease, or hold one that is there on the terms it was opened on.

    Attributes:
        grace_s: How long its sandboxes live after its last connection went.
        labels: Of each of its sandboxes, where the sandbox has none of that name.
        priority: Higher ones start first where starts have to wait.
        waiting: Of each of its sandboxes that says nothing of it.
        holder: Who will send beats; without it, whoever reads the response holds the lease for as long as that lasts.
    """

    lease_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    grace_s: Annotated[float, Meta(ge=0, le=GRACE_S_MAX)] = 10.0
    labels: dict[Label, str] = {}
    priority: Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] = 0
    budget: Budget | None = None
    waiting: Waiting | None = None
    holder: HolderId | None = None


class LeaseInfo(Struct, frozen=True, kw_only=True):
    """A lease as its node has it; wall time.

    Attributes:
        holders: Connections that hold it now, but for those whose beats stay away.
        silent: Those.
        beat_unix_s: The last beat of any.
        ends_unix_s: When its sandboxes end, if nobody comes before.
    """

    lease_id: str
    grace_s: float
    labels: dict[str, str] = {}
    priority: int = 0
    budget: Budget | None = None
    used: LeaseUse = LeaseUse()
    holders: int = 1
    phase: LeasePhase = "held"
    silent: int = 0
    beat_unix_s: float | None = None
    ends_unix_s: float | None = None
    preemption: Preemption | None = None
    end: LeaseEnd | None = None

    def dismissal(self) -> Preempted:
        """What the holders of a preempted lease are told, and whoever asks for its sandboxes as they did."""
        assert self.preemption is not None
        told = self.preemption
        until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(told.until_unix_s))
        name = f"run {self.labels['run']!r}" if "run" in self.labels else f"lease {self.lease_id}"
        by = f" by {told.by}" if told.by else ""
        if self.end is None:
            now = f"its sandboxes stand still, as they are, and are kept until {until}"
        elif self.end.cause == "resumed":
            now = "its sandboxes went over to the run that goes on"
        else:
            now = f"its sandboxes were kept until {until}, and have ended"
        return Preempted(
            f"{name} was preempted{by}: {now} "
            "(try: start the run again, with --resume and its folder, in code client.run(name, out=..., attach=True))",
            lease_id=self.lease_id,
            by=told.by,
            until_unix_s=int(told.until_unix_s),
        )


class ImageInfo(Struct, frozen=True, kw_only=True):
    """A template as this node's store has it. Layers are digests, topmost first; sizes are bytes on disk.

    Attributes:
        shared_bytes: Of the layers that other images have, too; only in lists.
        used_unix_s: When a sandbox last started from it, or it was made; only in lists.
        kind: The root of a file system, or the disk of a machine.
        needs: What a backend must have for its sandboxes.
        entrypoint, cmd: What other runtimes start.
        source: What it was built from, in one line.
    """

    name: str
    digest: str
    layers: tuple[str, ...]
    size_bytes: int
    created_unix_s: float
    user: str
    workdir: str
    env: dict[str, str]
    base_layers: int = 0
    shared_bytes: int = 0
    used_unix_s: float = 0.0
    kind: TemplateKind = "root"
    needs: tuple[Need, ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    source: str = ""


class LayerInfo(Struct, frozen=True, kw_only=True):
    """A layer on this node. `size_bytes`: the whole of it; `local_bytes`: what of it is on this node's disk."""

    digest: str
    kind: str
    size_bytes: int
    local_bytes: int


class SnapshotRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the image of a sandbox's files is called, and starts with; None: a fresh name, and as the sandbox's image.

    `env` replaces the image's whole environment. What the sandbox itself was given does not become the image's.
    `kind`: `memory` keeps the sandbox's processes, too. `metadata` is for whoever looks for the snapshot later.
    `base_layers`: how many of the sandbox's bottom layers count as the new image's base; None: all of them; "same": the
    base of what the sandbox was made of.
    """

    name: Name | None = None
    env: Env | None = None
    user: str | None = None
    workdir: str | None = None
    base_layers: Annotated[int, Meta(ge=0)] | Literal["same"] | None = None
    kind: Literal["fs", "memory"] = "fs"
    metadata: Annotated[dict[Label, Annotated[str, Meta(max_length=METADATA_VALUE_MAX)]], Meta(max_length=64)] = {}


class Killed(Struct, frozen=True, kw_only=True):
    """How many sandboxes a kill ended."""

    killed: int


class Stopped(Struct, frozen=True, kw_only=True):
    """What became of a node's sandboxes as it ended: how many ended, how many stay on its disk; so do its snapshots."""

    ended: int
    asleep: int
    snapshots: int


class Requirement(Struct, frozen=True, kw_only=True):
    """One thing a backend needs of the host: whether it holds, what was seen, and what to do if not."""

    name: str
    ok: bool
    needed_for: str
    found: str
    remedy: str = ""
