"""Carries out what `core.hibernation` decides: looks at few sandboxes at a time, and waits for none of their moves."""

import asyncio
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from barchan.core.density import Step, step
from barchan.core.hibernation import PAUSE_AFTER_S, QUIET_S, Facts, Host, Move, decide
from barchan.errors import BarchanError
from barchan.node.density import pressure
from barchan.node.live import Live

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

TICK_S = 0.25
SEEN_MAX = 2000  # in one tick, whether they are worth a look: 1 us each
SEEN_AT_ONCE = 250  # between two turns of the event loop
LOOKS_MAX = 200  # in one tick: some 100 us each of one without programs
AT_ONCE = 5  # between two turns of the event loop
MOVES_MAX = 64  # under way at once, of those that the policy has begun
LOOK_S_MAX = 10.0  # between two looks at the same one
LOOK_SHORT_S = 1.0  # between two looks at one that sleeps, while memory is short
QUIET_CPU_S = 0.01  # a program that used less since it was last seen to use more is quiet
DISK_RESERVE_BYTES = 2 << 30


class Policy:
    """The automatic tiers of one node."""

    def __init__(self, sandboxes: "Sandboxes") -> None:
        self._sandboxes = sandboxes
        self._moving: set[str] = set()
        self._at = 0  # where the next tick begins

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self._tick()
            except (BarchanError, OSError) as error:  # of a group that went while it was looked at
                asyncio.get_running_loop().call_exception_handler({"message": "the tiers' policy", "exception": error})

    async def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        host = self._host()
        candidates = []
        for count, live in enumerate(self._next()):
            if count % SEEN_AT_ONCE == SEEN_AT_ONCE - 1:
                await asyncio.sleep(0)
            if self._is_due(live, now):
                candidates.append(live)
        candidates.sort(key=lambda live: live.rest.look_at)
        facts = []
        for count, live in enumerate(candidates[:LOOKS_MAX]):
            if count % AT_ONCE == 0:
                await asyncio.sleep(0)
            if self._is_due(live, now):
                facts.append(self._facts(live, now, host.step))
        for move in decide(facts, host)[: MOVES_MAX - len(self._moving)]:
            self._moving.add(move.sandbox_id)
            self._sandboxes.tasks.spawn(self._move(move))

    def _next(self) -> Sequence[Live]:
        """Those whose turn it is: all, or where there are very many, some in each tick."""
        everybody = list(self._sandboxes.live.values())
        at = self._at if self._at < len(everybody) else 0
        self._at = at + SEEN_MAX
        return everybody[at : self._at]

    def _host(self) -> Host:
        reading = pressure()
        sandboxes = self._sandboxes
        return Host(
            step=step(reading, sandboxes.admission.limits.memory_reserve_mib),
            has_swap=reading.swap_free_mib > 0,
            has_disk=shutil.disk_usage(sandboxes.state_dir).free > DISK_RESERVE_BYTES,
        )

    def _is_due(self, live: Live, now: float) -> bool:
        """Worth a look, by what is known without asking the kernel; one that won't be for a while says until when."""
        rest, waiting = live.rest, live.spec.waiting
        if rest.look_at > now:
            return False
        if live.phase == "hibernated" or not waiting.pause:
            rest.look_at = now + LOOK_S_MAX
            return False
        if live.ending is not None or live.requests or rest.waking is not None or not live.is_up:
            return False
        due_at = live.last_used + min(PAUSE_AFTER_S, waiting.after_s or PAUSE_AFTER_S)
        if due_at > now:
            rest.look_at = due_at
        return due_at <= now and live.sandbox_id not in self._moving

    def _facts(self, live: Live, now: float, step_now: Step) -> Facts:
        rest, waited_s = live.rest, now - live.last_used
        is_busy, has_programs, memory_bytes = False, True, rest.memory_bytes
        rest.judged_at = live.last_used
        if live.phase == "ready":
            is_busy, has_programs = self._programs(live, now)
            memory_bytes = live.handle.stats().memory_bytes
            rest.look_at = now + min(LOOK_S_MAX, max(TICK_S, waited_s / 4))
        else:
            look_s = LOOK_S_MAX if step_now == "none" else LOOK_SHORT_S
            rest.look_at = now + min(look_s, live.spec.waiting.after_s or look_s)
        return Facts(
            sandbox_id=live.sandbox_id,
            tier=rest.tier,
            waiting=live.spec.waiting,
            is_busy=is_busy or bool(live.requests),
            has_programs=has_programs,
            waited_s=waited_s,
            memory_bytes=memory_bytes,
            remaining_s=self._sandboxes.tiers.waits(live).remaining_s(waited_s),
            can_hibernate=rest.can_be_stored and self._sandboxes.can_hibernate(live),
        )

    def _programs(self, live: Live, now: float) -> tuple[bool, bool]:
        """Whether they are at work for somebody, and whether there are any.

        Whoever waits for what they do has a request here, and they are not looked at. Programs that all wait for their
        input do nothing, whoever listens to them. Of others, those that nobody listens to, or that wait for what only a
        client can bring about, may be stopped once they have used no processor for a while.
        """
        rest, seen = live.rest, live.handle.activity()
        if not seen.has_programs:
            return False, False
        if seen.cpu_s > rest.cpu_s + QUIET_CPU_S:
            rest.cpu_s, rest.quiet_since = seen.cpu_s, now
        if seen.waits_for_client:
            return False, True
        is_heard = bool(live.attached) and not seen.waits_for_events
        quiet_since = live.last_used if seen.waits_for_events else max(rest.quiet_since, live.last_used)
        return is_heard or now - quiet_since < (live.spec.waiting.after_s or QUIET_S), True

    async def _move(self, move: Move) -> None:
        live = self._sandboxes.live.get(move.sandbox_id)
        try:
            if live is not None:
                await self._sandboxes.tiers.change(live, move.tier, is_asked=False)
        finally:
            self._moving.discard(move.sandbox_id)
