"""Moves sandboxes between tiers of waiting, and wakes them: one move of a sandbox at a time.

Whoever goes down looks, wherever it can still turn round, whether somebody waits for the sandbox. The journal is
written before the step that can't be taken back: a killed node leaves sandboxes that run, that stand still as noted, or
that are wholly on disk.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from barchan.core.density import step
from barchan.core.hibernation import Waits, is_still_out
from barchan.core.lifecycle import Fact, next_phase
from barchan.errors import (
    BackendError,
    BarchanError,
    CallerError,
    CapacityError,
    Conflict,
    GuestError,
    NotSnapshotable,
    RequirementMissing,
    SnapshotIncompatible,
)
from barchan.model.tiers import Tier, TierChange
from barchan.node import hibernate
from barchan.node.density import pressure
from barchan.node.live import Live
from barchan.node.turns import FIRST, LAST, Queue, Turns

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

DEPTH: dict[Tier, int] = {"running": 0, "paused": 1, "paged_out": 2, "hibernated": 3}
LEASES_KEPT_MAX = 1024
MEMORY_WAIT_S = 15.0  # of a wake, for memory
MEMORY_LOOK_S = 0.25
STORE_AGAIN_S = 60.0
TURNED_ROUND = "a request came for it"
ENDED = "it has ended"


class Tiers:
    """The tiers of one node's sandboxes."""

    def __init__(self, sandboxes: "Sandboxes") -> None:
        self._sandboxes = sandboxes
        self.turns = Turns()
        self.stored = 0  # sandboxes that are on disk, and take nothing else
        self._waits: dict[str, Waits] = {}

    # staying awake

    @asynccontextmanager
    async def busy(self, live: Live, *, attached: bool = False) -> AsyncIterator[None]:
        """Inside, the sandbox is awake, unless somebody asks for it to be put to sleep.

        Args:
            attached: Whoever is inside only listens: it may go to sleep while its programs wait for their client.

        Raises:
            SandboxExpired, SandboxLost: It ended meanwhile. CapacityError, SnapshotIncompatible, ...: No wake.
        """
        self._begin(live, attached)
        try:
            await self.awake(live)
            yield
        finally:
            self._done(live, attached)

    def _begin(self, live: Live, attached: bool) -> None:
        now = asyncio.get_running_loop().time()
        if live.rest.waiting_since is not None and not attached:
            self.waits(live).observe(now - live.rest.waiting_since)
            live.rest.waiting_since = None
        if attached:
            live.attached += 1
        else:
            live.requests += 1
        live.last_used = self._sandboxes.last_used = now

    def _done(self, live: Live, attached: bool) -> None:
        if attached:
            live.attached -= 1
            return
        live.requests -= 1
        live.last_used = asyncio.get_running_loop().time()
        if not live.requests:
            live.rest.waiting_since = live.last_used

    def waits(self, live: Live) -> Waits:
        """How long the sandboxes of the same run have waited before; those without a lease have theirs together."""
        key = live.spec.lease_id or ""
        waits = self._waits.pop(key, None) or Waits()
        self._waits[key] = waits
        while len(self._waits) > LEASES_KEPT_MAX:
            del self._waits[next(iter(self._waits))]
        return waits

    async def until_woken(self, live: Live) -> None:
        """Return when it is awake because of somebody else, or has ended."""
        while live.phase in ("paused", "hibernated") and live.ending is None:
            await live.rest.woken.wait()

    async def awake(self, live: Live) -> None:
        """Return when it is awake; all who wait share one wake.

        Raises:
            As `busy`.
        """
        while live.phase != "ready" or live.rest.is_descending:
            if live.ending is not None or not live.is_here:
                self._sandboxes.get(live.sandbox_id)  # says how it ended
            self._sandboxes.leases.check(live.spec.lease_id)
            if live.rest.waking is None:
                live.rest.wanted.set()
                live.rest.waking = self._sandboxes.tasks.spawn(self._wake(live))
            await asyncio.shield(live.rest.waking)

    async def _wake(self, live: Live) -> None:
        rest = live.rest
        try:
            async with rest.turn:
                if live.ending is not None:
                    return
                if live.phase == "hibernated":
                    async with self.turns.wakes.turn(lambda: FIRST if live.requests else LAST):
                        await self._wait_for_memory(live)
                        await hibernate.restore(self._sandboxes, live)
                elif live.phase == "paused":
                    self._sandboxes.journal.wake(live.sandbox_id)
                    await live.handle.thaw(asyncio.get_running_loop().time() - rest.frozen_at)
                    self.went_up(live)
        except (OSError, CallerError, GuestError) as error:
            raise _not_woken(live, error) from error
        finally:
            rest.waking = None
            rest.wanted.clear()

    async def _wait_for_memory(self, live: Live) -> None:
        """Nothing comes back from disk while the host has next to none left; meanwhile the policy frees some."""
        loop = asyncio.get_running_loop()
        reserve_mib, until = self._sandboxes.admission.limits.memory_reserve_mib, loop.time() + MEMORY_WAIT_S
        hibernate.check_lives(self._sandboxes, live)
        while step(pressure(), reserve_mib) == "evict":
            hibernate.check_lives(self._sandboxes, live)
            if loop.time() > until:
                raise CapacityError("the host has no memory for what comes back from disk", retry_after_ms=2000)
            await asyncio.sleep(MEMORY_LOOK_S)

    def went_up(self, live: Live, missed_s: float | None = None) -> None:
        """It runs again: its clocks do, too (`missed_s`: `Clock.go_on`)."""
        if live.ending is not None:
            return
        live.phase = next_phase(live.phase, Fact.THAWED)
        live.rest.tier = "running"
        live.rest.freed_bytes, live.rest.is_asked = 0, False
        live.rest.refused, live.rest.can_be_stored = "", True
        live.rest.look_at, live.rest.cpu_s = 0.0, -1.0  # one that was on disk counts its CPU anew
        live.clock.go_on(missed_s)
        live.rest.woken.set()
        self._sandboxes.leases.go_on(live.spec.lease_id, live.sandbox_id, live.spec.memory_mib)

    # going down

    async def to(self, live: Live, tier: Tier, *, is_asked: bool = True) -> None:
        """To a tier, from wherever it is above; `running` wakes it.

        Args:
            is_asked: Somebody wants that: also while requests are served, which wait then; and its idle time-out
                stands still.

        Raises:
            Conflict: A request came, and it is awake again; or it is being served.
            NotSnapshotable: It can't be hibernated for what it holds, and stays paused.
            CapacityError: It does not stop, or there is no room on the disk; it is in the tier above.
            SandboxExpired, SandboxLost: It has ended.
        """
        if tier == "running":
            await self.awake(live)
            return
        if live.rest.tier == "running":
            async with self.turns.pauses.turn(lambda: FIRST if is_asked else LAST):
                await self._go_down(live, "paused", is_asked, lambda: self._pause(live, is_asked))
        if tier == "paged_out":
            await self._deeper(live, tier, is_asked, self.turns.page_outs, partial(self._page_out, is_asked))
        elif tier == "hibernated":
            await self._deeper(live, tier, is_asked, self.turns.stores, self._hibernate)

    async def change(self, live: Live, tier: Tier, *, is_asked: bool = True) -> TierChange:
        """As `to`, but a failure is told, not raised."""
        began, refused = time.monotonic(), ""
        try:
            await self.to(live, tier, is_asked=is_asked)
        except (BarchanError, OSError) as error:
            refused = str(error)
        if not refused and DEPTH[live.rest.tier] < DEPTH[tier]:
            refused = live.rest.refused
        return TierChange(
            sandbox_id=live.sandbox_id,
            tier=live.rest.tier,
            freed_bytes=live.rest.freed_bytes,
            refused=refused,
            took_ms=(time.monotonic() - began) * 1e3,
        )

    async def _go_down(self, live: Live, tier: Tier, is_asked: bool, down: Callable[[], Awaitable[None]]) -> None:
        async with live.rest.turn:
            self._check_wanted(live)
            if is_asked and not live.rest.is_asked:
                if live.phase != "ready":
                    self._sandboxes.journal.asked(live.sandbox_id)
                live.rest.is_asked = True
            if DEPTH[live.rest.tier] >= DEPTH[tier]:
                return
            live.rest.is_descending = True
            try:
                await down()
            finally:
                live.rest.is_descending = False
                if live.phase == "ready":
                    live.rest.is_asked = False

    async def _deeper(
        self, live: Live, tier: Tier, is_asked: bool, queue: Queue, down: Callable[[Live], Awaitable[None]]
    ) -> None:
        """From paused on. Whoever waits for a place in the queue holds no turn, and can be woken at once."""

        async def from_paused() -> None:
            if live.phase == "ready":
                raise Conflict(f"it stays awake: {TURNED_ROUND}")
            await down(live)

        async with queue.turn(lambda: FIRST if is_asked else LAST):
            await self._go_down(live, tier, is_asked, from_paused)

    async def _pause(self, live: Live, is_asked: bool) -> None:
        if live.requests and not is_asked:
            raise Conflict("it stays awake: a request is being served")
        if not is_asked and live.rest.judged_at not in (None, live.last_used):
            raise Conflict(f"it stays awake: {TURNED_ROUND}")
        async with live.handle.guest.starts.none():
            await live.handle.freeze()
        live.rest.frozen_at = asyncio.get_running_loop().time()
        if live.rest.wanted.is_set():
            await live.handle.thaw(0.0)
        self._check_wanted(live)
        try:
            self._sandboxes.journal.pause(live.sandbox_id, is_asked=is_asked)
        except BarchanError:  # what is not noted has not happened
            await live.handle.thaw(asyncio.get_running_loop().time() - live.rest.frozen_at)
            raise
        live.clock.stop()
        live.rest.woken.clear()
        live.phase = next_phase(live.phase, Fact.FROZEN)
        live.rest.tier = "paused"
        live.rest.memory_bytes = live.handle.stats().memory_bytes
        self._sandboxes.leases.stand_still(live.spec.lease_id, live.sandbox_id)

    async def _page_out(self, is_asked: bool, live: Live) -> None:
        rest = live.rest
        if not is_asked and self._is_still_out(live):
            rest.tier = "paged_out"
            return
        came_back = max(0, rest.memory_bytes - rest.left_bytes)
        freed_bytes = await live.handle.page_out()
        rest.freed_bytes += freed_bytes
        rest.memory_bytes = rest.left_bytes = live.handle.stats().memory_bytes
        rest.out_bytes = max(0, rest.out_bytes - came_back) + freed_bytes
        if pressure().swap_free_mib:
            rest.tier = "paged_out"
        else:
            rest.refused = "this host has no swap, so only its page cache was given away"

    def _is_still_out(self, live: Live) -> bool:
        """Most of it, and the host is not short of memory."""
        rest, host = live.rest, pressure()
        is_short = step(host, self._sandboxes.admission.limits.memory_reserve_mib) != "none" or not host.swap_free_mib
        return not is_short and is_still_out(rest.memory_bytes, rest.left_bytes, rest.out_bytes)

    async def _hibernate(self, live: Live) -> None:
        try:
            await hibernate.store(self._sandboxes, live, lambda: self._check_wanted(live))
        except (NotSnapshotable, RequirementMissing) as error:
            live.rest.refused, live.rest.can_be_stored = str(error), False
            raise type(error)(f"it stays paused: {error}", **error.details) from error
        except (BackendError, CapacityError) as error:
            self._store_later(live, str(error))
            raise
        except OSError as error:
            self._store_later(live, f"the disk takes no more: {error}")
            raise CapacityError(f"it stays paused: {live.rest.refused}", retry_after_ms=1000) from error

    def _store_later(self, live: Live, refused: str) -> None:
        """The policy does not try it again at once: each time takes a whole dump."""
        live.rest.refused = refused
        live.rest.look_at = asyncio.get_running_loop().time() + STORE_AGAIN_S

    def _check_wanted(self, live: Live) -> None:
        """Raise where nobody should go on going down."""
        if live.ending is not None or not live.is_here:
            self._sandboxes.get(live.sandbox_id)
        if live.rest.wanted.is_set():
            raise Conflict(f"it stays awake: {TURNED_ROUND}")


def _not_woken(live: Live, error: Exception) -> BarchanError:
    """A wake that fails is about the sandbox as a whole: nobody may take it for a failure of what was asked for."""
    if isinstance(error, SnapshotIncompatible):
        return SnapshotIncompatible(str(error), **error.details | {"sandbox_id": live.sandbox_id})
    if isinstance(error, BarchanError) and "sandbox_id" in error.details:
        return error
    return BackendError(f"the sandbox can't be woken: {error}", sandbox_id=live.sandbox_id)
