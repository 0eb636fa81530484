"""Moves sandboxes between tiers of waiting, and wakes them: one move of a sandbox at a time.

Whoever goes down looks, wherever it can still turn round, whether somebody waits for the sandbox. The journal is
written before the step that can't be taken back: a killed node leaves sandboxes that run, that stand still as noted, or
that are wholly on disk.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from barchan.core.hibernation import Waits
from barchan.core.lifecycle import Fact, next_phase
from barchan.errors import BarchanError, Conflict, NotSnapshotable
from barchan.model.tiers import Tier, TierChange
from barchan.node import hibernate
from barchan.node.live import Live
from barchan.node.turns import FIRST, LAST, Queue, Turns

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

DEPTH: dict[Tier, int] = {"running": 0, "paused": 1, "paged_out": 2, "hibernated": 3}
LEASES_KEPT_MAX = 1024
TURNED_ROUND = "a request came"
ENDED = "it has ended"


class Refused(Exception):
    """A sandbox stays where it is, for this reason."""


class Tiers:
    """The tiers of one node's sandboxes."""

    def __init__(self, sandboxes: "Sandboxes") -> None:
        self._sandboxes = sandboxes
        self.turns = Turns()
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
        else:
            live.requests -= 1
        live.last_used = live.rest.quiet_since = asyncio.get_running_loop().time()
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

    async def awake(self, live: Live) -> None:
        """Return when it is awake; all who wait share one wake.

        Raises:
            As `busy`.
        """
        while live.phase != "ready" or live.rest.is_descending:
            if live.ending is not None or not live.is_here:
                self._sandboxes.get(live.sandbox_id)  # says how it ended
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
                    async with self.turns.wakes.turn(FIRST if live.requests else LAST):
                        await hibernate.restore(self._sandboxes, live)
                elif live.phase == "paused":
                    await self._thaw(live)
        finally:
            rest.waking = None
            rest.wanted.clear()

    async def _thaw(self, live: Live) -> None:
        self._sandboxes.journal.wake(live.sandbox_id)
        await live.handle.thaw(asyncio.get_running_loop().time() - live.rest.frozen_at)
        if live.ending is None:
            self.went_up(live)

    def went_up(self, live: Live) -> None:
        """It runs again: its clocks do, too."""
        live.phase = next_phase(live.phase, Fact.THAWED)
        live.rest.tier = "running"
        live.rest.freed_bytes, live.rest.refused, live.rest.is_asked = 0, "", False
        live.rest.look_at = 0.0
        live.clock.go_on()
        self._sandboxes.leases.go_on(live.spec.lease_id, live.sandbox_id)

    # going down

    async def resume(self, live: Live) -> TierChange:
        """Wake it."""
        return await self._change(live, "running", lambda: self.awake(live))

    async def pause(self, live: Live, *, is_asked: bool = True) -> TierChange:
        """Stop its programs, and its clocks with them; memory stays.

        Args:
            is_asked: Also while requests are served, which wait then; and its idle time-out stands still.
        """
        return await self._go_down(live, "paused", is_asked, lambda: self._pause(live, is_asked))

    async def page_out(self, live: Live, *, is_asked: bool = True) -> TierChange:
        """Pause it, and give its cold memory away: to swap; without swap, only what the page cache holds for it."""

        async def down() -> None:
            live.rest.freed_bytes += await live.handle.page_out()
            live.rest.tier = "paged_out"

        return await self._deeper(live, "paged_out", is_asked, self.turns.page_outs, down)

    async def hibernate(self, live: Live, *, is_asked: bool = True) -> TierChange:
        """Pause it, put all of it on disk, and free what it takes here. One that can't be stored stays paused."""

        async def down() -> None:
            await hibernate.store(self._sandboxes, live, lambda: self._check_wanted(live))

        return await self._deeper(live, "hibernated", is_asked, self.turns.stores, down)

    async def _deeper(
        self, live: Live, tier: Tier, is_asked: bool, queue: Queue, down: Callable[[], Awaitable[None]]
    ) -> TierChange:
        """Pause first, and take a place in the queue after that: whoever waits in it can be woken at once."""

        async def from_paused() -> None:
            if live.phase == "ready":
                raise Refused(TURNED_ROUND)
            self._check_wanted(live)
            await down()

        paused = await self.pause(live, is_asked=is_asked)
        if paused.refused or DEPTH[live.rest.tier] >= DEPTH[tier]:
            return paused
        async with queue.turn():
            return await self._go_down(live, tier, is_asked, from_paused)

    def to(self, live: Live, tier: Tier) -> Awaitable[TierChange]:
        """To the tier that somebody asked for."""
        if tier == "running":
            return self.resume(live)
        if tier == "paused":
            return self.pause(live)
        return self.page_out(live) if tier == "paged_out" else self.hibernate(live)

    async def _go_down(self, live: Live, tier: Tier, is_asked: bool, down: Callable[[], Awaitable[None]]) -> TierChange:
        async def in_turn() -> None:
            async with live.rest.turn:
                if live.ending is not None or not live.is_here:
                    raise Refused(ENDED)
                live.rest.is_asked |= is_asked
                if DEPTH[live.rest.tier] >= DEPTH[tier]:
                    return
                live.rest.is_descending = True
                try:
                    await down()
                except NotSnapshotable as error:
                    live.rest.refused = str(error)
                    raise
                finally:
                    live.rest.is_descending = False

        return await self._change(live, tier, in_turn)

    async def _change(self, live: Live, tier: Tier, change: Callable[[], Awaitable[None]]) -> TierChange:
        began, refused = time.monotonic(), ""
        try:
            await change()
        except Refused as error:
            refused = str(error)
        except NotSnapshotable as error:
            refused = f"stays paused: {error}"
        except (BarchanError, OSError) as error:
            refused = str(error)
        return TierChange(
            sandbox_id=live.sandbox_id,
            tier=live.rest.tier,
            freed_bytes=live.rest.freed_bytes,
            refused=refused,
            took_ms=(time.monotonic() - began) * 1e3,
        )

    def _check_wanted(self, live: Live) -> None:
        if live.ending is not None:
            raise Refused(ENDED)
        if live.rest.wanted.is_set():
            raise Refused(TURNED_ROUND)

    async def _pause(self, live: Live, is_asked: bool) -> None:
        if live.phase != "ready":
            return
        self._check_wanted(live)
        if live.requests and not is_asked:
            raise Refused("a request is being served")
        await live.handle.freeze()
        live.rest.frozen_at = asyncio.get_running_loop().time()
        try:
            self._check_wanted(live)
        except Refused:
            await live.handle.thaw(0.0)
            raise
        live.clock.stop()
        live.phase = next_phase(live.phase, Fact.FROZEN)
        live.rest.tier = "paused"
        live.rest.memory_bytes = live.handle.stats().memory_bytes
        self._sandboxes.leases.stand_still(live.spec.lease_id, live.sandbox_id)
        self._sandboxes.journal.pause(live.sandbox_id, is_asked=is_asked)

    def check_here(self, live: Live) -> None:
        """Raise what tells whoever asks for it that it has ended."""
        if live.ending is not None or not live.is_here:
            self._sandboxes.get(live.sandbox_id)
            raise Conflict(f"sandbox {live.sandbox_id} is {live.phase}")
