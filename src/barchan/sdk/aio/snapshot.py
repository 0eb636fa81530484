"""A snapshot by its id: look at it, start sandboxes from it, remove it."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from barchan.model.node import ImageInfo
from barchan.model.sandbox import SandboxSpec
from barchan.model.snapshot_info import SnapshotInfo, SnapshotKind, SnapshotPull, SnapshotPush
from barchan.sdk.endpoint import Endpoint
from barchan.sdk.transport import Call, Transport, encode, shared_transport

SNAPSHOTS = Call("snapshot_list", list[SnapshotInfo])
SNAPSHOT_INFO = Call("snapshot_info", SnapshotInfo)
SNAPSHOT_REMOVE = Call("snapshot_remove", SnapshotInfo)
SNAPSHOT_PUSH = Call("snapshot_push", SnapshotPush)
SNAPSHOT_PULL = Call("snapshot_pull", SnapshotInfo)

TRANSFER_TIMEOUT_S = 3600.0  # gigabytes, to or from a slow store
_REMOVE_TIMEOUT_S = 120.0


class SnapshotFacts:
    """What is known of a snapshot since it was made; `info` has all of it."""

    info: SnapshotInfo

    @property
    def id(self) -> str:
        return self.info.snapshot_id

    @property
    def kind(self) -> SnapshotKind:
        return self.info.kind

    @property
    def parent(self) -> str:
        """Id of the snapshot that it came of when this was asked; empty: of none."""
        return self.info.parent

    @property
    def metadata(self) -> dict[str, str]:
        return self.info.metadata

    @property
    def image(self) -> ImageInfo:
        """Its files, as an image like any other."""
        return self.info.image

    @property
    def name(self) -> str:
        """Of its image."""
        return self.info.image.name

    @property
    def digest(self) -> str:
        """Of its image, as are all below."""
        return self.info.image.digest

    @property
    def layers(self) -> tuple[str, ...]:
        return self.info.image.layers

    @property
    def size_bytes(self) -> int:
        return self.info.image.size_bytes

    @property
    def user(self) -> str:
        return self.info.image.user

    @property
    def workdir(self) -> str:
        return self.info.image.workdir

    @property
    def env(self) -> dict[str, str]:
        return self.info.image.env


class AsyncSnapshot(SnapshotFacts):
    """One snapshot, given to `client.create()` to start from. Picklable, without the token."""

    def __init__(self, transport: Transport, info: SnapshotInfo) -> None:
        self.info = info
        self._transport = transport

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (self._transport.endpoint, self.info)

    async def push(self, *, timeout_s: float = TRANSFER_TIMEOUT_S) -> SnapshotPush:
        """Send it to the node's blob store, from where other nodes have it: `client.pull_snapshot(id)`. It stays here.

        What is there already is not sent again.

        Raises:
            Conflict: The node has no store.
            BlobUnavailable: The store is slow or dead.
        """
        target = SNAPSHOT_PUSH.target(snapshot_id=self.id)
        return await self._transport.value(SNAPSHOT_PUSH, target, timeout_s=timeout_s)

    async def remove(self) -> None:
        """Forget it with its image; sandboxes, and snapshots that came of it, stay.

        Raises:
            NotFound: It is not there any more.
        """
        target = SNAPSHOT_REMOVE.target(snapshot_id=self.id)
        await self._transport.value(SNAPSHOT_REMOVE, target, timeout_s=_REMOVE_TIMEOUT_S, resend=False)


def _revive(endpoint: Endpoint, info: SnapshotInfo) -> AsyncSnapshot:
    return AsyncSnapshot(shared_transport(endpoint), info)


async def find(transport: Transport, snapshot_id: str) -> AsyncSnapshot:
    return AsyncSnapshot(transport, await transport.value(SNAPSHOT_INFO, SNAPSHOT_INFO.target(snapshot_id=snapshot_id)))


async def pulled(transport: Transport, snapshot_id: str, name: str | None, timeout_s: float) -> AsyncSnapshot:
    target, asked = SNAPSHOT_PULL.target(snapshot_id=snapshot_id), encode(SnapshotPull(name=name))
    return AsyncSnapshot(transport, await transport.value(SNAPSHOT_PULL, target, asked, timeout_s=timeout_s))


async def listed(transport: Transport, metadata: Mapping[str, str]) -> list[AsyncSnapshot]:
    wanted = [f"{name}={value}" for name, value in metadata.items()]
    infos = await transport.value(SNAPSHOTS, SNAPSHOTS.target({"metadata": wanted}))
    return [AsyncSnapshot(transport, info) for info in infos]


def spec_of(snapshot: SnapshotFacts) -> SandboxSpec:
    """What a sandbox of it is asked to be: as one of its image; for kind `memory`, as its own sandbox was."""
    if snapshot.kind == "fs":
        return SandboxSpec(template=snapshot.id)
    return replace(
        snapshot.info.spec,
        template=snapshot.id,
        layers=(),
        labels={},
        setup=None,
        create_id=None,
        lease_id=None,
        detach=False,
    )
