"""Puts the sandboxes of a lease aside: all of them stand still at once, then they go to disk in the policy's own pace.

Requests that are under way are told at once. What they had asked for goes on in the sandbox, once that runs again,
under the ids that their clients chose.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from barchan.errors import BarchanError, Preempted
from barchan.model.lease import PreemptRequest
from barchan.model.sandbox import SandboxSpec
from barchan.model.tiers import TierChange
from barchan.node.live import Live

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

FREEZE_TRIES_MAX = 20  # a wake that was under way, or a program that does not stop at once
FREEZE_AGAIN_S = 0.5


class Preempting:
    """Of one node."""

    def __init__(self, sandboxes: "Sandboxes") -> None:
        self._sandboxes = sandboxes
        self._serving: dict[str, set[asyncio.Task[Any]]] = {}
        self._told: dict[asyncio.Task[Any], Preempted] = {}

    @asynccontextmanager
    async def serving(self, live: Live) -> AsyncIterator[None]:
        """Inside, a request of the sandbox is served, by this task.

        Raises:
            Preempted: Its lease was put aside, before or meanwhile.
        """
        task = asyncio.current_task()
        assert task is not None
        self._sandboxes.leases.check(live.spec.lease_id)
        tasks = self._serving.setdefault(live.sandbox_id, set())
        tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            told = self._told.get(task)
            if told is None:
                raise
            task.uncancel()
            raise told from None
        finally:
            self._told.pop(task, None)
            tasks.discard(task)
            if not tasks and self._serving.get(live.sandbox_id) is tasks:
                del self._serving[live.sandbox_id]

    async def preempt(self, lease_id: str, asked: PreemptRequest) -> AsyncGenerator[TierChange, None]:
        """Put a lease aside; a record of each sandbox as it stands still, and one as it is on disk or stays paused,
        which is the only one of those that are on disk already.

        Ending the iteration ends nothing of it. Repeating does what is left to do.

        Raises:
            NotFound: There is no such lease.
        """
        leases = self._sandboxes.leases
        leases.preempt(lease_id, asked)
        chosen = self._of(lease_id)
        for live in chosen:
            for task in self._serving.get(live.sandbox_id, ()):
                if task not in self._told:
                    self._told[task] = leases.get(lease_id).info().dismissal()
                    task.cancel()
        done: asyncio.Queue[TierChange | None] = asyncio.Queue()
        for live in chosen:
            self._sandboxes.tasks.spawn(self._put_aside(live, lease_id, done))
        left = len(chosen)
        while left:
            change = await done.get()
            left -= change is None
            if change is not None:
                yield change

    def go_on(self) -> None:
        """What an earlier node had begun."""
        for lease_id in self._sandboxes.leases.preempted:
            for live in self._of(lease_id):
                self._sandboxes.tasks.spawn(self._put_aside(live, lease_id, asyncio.Queue()))

    def _of(self, lease_id: str) -> list[Live]:
        return [
            live for live in self._sandboxes.live.values() if live.spec.lease_id == lease_id and live.ending is None
        ]

    async def _put_aside(self, live: Live, lease_id: str, done: "asyncio.Queue[TierChange | None]") -> None:
        try:
            if live.phase == "booting":
                await asyncio.wait({live.booted})
            while True:
                change = await self._freeze(live, lease_id)
                is_left = live.ending is None and live.is_here  # else its create failed, or its client has ended it
                if is_left and change.tier != "hibernated":
                    done.put_nowait(change)
                if change.refused or not self._is_theirs(live, lease_id):
                    return
                change = await self._sandboxes.tiers.change(live, "hibernated", is_asked=False)
                if change.tier != "running" or not self._is_theirs(live, lease_id):  # else a wake came in between
                    done.put_nowait(change)
                    return
        finally:
            done.put_nowait(None)

    async def _freeze(self, live: Live, lease_id: str) -> TierChange:
        tries = 0
        while True:
            tries += 1
            if live.rest.waking is not None:  # it was asked for before the lease was put aside
                await asyncio.wait({live.rest.waking})
            change = await self._sandboxes.tiers.change(live, "paused")
            if not change.refused or tries == FREEZE_TRIES_MAX or not self._is_theirs(live, lease_id):
                return change
            await asyncio.sleep(FREEZE_AGAIN_S)

    def _is_theirs(self, live: Live, lease_id: str) -> bool:
        """Whether it lives, and nobody has gone on with it meanwhile."""
        return live.ending is None and live.is_here and live.spec.lease_id == lease_id


def hand_over(sandboxes: "Sandboxes", live: Live, spec: SandboxSpec) -> None:
    """A sandbox whose lease nobody holds any more goes over to the lease of whoever asks for it again: its creator was
    killed, and was started again before the grace time was over, or was preempted. So does one of a run to whoever of
    the same run asks for it: that one goes on with it, though its creator may live.

    Raises:
        CapacityError, QuotaExceeded: It does not fit that lease's budget. Preempted: That lease was put aside itself.
        CapacityError, BackendError: That can't be written down. Then it stays where it was.
    """
    leases, before = sandboxes.leases, live.spec.lease_id
    leases.check(spec.lease_id)
    if spec.lease_id in (None, before):
        return
    if not (leases.is_abandoned(before) or leases.are_of_one_run(before, spec.lease_id)):
        return
    after = leases.labelled(spec, spec.lease_id)
    leases.admit(spec.lease_id, live.sandbox_id, spec.memory_mib)
    try:
        leases.started(spec.lease_id, live.sandbox_id)
        sandboxes.journal.rehold(live.sandbox_id, after)
    except BarchanError:  # what is not noted has not happened
        leases.leave(spec.lease_id, live.sandbox_id)
        raise
    leases.leave(before, live.sandbox_id)
    live.spec = after
    if live.phase in ("paused", "hibernated"):
        leases.stand_still(spec.lease_id, live.sandbox_id, on_disk=live.phase == "hibernated")
    leases.handed_over(before)
