"""Carries a plan out beside a run: faults at their moments, and to the rollouts that are chosen."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from barchan.errors import BarchanError
from barchan.model.sandbox import SandboxInfo
from barchan.testing.faults.actions import AT_MOMENTS, hit
from barchan.testing.faults.events import EventFile
from barchan.testing.faults.ground import Ground
from barchan.testing.faults.plan import Choice, Fault, Plan

LOOK_EVERY_S = 0.01
LOOK_S_MAX = 2.0
COUNT_EVERY_S = 0.05
Told = Callable[[str], None]


class Injector:
    """Does a plan's faults to one ground.

    Args:
        kill_client: Kills the process that drives the run, and starts it again after so many seconds.
        count_over: How many rollouts are over.
        told: Gets each fault in words as it is over.
    """

    def __init__(
        self,
        ground: Ground,
        plan: Plan,
        events: EventFile,
        kill_client: Callable[[float], Awaitable[str]],
        count_over: Callable[[], int],
        told: Told,
    ) -> None:
        self._ground = ground
        self._plan = plan
        self._events = events
        self._kill_client = kill_client
        self._count_over = count_over
        self._told = told
        # A node that is killed can't be stopped, nor start on a full disk; a server does one thing at a time.
        self._turns = {name: asyncio.Lock() for name in ("node", "disk", "client", "store", "endpoint")}
        self._turns["disk"] = self._turns["node"]
        self._hits: Counter[tuple[int, str]] = Counter()
        self._seen: set[str] = set()

    async def run(self) -> None:
        """Until it is cancelled; every fault that is under way is undone then."""
        faults = self._plan.faults
        async with asyncio.TaskGroup() as group:
            for index, fault in enumerate(faults):
                if not fault.is_of_rollouts:
                    group.create_task(self._at_moments(index, fault))
            if any(fault.is_of_rollouts for fault in faults):
                group.create_task(self._watch(group))

    async def _at_moments(self, index: int, fault: Fault) -> None:
        name = fault.kind.partition("-")[0]
        async for _ in self._times(index, fault):
            if name in self._turns:
                async with self._turns[name]:
                    await self._do(index, fault)
            else:
                await self._do(index, fault)

    async def _times(self, index: int, fault: Fault) -> AsyncIterator[None]:
        """Each time that it is to be done."""
        if fault.each is not None:
            for count in self._plan.counts(index):
                while True:
                    if await asyncio.to_thread(self._count_over) >= count:
                        break
                    await asyncio.sleep(COUNT_EVERY_S)
                yield
            return
        started = time.monotonic()
        for moment_s in self._plan.moments(index):
            await asyncio.sleep(max(0.0, started + moment_s - time.monotonic()))
            yield

    async def _do(self, index: int, fault: Fault) -> None:
        began, what, is_over = time.time(), "cut short", False
        try:
            if fault.kind == "client-kill":
                what = await self._kill_client(fault.for_s)
            else:
                what = await AT_MOMENTS[fault.kind](self._ground, fault)
            is_over = True
        finally:
            self._keep(index, fault, began, what=what or "nothing was there", reached=is_over and bool(what))

    async def _watch(self, group: asyncio.TaskGroup) -> None:
        """See each sandbox soon after it is made, by asking the node as anyone may."""
        async with self._ground.watching() as client:
            while True:
                with suppress(BarchanError, TimeoutError):  # it is killed, or stands still: by another fault
                    async with asyncio.timeout(LOOK_S_MAX):
                        found = await client.list()
                    for info in found:
                        self._meet(group, info)
                await asyncio.sleep(LOOK_EVERY_S)

    def _meet(self, group: asyncio.TaskGroup, info: SandboxInfo) -> None:
        labels = info.spec.labels
        rollout_id = labels.get("rollout", "")
        if info.sandbox_id in self._seen or not rollout_id:
            return
        self._seen.add(info.sandbox_id)
        for index, fault in enumerate(self._plan.faults):
            if not fault.is_of_rollouts or labels.get("role") != fault.role:
                continue
            choice = self._plan.chosen(index, rollout_id.removeprefix(labels.get("run", "")))
            if self._hits[index, rollout_id] < choice.times:
                self._hits[index, rollout_id] += 1
                group.create_task(self._hit(index, info.sandbox_id, rollout_id, choice))

    async def _hit(self, index: int, sandbox_id: str, rollout_id: str, choice: Choice) -> None:
        fault, began = self._plan.faults[index], time.time()
        what = ""
        try:
            what = await hit(self._ground, fault, sandbox_id, choice)
        except asyncio.CancelledError:
            what = "cut short"
            raise
        finally:
            if what:
                self._keep(index, fault, began, what=what, rollouts=(rollout_id,))
            else:  # it had ended before
                self._hits[index, rollout_id] -= 1

    def _keep(
        self,
        index: int,
        fault: Fault,
        began_unix_s: float,
        *,
        what: str,
        rollouts: tuple[str, ...] = (),
        reached: bool = True,
    ) -> None:
        self._events.add(index, fault.kind, began_unix_s, rollouts=rollouts, what=what, reached=reached)
        self._told(f"{fault.kind}: {what}" + (f" of rollout {rollouts[0]}" if rollouts else ""))
