"""The synchronous faces of the client: each call runs its native twin on the SDK's own event loop and waits."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from barchan.errors import BarchanError
from barchan.model.fork import ForkKind
from barchan.model.gc import GcReport
from barchan.model.image import Rebased
from barchan.model.lease import KEEP_S
from barchan.model.node import Budget, ImageInfo, LayerInfo, LeaseInfo, NodeInfo
from barchan.model.pool import PoolInfo
from barchan.model.sandbox import SandboxInfo, SandboxSpec
from barchan.model.tiers import TierChange, Waiting
from barchan.sdk.aio.client import AsyncClient, connect_async
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.aio.snapshot import TRANSFER_TIMEOUT_S, AsyncSnapshot
from barchan.sdk.aio.tiers import Progress
from barchan.sdk.background import BACKGROUND, iterate, run
from barchan.sdk.calls import Calling
from barchan.sdk.options import CreateOptions, zygote_spec
from barchan.sdk.recipe import Recipe
from barchan.sdk.sandbox import Sandbox
from barchan.sdk.snapshot import Snapshot

if TYPE_CHECKING:
    from barchan.rollout.sync import Run
    from barchan.sdk.prepared import Prepared
    from barchan.sdk.template import TemplateBuilder


class Client(Calling):
    """A connection to one node, made by `connect()`; closing it ends the sandboxes it made, but detached ones."""

    def __init__(self, twin: AsyncClient) -> None:
        self._twin = twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._twin.endpoint)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._twin,)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End this client's lease, and with it every sandbox it has created and not detached; then the connections."""
        run(self._twin.close())

    def create(
        self,
        template: str | SandboxSpec | Snapshot,
        *,
        timeout_s: float | None = None,
        **options: Unpack[CreateOptions],
    ) -> Sandbox:
        """Start a sandbox, of an image or of a snapshot. Repeating it with the same `create_id` gives the same sandbox.

        If this is interrupted or times out, the half-made sandbox is gone before that is seen.

        Args:
            timeout_s: None: as long as the backend may take, a first boot with it (`node_info().start_s_max`).

        Raises:
            CapacityError: The node has no room now; `details["retry_after_ms"]` says when to ask again.
        """
        return Sandbox(run(self._twin.create(_twin_of(template), timeout_s=timeout_s, **options)))

    def create_many(
        self,
        template: str | SandboxSpec | Snapshot,
        *,
        n: int,
        timeout_s: float | None = None,
        **options: Unpack[CreateOptions],
    ) -> Iterator[Sandbox | BarchanError]:
        """Start `n` sandboxes alike, and give each as it is ready, or the error that its start ended in.

        Leaving the iteration early ends those that were not given yet. With a `create_id`, the sandboxes are its `-0`,
        `-1`, ... and repeating finds them.
        """
        with closing(iterate(self._twin.create_many(_twin_of(template), n=n, timeout_s=timeout_s, **options))) as items:
            for item in items:
                yield Sandbox(item) if isinstance(item, AsyncSandbox) else item

    def prepare(
        self,
        template: str | SandboxSpec | Snapshot,
        *,
        count: int,
        kind: ForkKind = "fs",
        timeout_s: float | None = None,
        **options: Unpack[CreateOptions],
    ) -> "Prepared":
        """Run a set-up once, and keep sandboxes ready that have it behind them: `pool.create()` gives them out.

        They are forks of the one that ran it, paused; the pool is filled up in the background. If what they are forked
        from ends, the set-up is run again.

        Args:
            count: How many to keep ready.
            kind: What they have of it, as for `sandbox.fork()`: its files, or also the processes that it has left.
            timeout_s: Of the create with the set-up; the script itself has `setup_timeout_s`.
            options: As for `create`, and `setup` among them. `ttl_s` of each stands still while it waits.

        Raises:
            SetupFailed: The script has failed; the message has the end of its output.
        """
        from barchan.sdk.prepared import Prepared  # which few programs need

        twin = self._twin.prepare(_twin_of(template), count=count, kind=kind, timeout_s=timeout_s, **options)
        return Prepared(run(twin))

    def run(
        self,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        priority: int = 0,
        budget: Budget | None = None,
        grace_s: float = 10.0,
        out: str | os.PathLike[str] | None = None,
        template: str = "debian",
        backend: str = "container",
        memory_mib: int = 512,
        pids_max: int = 128,
        capacity_wait_s: float = 300.0,
        snapshot_every: int = 0,
        breaker: float = 0.5,
        waiting: Waiting | None = None,
        attach: bool = False,
    ) -> "Run":
        """A run to enter: groups of rollouts under a lease of its own.

        Args:
            name: The same in every process that takes part in the run.
            labels: Of every sandbox of the run, beside `run=NAME`.
            priority: From -100 to 100; where sandboxes have to wait for their start, higher ones go first.
            budget: What this process's sandboxes may use, all together.
            grace_s: How long they live after this process was killed.
            out: A folder for logs and results; without one, nothing is known of a rollout that its process has not.
            template: The image of tasks that bring none, as are `memory_mib` and `pids_max`.
            backend: What the sandboxes of agents and graders are made by.
            capacity_wait_s: How long a rollout waits, in total, for room on the node; then it is void.
            waiting: What the node may do by itself with the run's sandboxes while nobody asks anything of them.
            snapshot_every: Turns from one snapshot of an agent's sandbox to the next, from which a rollout goes on
                where its sandbox is lost; 0: none. The same in every process that takes part.
            breaker: Begin no more groups (`RunStopped`) once this share of the latest rollouts of this process are
                void, of more than one task. 0: never.
            attach: Take part in a run that is in its folder already, whoever began it; `NotFound` if there is none.
        """
        from barchan.rollout.sync import Run  # the only way down from a client to what is built on it

        return Run(
            self._twin.run(
                name,
                labels=labels,
                priority=priority,
                budget=budget,
                grace_s=grace_s,
                out=out,
                template=template,
                backend=backend,
                memory_mib=memory_mib,
                pids_max=pids_max,
                capacity_wait_s=capacity_wait_s,
                snapshot_every=snapshot_every,
                breaker=breaker,
                waiting=waiting,
                attach=attach,
            )
        )

    def attach(self, sandbox_id: str) -> Sandbox:
        """A handle on a sandbox that exists, whoever made it.

        Raises:
            NotFound: The node has no such sandbox.
        """
        return Sandbox(run(self._twin.attach(sandbox_id)))

    def snapshot(self, snapshot_id: str) -> Snapshot:
        """A snapshot by its id.

        Raises:
            NotFound: The node has none of this id.
        """
        return Snapshot(run(self._twin.snapshot(snapshot_id)))

    def pull_snapshot(
        self, snapshot_id: str, *, name: str | None = None, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> Snapshot:
        """Have a snapshot that a node has sent to the blob store of both on this node, too, under the same id.

        Its memory comes whole, its files on demand. One that is here already stays as it is.

        Args:
            name: What its image is called here. None: as where it was made.

        Raises:
            NotFound: The store has no such snapshot.
            Conflict: Another image of this node has that name, or the node has no store.
            SnapshotIncompatible: Told by the first `create()`: this host can't run what that one has stored.
        """
        return Snapshot(run(self._twin.pull_snapshot(snapshot_id, name=name, timeout_s=timeout_s)))

    def snapshots(self, *, metadata: Mapping[str, str] | None = None) -> "list[Snapshot]":
        """The snapshots of the node that have all this metadata, the oldest first."""
        return [Snapshot(found) for found in run(self._twin.snapshots(metadata=metadata))]

    def images(self) -> list[ImageInfo]:
        """The templates that the node can start."""
        return run(self._twin.images())

    def image(self, name: str) -> ImageInfo:
        """One image, by its name or digest; what the node does not have, it has from its blob store.

        Raises:
            NotFound: There is none.
            BlobUnavailable: It is not on the node, and the store can't be asked.
        """
        return run(self._twin.image(name))

    def remove_image(self, name: str) -> ImageInfo:
        """Forget an image, by its name or digest. Sandboxes that run keep their files.

        Raises:
            NotFound: The node has no such image.
        """
        return run(self._twin.remove_image(name))

    def collect_images(
        self, *, unused_for_s: float | None = None, keep_bytes: int | None = None, dry_run: bool = False
    ) -> GcReport:
        """Make room on the node's disk: layers that no image names go, and the images that are asked for.

        What a live sandbox was made of stays, so does the base of an image that stays, and what was made or used within
        the last two minutes.

        Args:
            unused_for_s: Images from which no sandbox started for this long.
            keep_bytes: Images until the others' layers take at most this; those that builds made for themselves first,
                then those used longest ago.
            dry_run: Say what would go, and remove nothing.
        """
        return run(self._twin.collect_images(unused_for_s=unused_for_s, keep_bytes=keep_bytes, dry_run=dry_run))

    def layers(self) -> "list[LayerInfo]":
        """The layers of the node's images, and how much of each is on its disk."""
        return run(self._twin.layers())

    def name_image(self, image: str, name: str) -> ImageInfo:
        """Give an image, found by its name or digest, one more name; an image that has it gives way.

        Raises:
            NotFound: The node has no such image.
        """
        return run(self._twin.name_image(image, name))

    def rebase(
        self,
        old: str,
        new: str,
        *,
        names: Sequence[str] = (),
        progress: Callable[[Rebased], None] | None = None,
    ) -> "list[Rebased]":
        """Put images that were built on one image on another one, without building them again.

        Each is changed at once and whole; no layer is copied. Settings that an image has just as `old` has them, it
        gets as `new` has them. One that can't lie on `new` stays as it was, and says why in `refused`.

        Args:
            names: Which images; none: all that were built on `old`, without those that recipes are named after.
            progress: Told of each as it is done, on the SDK's own thread.

        Raises:
            NotFound: One of the images is not there; nothing was changed.
        """
        return run(self._twin.rebase(old, new, names=names, progress=progress))

    def zygote(self, template: str, *, imports: Sequence[str] = (), python: str = "python3") -> SandboxSpec:
        """What to create sandboxes of that have a warm interpreter: `create(client.zygote("debian", imports=[...]))`.

        The node imports once for each template and list, with the first of these sandboxes; in each a fork of that
        interpreter is ready then, and shares its memory until it writes to it. `sandbox.python()` runs in it.

        Args:
            imports: Modules, in this order; any Python of the template that has them will do, from 3.8 on.
            python: The interpreter, by its path or by a name that is looked up along PATH.
        """
        return zygote_spec(template, imports, python)

    def template(self, base: str | Recipe, *, memory_mib: int = 2048, disk_mib: int = 8192) -> "TemplateBuilder":
        """Begin an image on top of another one: `template("debian").run(...).build("mine")`.

        Args:
            memory_mib: Of the sandboxes that its steps run in, as is `disk_mib`.
        """
        from barchan.sdk.template import TemplateBuilder  # which is built on the native client

        return TemplateBuilder(self._twin, Recipe(base=base, memory_mib=memory_mib, disk_mib=disk_mib))

    def leases(self, *, ended: bool = False) -> "list[LeaseInfo]":
        """The leases of the node: what each run may use, has used, and who holds it.

        Args:
            ended: Those that ended within the last day, too; they come first.
        """
        return run(self._twin.leases(ended=ended))

    def adopt(self, sandbox_id: str, *, detach: bool = False) -> Sandbox:
        """Take a sandbox that another node has sent to the blob store of both; it lies on this node's disk then.

        Args:
            detach: It outlives this client.

        Raises:
            NotFound: The store has no such sandbox.
            Conflict: Another node has it, it has ended, or the node has no store.
            SnapshotIncompatible: Told by its first use: this host can't run what that one has stored.
        """
        return Sandbox(run(self._twin.adopt(sandbox_id, detach=detach)))

    def pause_many(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        sandbox_ids: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> "list[TierChange]":
        """Pause many sandboxes; returns where each is, and in `refused` why one could not be paused.

        Interrupting it ends nothing of it: the node goes on.

        Args:
            labels: Those that have all these labels.
            sandbox_ids: Those with these ids, instead. With neither: every sandbox of the node.
            progress: Told of each as it is done, on the SDK's own thread.
        """
        return run(self._twin.pause_many(labels=labels, sandbox_ids=sandbox_ids, progress=progress))

    def page_out_many(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        sandbox_ids: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> "list[TierChange]":
        """Pause many sandboxes, and give their cold memory away; as `pause_many`."""
        return run(self._twin.page_out_many(labels=labels, sandbox_ids=sandbox_ids, progress=progress))

    def hibernate_many(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        sandbox_ids: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> "list[TierChange]":
        """Hibernate many sandboxes, a few at a time; as `pause_many`."""
        return run(self._twin.hibernate_many(labels=labels, sandbox_ids=sandbox_ids, progress=progress))

    def resume_many(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        sandbox_ids: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> "list[TierChange]":
        """Wake many sandboxes, those first that somebody waits for; as `pause_many`."""
        return run(self._twin.resume_many(labels=labels, sandbox_ids=sandbox_ids, progress=progress))

    def use_tokens(self, count: int) -> None:
        """Count prompt and completion tokens of a model call towards the budget of this client's lease.

        `rollout.record` does so by itself; this is for model calls beside rollouts.
        """
        self._twin.use_tokens(count)

    def preempt(
        self, run: str, *, keep_s: float = KEEP_S, by: str = "", progress: Progress | None = None
    ) -> "list[TierChange]":
        """Put a run aside: all its sandboxes stand still at once, in the middle of whatever they do, and then go to
        disk. Whoever drives it gets `Preempted`; nothing of it is lost.

        Whoever goes on with the run finds them as they were: they wake with the first request. Repeating is harmless.

        Args:
            run: Its name, or the id of a lease.
            keep_s: How long its sandboxes are kept for that; then they end. They use no seconds of its budget.
            by: Who wants it, for those who are told. Empty: this user and host.
            progress: Told of each sandbox as it stands still (`paused`), and again as it is on disk or stays paused, on
                the SDK's own thread.

        Returns:
            Where each sandbox is, once all have come as far as they can; in `refused` why one is not on disk.

        Raises:
            NotFound: No run has a lease here by that name or id; the message says how one has ended.
        """
        return BACKGROUND.run(self._twin.preempt(run, keep_s=keep_s, by=by, progress=progress))

    def list(self, *, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        """The live sandboxes of the node that have all these labels."""
        return run(self._twin.list(labels=labels))

    def kill(self, *, labels: Mapping[str, str]) -> int:
        """End every sandbox of the node that has all these labels (with none given: every one); returns how many."""
        return run(self._twin.kill(labels=labels))

    def pool(self) -> PoolInfo:
        """The node's warm pool: what is ready, and what became of it so far."""
        return run(self._twin.pool())

    def set_pool(self, slots: int) -> PoolInfo:
        """Have the node keep so many sandboxes ready, at least, for creates to come; 0: none."""
        return run(self._twin.set_pool(slots))

    def node_info(self) -> NodeInfo:
        return run(self._twin.node_info())


def _twin_of(template: str | SandboxSpec | Snapshot) -> str | SandboxSpec | AsyncSnapshot:
    return template.twin if isinstance(template, Snapshot) else template


def connect(
    url: str | None = None,
    *,
    token: str | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    store: str | os.PathLike[str] | None = None,
) -> Client:
    """Connect to a node.

    Without a url this joins the user's own node, starting it if it does not run: a process of its own, which ends when
    it has been idle and empty for a while.

    Args:
        url: `http://HOST:PORT` or `unix:///PATH` of a node that was started with `barchan up`.
        token: That node's bearer token.
        state_dir: Where the user's own node keeps its state; by default what BARCHAN_STATE_DIR says, else
            /var/lib/barchan for root and ~/.local/share/barchan for others.
        store: The blob store that the user's own node has images from: a directory, or a URL as docs/images.md has it.
    """

    async def greeted() -> AsyncClient:
        return await connect_async(url, token=token, state_dir=state_dir, store=store)

    return Client(run(greeted()))
