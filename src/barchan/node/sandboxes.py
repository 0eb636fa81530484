"""The node agent proper: every sandbox of this node, from its request to its end."""

import asyncio
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from barchan import backends
from barchan.backends.base import Backend, Ended, Handle
from barchan.backends.container.lazy import ReaderSettings
from barchan.core.admission import Limits
from barchan.core.lifecycle import Fact, next_phase
from barchan.core.warm_pool import Bounds
from barchan.errors import (
    BarchanError,
    BlobUnavailable,
    CallerError,
    CapacityError,
    Conflict,
    NodeLost,
    SandboxExpired,
    SetupFailed,
)
from barchan.image.store import ImageStore
from barchan.image.template import Template
from barchan.model.sandbox import SandboxInfo, SandboxSpec
from barchan.node import adoption, away, hibernate, memories, upkeep
from barchan.node.admission import Admission, check_spec
from barchan.node.calls import Calls
from barchan.node.choosing import Choosing, settled
from barchan.node.density import awake_mib
from barchan.node.forks import Forks
from barchan.node.holds import Holds
from barchan.node.images import NodeImages
from barchan.node.journal import Journal
from barchan.node.leases import Leases, Over
from barchan.node.live import Live, Shells, identity
from barchan.node.network import Network
from barchan.node.policy_loop import Policy
from barchan.node.preempting import Preempting, hand_over
from barchan.node.processes import HOST_FULL
from barchan.node.setup import set_up
from barchan.node.snapshot_tree import SnapshotTree
from barchan.node.tasks import Tasks
from barchan.node.tiers import Tiers
from barchan.node.warm import WarmPool
from barchan.snapshot.shelf import FOLDER, Shelf

JOURNAL = "journal.sqlite"
Start = Callable[[Backend, Live], Awaitable[Handle]]


class Sandboxes:
    """Creates, finds, ends and adopts the sandboxes of one node."""

    def __init__(
        self,
        state_dir: Path,
        limits: Limits,
        version: str,
        weaken: tuple[str, ...] = (),
        reader: ReaderSettings = ReaderSettings(),  # noqa: B008 - frozen
        store_url: str = "",
    ) -> None:
        self.images = ImageStore(state_dir / "images")
        self.templates = NodeImages(self.images, store_url)
        self.journal = Journal(state_dir / JOURNAL)
        self.node_id = self.journal.meta("node_id", f"node_{secrets.token_hex(4)}")
        self.holds = Holds(self.images, self.node_id, state_dir / JOURNAL)
        self.admission = Admission(limits, state_dir, partial(awake_mib, self))
        self.shelf = Shelf(state_dir / FOLDER)
        self.forks = Forks(self, state_dir / memories.FOLDER)
        self.tree = SnapshotTree(self, state_dir / JOURNAL, state_dir / memories.FOLDER)
        self.leases = Leases(self.journal, self._lease_over)
        self.tiers = Tiers(self)
        self.preempting = Preempting(self)
        self.choosing = Choosing(self)
        self.warm = WarmPool(self, Bounds.around(limits.warm))
        self.live: dict[str, Live] = {}
        self.by_create: dict[str, Live] = {}
        self.arrivals = WeakValueDictionary[str, asyncio.Lock]()  # of sandboxes that come from other nodes
        self.calls = Calls(self)
        self.creates_total = self.create_failures_total = 0
        self.last_used = asyncio.get_running_loop().time()
        self._memory_mib = (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) >> 20
        self._cpus = os.cpu_count() or 1
        self.version, self.weaken, self.reader = version, weaken, reader
        self.state_dir = state_dir
        self.started = time.monotonic()
        self._backends: dict[str, Backend] = {}
        self.fallen: set[str] = set()  # whose supervisor died, and has left things behind
        self.backend_turns = defaultdict[str, asyncio.Lock](asyncio.Lock)  # of whoever starts one
        self.shells = Shells()
        self.tasks = Tasks()
        self.lost: dict[str, BarchanError] = {}

    # life of the node

    async def start(self) -> None:
        """Find the sandboxes of an earlier node again; what can't be found is lost, what nobody knows is removed."""
        await asyncio.to_thread(self.shelf.start)
        await adoption.adopt_all(self)
        await self.tree.start()
        self.leases.begin()
        self.preempting.go_on()
        self.tasks.spawn(upkeep.sweep(self))
        self.tasks.spawn(Policy(self).run())
        self.tasks.spawn(self.warm.run())

    async def backend(self, name: str) -> Backend:
        """The backend of this name, started on first use."""
        async with self.backend_turns[name]:
            backend = self._backends.get(name)
            if backend is None:
                backend = backends.load(name, self)
                backend.on_unavailable = self._blob_unavailable
                await backend.start()
                self._backends[name] = backend
                self.tasks.spawn(self._watch_backend(name, backend))
            return backend

    def running_backend(self, name: str) -> Backend | None:
        """The backend of this name, if it was started."""
        return self._backends.get(name)

    def running_backends(self) -> Iterable[Backend]:
        return self._backends.values()

    def can_hibernate(self, live: Live) -> bool:
        """Whether its backend stores memory at all."""
        backend = self.running_backend(live.spec.backend)
        return backend is not None and backend.capabilities.memory_snapshot

    async def _watch_backend(self, name: str, backend: Backend) -> None:
        """When the supervisor itself dies, its sandboxes died with it: say so, and start anew."""
        await backend.lost()
        is_wanted = self._backends.pop(name, None) is not None
        error = NodeLost(f"the supervisor of {name} sandboxes died, and they with it")
        for live in list(self.live.values()):
            if live.spec.backend == name and live.is_up:  # a create that is under way fails by itself
                live.handle.guest.guest_gone(error)
                self.lost[live.sandbox_id] = error
                self._ended(live, Fact.INIT_DIED, "node_lost")
        await backend.close()
        if is_wanted and name == "container":
            await upkeep.start_again(self, name)

    def _blob_unavailable(self, sandbox_ids: Sequence[str], cause: str) -> None:
        """Bytes of their image can't be had, and they were stopped before they could see that: say why."""
        for sandbox_id in sandbox_ids:
            live = self.live.get(sandbox_id)
            if live is None or live.ending is not None or not (live.is_up or live.phase == "booting"):
                continue
            if live.is_up:
                self._ended(live, Fact.INIT_DIED, f"blob_unavailable: {cause}")
            else:  # its create fails for this, however that shows
                self.journal.end(sandbox_id, "lost", f"blob_unavailable: {cause}")
                live.unavailable = self._why_not(sandbox_id)
            if live.is_equipped:
                live.handle.guest.guest_gone(self._why_not(sandbox_id))

    async def close(self) -> None:
        """Let go; sandboxes stay for the next node."""
        await self.tasks.cancel()
        for live in list(self.live.values()):
            if live.is_equipped:
                await live.processes.close()
            if live.network is not None:
                await live.network.close()
        for backend in self._backends.values():
            await backend.close()
        self.holds.close()
        self.tree.close()
        self.journal.close()

    async def shutdown(self, *, keep: bool = False) -> int:
        """End everything this node runs, with `keep` but what lies on its disk; returns how many sandboxes ended."""
        ending = [live for live in self.live.values() if not (keep and live.rest.is_stored)]
        await asyncio.gather(*(self.end(live, "node_shutdown") for live in ending))
        await self.end_backends()
        return len(ending)

    @property
    def is_occupied(self) -> bool:
        """Sandboxes live here; those that are on disk need no node."""
        return self.calls.is_busy or any(live.phase != "hibernated" for live in self.live.values())

    async def end_backends(self) -> None:
        """End what holds sandboxes up, when none is left but those on disk."""
        await self.calls.close()
        await upkeep.clear_fallen(self)
        backends_, self._backends = self._backends, {}
        for backend in backends_.values():
            await backend.shutdown()

    # creating

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        """Start a sandbox, or find the one this `create_id` made before.

        Raises:
            CapacityError: No room. InvalidSpec, NotFound: The wish itself. SandboxLost, BackendError: It failed.
        """
        self.touch()
        live = self._made_before(spec)
        if live is None:
            self.check(spec)
            template = await self.tree.template_for(spec)
            spec, reason = await self.choosing.settle(spec, template)
            live = self._made_before(spec)  # meanwhile, by a repetition of this request
            if live is None:
                live = self.begin(spec, template, self.tree.start_of(spec))
                live.backend_reason = reason
                await asyncio.shield(live.booted)
                return live.info(self.node_id)
        await asyncio.shield(live.booted)
        if live.ending is not None:
            raise self._why_not(live.sandbox_id)
        hand_over(self, live, spec)
        try:
            await set_up(self, live)  # if the node was started again in the middle of that
        except SetupFailed as error:
            await self.end(live, f"create: {error}")
            raise
        return live.info(self.node_id)

    def check(self, spec: SandboxSpec) -> None:
        """Raise `InvalidSpec` or `NotFound` for a wish that this node could never fulfil."""
        if spec.lease_id is not None:
            self.leases.get(spec.lease_id)  # NotFound unless there is one
        check_spec(spec, self._memory_mib, self._cpus)

    def _made_before(self, spec: SandboxSpec) -> Live | None:
        """The sandbox of the same `create_id`.

        Raises:
            Conflict: It was asked to be another. SandboxExpired, SandboxLost: It has ended.
        """
        if spec.create_id is None:
            return None
        before = self.by_create.get(spec.create_id)
        if before is None:
            row = self.journal.find_create(spec.create_id)
            if row is not None:
                raise row.error()
        elif identity(before.spec) != identity(settled(self.leases.labelled(spec, before.spec.lease_id), before.spec)):
            raise Conflict(f"create id {spec.create_id!r} was used for another sandbox", create_id=spec.create_id)
        return before

    @property
    def id_prefix(self) -> str:
        return f"sb_{self.node_id[5:]}_"

    def new_id(self) -> str:
        return self.id_prefix + secrets.token_hex(6)

    def begin(
        self, spec: SandboxSpec, template: Template, start: Start | None = None, sandbox_id: str | None = None
    ) -> Live:
        """Let it in and start it; `booted` tells how that went."""
        slot = self.warm.take(spec, template) if start is None and sandbox_id is None else None
        sandbox_id = sandbox_id or slot or self.new_id()
        priority = 0
        if spec.lease_id is not None:
            try:
                self.leases.admit(spec.lease_id, sandbox_id, spec.memory_mib)
            except BarchanError:
                self.warm.unused(spec.backend, sandbox_id, is_known=False)
                raise
            priority = self.leases.get(spec.lease_id).terms.priority
        live = Live(sandbox_id, self.leases.labelled(spec, spec.lease_id), template, time.time())
        if spec.create_id is not None:
            self.by_create[spec.create_id] = live
        live.maker = self.tasks.spawn(self._make(live, priority, start or self.choosing.start_plain))
        return live

    async def _make(self, live: Live, priority: int, start: Start) -> None:
        began = time.monotonic()
        self.creates_total += 1
        try:
            await self.holds.hold(live.sandbox_id, live.template)
            running = len(self.live) - self.tiers.stored  # as it is when it asks for its place
            async with self.admission.slot(running - self.admission.starting, priority, live.spec.memory_mib):
                if live.spec.lease_id is not None:
                    self.leases.started(live.spec.lease_id, live.sandbox_id)
                self.live[live.sandbox_id] = live
                backend = await self.backend(live.spec.backend)
                backend.capabilities.check(live.spec)
                self.journal.begin(live.sandbox_id, live.spec, live.template, live.rest.own_layers)
                live.equip(await start(backend, live), is_new=True)
                await self.finish_boot(live)
            await set_up(self, live)
            live.create_ms = (time.monotonic() - began) * 1e3
        except BaseException as error:
            failure = live.failure(error)
            self.create_failures_total += 1
            if live.is_equipped:
                await asyncio.shield(self.remove_quietly(live))
            is_wanted = isinstance(failure, CallerError | CapacityError)
            what = failure.code if isinstance(failure, BlobUnavailable) else "create"
            self.journal.end(live.sandbox_id, "stopped" if is_wanted else "lost", f"{what}: {failure}")
            self._forget(live)
            if not live.booted.done():
                live.booted.set_exception(failure)
                live.booted.exception()
            if not isinstance(error, BarchanError | OSError):
                raise
            return
        live.booted.set_result(None)

    async def finish_boot(self, live: Live, awake_s: float | None = None) -> None:
        """What every sandbox needs once its init answers: network, shell, and an eye on its end.

        Args:
            awake_s: For how long it has been awake; None: since it was asked for.
        """
        self.watch(live)
        live.network = await Network.open(live.spec, live.handle, live.files, live.denied)
        live.defaults.shell = await self.shells.of(live)
        if live.unavailable is not None:
            raise live.unavailable
        live.phase = next_phase("booting", Fact.INIT_UP)
        self.arm(live, time.time() - live.created_unix_s if awake_s is None else awake_s)

    def arm(self, live: Live, awake_s: float) -> None:
        """Be there when its life is over, of which it has had `awake_s`."""
        if live.spec.ttl_s is not None:
            live.expiry = live.clock.call_later(live.spec.ttl_s - awake_s, self.expire, live, "ttl")

    def watch(self, live: Live) -> None:
        """Hear of its init's end, and of a program's that the host could not bear."""
        live.handle.ended.add_done_callback(partial(self._init_ended, live, live.handle))
        live.processes.evicted = partial(self.lose, live, f"evicted: {HOST_FULL}")

    def lose(self, live: Live, cause: str) -> BarchanError:
        """End one that can't go on: no fault of the guest's. What it had is lost, and says so, rather than going on
        without a part; returns what whoever asks is told.
        """
        if live.ending is None:
            self._ended(live, Fact.INIT_DIED, cause)
            live.handle.guest.guest_gone(self._why_not(live.sandbox_id))
        return self._why_not(live.sandbox_id)

    # finding

    def get(self, sandbox_id: str) -> Live:
        """A sandbox that can be used, if need be after a wake (`tiers.awake`).

        Raises:
            NotFound: Unknown here. SandboxExpired, SandboxLost: It ended; the message says why.
        """
        live = self.live.get(sandbox_id)
        if live is not None and live.is_here and live.ending is None:
            live.last_used = self.last_used = asyncio.get_running_loop().time()
            return live
        raise self._why_not(sandbox_id)

    def _why_not(self, sandbox_id: str) -> BarchanError:
        if sandbox_id in self.lost:
            return self.lost[sandbox_id]
        row = self.journal.find(sandbox_id)
        if row is None:
            return away.unknown(self, sandbox_id)
        return row.error()

    def info(self, sandbox_id: str) -> SandboxInfo:
        """A live sandbox, or one that ended within the last hour."""
        live = self.live.get(sandbox_id)
        if live is not None and live.phase not in ("stopped", "lost"):
            return live.info(self.node_id)
        row = self.journal.find(sandbox_id)
        if row is None:
            raise away.unknown(self, sandbox_id)
        return row.info(self.node_id)

    def matching(self, labels: dict[str, str], create_id: str | None) -> list[Live]:
        candidates: Iterable[Live] = self.live.values()
        if create_id is not None:
            found = self.by_create.get(create_id)
            candidates = [found] if found is not None else []
        return [live for live in candidates if labels.items() <= live.spec.labels.items()]

    # ending

    async def end(self, live: Live, cause: str) -> None:
        """End a sandbox; returns when nothing of it is left. Repeating waits for the same end."""
        await asyncio.shield(self._begin_end(live, cause))

    def _begin_end(self, live: Live, cause: str) -> "asyncio.Task[None]":
        if live.ending is None:
            if live.maker is None or live.maker.done():
                self._record_end(live, cause)  # before anybody can ask why it is not there
            live.ending = self.tasks.spawn(self._end(live, cause))
        return live.ending

    def _record_end(self, live: Live, cause: str) -> None:
        if live.sandbox_id in self.live and live.phase not in ("stopped", "lost"):
            live.phase = next_phase(live.phase, Fact.ENDED)
            self.journal.end(live.sandbox_id, live.phase, cause, live.create_ms)

    async def _end(self, live: Live, cause: str) -> None:
        if live.maker is not None and not live.maker.done():
            live.maker.cancel()
            await asyncio.gather(live.maker, return_exceptions=True)
            if not live.booted.done():  # it had not even begun
                live.booted.set_exception(SandboxExpired("the create was cancelled"))
                live.booted.exception()
                self._forget(live)
        if live.sandbox_id in self.live:
            self._record_end(live, cause)
            live.rest.wanted.set()  # whoever moves it turns round
            async with live.rest.turn:
                await self._remove(live)

    async def _remove(self, live: Live) -> None:
        try:
            if live.is_equipped:
                live.handle.guest.guest_gone(self._why_not(live.sandbox_id))
                await live.processes.close()
                if live.network is not None:
                    await live.network.close()
                if live.rest.stored is None:
                    await live.handle.destroy()
        finally:
            try:
                await hibernate.remove(self, live)
            finally:
                self._forget(live)

    def _init_ended(self, live: Live, handle: Handle, ended: "asyncio.Future[Ended]") -> None:
        """The guest died on its own: that is a lost sandbox, and its remains go at once."""
        if live.handle is handle and live.phase != "hibernated" and live.ending is None and not ended.cancelled():
            self._ended(live, Fact.INIT_DIED, f"init_died: {ended.result().words}")

    def _ended(self, live: Live, fact: Fact, cause: str) -> None:
        if live.is_up:
            live.phase = next_phase(live.phase, fact)
        self.journal.end(live.sandbox_id, "lost", cause, live.create_ms)
        if live.ending is None:
            live.ending = self.tasks.spawn(self.remove_quietly(live))

    async def remove_quietly(self, live: Live) -> None:
        live.rest.wanted.set()
        try:
            async with live.rest.turn:
                await self._remove(live)
        except (BarchanError, OSError) as error:  # mostly that its supervisor is gone, and everything with it
            self._forget(live)
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"removing {live.sandbox_id} failed", "exception": error}
            )

    def _forget(self, live: Live) -> None:
        was_begun = self.live.pop(live.sandbox_id, None) is not None
        self.warm.unused(live.spec.backend, live.sandbox_id, is_known=was_begun)
        self.holds.release(live.sandbox_id)
        live.let_go()
        self.leases.leave(live.spec.lease_id, live.sandbox_id)
        if live.spec.create_id is not None and self.by_create.get(live.spec.create_id) is live:
            del self.by_create[live.spec.create_id]
        self.touch()

    def expire(self, live: Live, cause: str) -> None:
        if live.sandbox_id in self.live:
            self._begin_end(live, cause)

    def _lease_over(self, lease_id: str, cause: Over) -> None:
        for live in [live for live in self.live.values() if live.spec.lease_id == lease_id]:
            self.expire(live, cause)

    async def end_lease(self, lease_id: str) -> int:
        """End a lease and its sandboxes now.

        Raises:
            NotFound: There is none. Preempted: It was put aside: it is not its holder's any more.
        """
        self.leases.check(lease_id)
        self.leases.get(lease_id)
        self.leases.end(lease_id)
        held = [live for live in self.live.values() if live.spec.lease_id == lease_id]
        await asyncio.gather(*(self.end(live, "lease_ended") for live in held))
        return len(held)

    # housekeeping

    async def unmount(self, digests: Iterable[str] | None = None) -> None:
        """Let go of those layers (None: of all) that the image store has no more; in a minute again, if that fails."""
        for backend in list(self._backends.values()):
            try:
                await backend.unmount(digests)
            except BarchanError as error:
                asyncio.get_running_loop().call_exception_handler({"message": "unmounting failed", "exception": error})

    def touch(self) -> None:
        self.last_used = asyncio.get_running_loop().time()
