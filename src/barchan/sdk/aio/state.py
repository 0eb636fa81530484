"""What a client asks of a node about the state of its sandboxes: what is kept of them, and where they wait."""

from collections.abc import Mapping, Sequence

from barchan.model.sandbox import SandboxInfo
from barchan.model.tiers import AdoptRequest, TierChange
from barchan.sdk.aio import snapshot
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.aio.snapshot import TRANSFER_TIMEOUT_S, AsyncSnapshot
from barchan.sdk.aio.tiers import Progress, bring
from barchan.sdk.checks import checked_labels
from barchan.sdk.lease import Lease
from barchan.sdk.transport import Call, Transport, encode

ADOPT = Call("adopt", SandboxInfo)

ADOPT_TIMEOUT_S = 600.0  # its memory comes whole


class StateCalls:
    """A part of `AsyncClient`."""

    _transport: Transport
    _lease: Lease

    async def snapshot(self, snapshot_id: str) -> AsyncSnapshot:
        """A snapshot by its id.

        Raises:
            NotFound: The node has none of this id.
        """
        return await snapshot.find(self._transport, snapshot_id)

    async def pull_snapshot(
        self, snapshot_id: str, *, name: str | None = None, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> AsyncSnapshot:
        """Have a snapshot that a node has sent to the blob store of both on this node, too, under the same id.

        Its memory comes whole, its files on demand. One that is here already stays as it is.

        Args:
            name: What its image is called here. None: as where it was made.

        Raises:
            NotFound: The store has no such snapshot.
            Conflict: Another image of this node has that name, or the node has no store.
            SnapshotIncompatible: Told by the first `create()`: this host can't run what that one has stored.
        """
        return await snapshot.pulled(self._transport, snapshot_id, name, timeout_s)

    async def snapshots(self, *, metadata: Mapping[str, str] | None = None) -> "list[AsyncSnapshot]":
        """The snapshots of the node that have all this metadata, the oldest first."""
        return await snapshot.listed(self._transport, checked_labels(metadata or {}))

    async def adopt(self, sandbox_id: str, *, detach: bool = False) -> AsyncSandbox:
        """Take a sandbox that another node has sent to the blob store of both; it lies on this node's disk then.

        Args:
            detach: It outlives this client.

        Raises:
            NotFound: The store has no such sandbox.
            Conflict: Another node has it, it has ended, or the node has no store.
            SnapshotIncompatible: Told by its first use: this host can't run what that one has stored.
        """
        asked = AdoptRequest(lease_id=None if detach else await self._lease.ensure())
        target = ADOPT.target(sandbox_id=sandbox_id)
        await self._transport.value(ADOPT, target, encode(asked), timeout_s=ADOPT_TIMEOUT_S)
        return AsyncSandbox(self._transport, sandbox_id)

    async def pause_many(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        sandbox_ids: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[TierChange]:
        """Pause many sandboxes; returns where each is, and in `refused` why one could not be paused.

        Cancelling it ends nothing of it: the node goes on.

        Args:
            labels: Those that have all these labels.
            sandbox_ids: Those with these ids, instead. With neither: every sandbox of the node.
            progress: Told of each as it is done.
        """
        return await bring(self._transport, "paused", labels, sandbox_ids, progress)

    async def page_out_many(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        sandbox_ids: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[TierChange]:
        """Pause many sandboxes, and give their cold memory away; as `pause_many`."""
        return await bring(self._transport, "paged_out", labels, sandbox_ids, progress)

    async def hibernate_many(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        sandbox_ids: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[TierChange]:
        """Hibernate many sandboxes, a few at a time; as `pause_many`."""
        return await bring(self._transport, "hibernated", labels, sandbox_ids, progress)

    async def resume_many(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        sandbox_ids: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[TierChange]:
        """Wake many sandboxes, those first that somebody waits for; as `pause_many`."""
        return await bring(self._transport, "running", labels, sandbox_ids, progress)
