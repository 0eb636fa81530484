"""What is told of snapshots."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from barchan.model.node import ImageInfo
from barchan.model.sandbox import Name, SandboxSpec

SnapshotKind = Literal["fs", "memory"]
SNAPSHOT_PREFIX = "snap_"
SnapshotId = Annotated[str, Meta(pattern=r"^snap_[0-9a-f]{16}$")]


class SnapshotInfo(Struct, frozen=True, kw_only=True):
    """The kept state of a sandbox at one moment: an image of its files and, for kind `memory`, its processes.

    Attributes:
        image: Of its files; the snapshot lasts as long as this.
        parent: Id of the snapshot that the sandbox was made of; empty: none that is there still.
        spec: The sandbox's own.
        own_bytes: On the node's disk, what goes with it: layers that no other image has, and its memory.
        shared_bytes: Of layers that other images have, too.
        memory_bytes: Of the file that its memory is in.
        resident_bytes: Of its processes' memory when it was made.
    """

    snapshot_id: str
    kind: SnapshotKind
    image: ImageInfo
    parent: str
    sandbox_id: str
    spec: SandboxSpec
    metadata: dict[str, str]
    created_unix_s: float
    own_bytes: int
    shared_bytes: int
    memory_bytes: int = 0
    resident_bytes: int = 0


class SnapshotPush(Struct, frozen=True, kw_only=True):
    """What the sending of a snapshot did: where it lies now, and bytes that were not there before."""

    snapshot_id: str
    store: str
    bytes_sent: int


class SnapshotPull(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`name`: what the snapshot's image is called here; None: as on the node that it was made on."""

    name: Name | None = None
