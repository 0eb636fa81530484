"""A run, from a program: a lease that is held beside the program's own work, and groups of rollouts under it."""

import asyncio
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from barchan.errors import BackendError, InvalidSpec, LocalProtocolError, NotFound, Preempted
from barchan.model.node import PRIORITY_MAX, Budget, LeaseRequest
from barchan.model.tiers import Waiting
from barchan.rollout.breaker import BreakerTerms
from barchan.rollout.group import OPENING_MAX, AsyncGroup
from barchan.rollout.live import AsyncRollout, ended, opened
from barchan.rollout.part import Part, RunTerms
from barchan.rollout.settings import RunSettings
from barchan.rollout.shared import group_name, member_of, other_group
from barchan.rollout.task import Task
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.checks import check_count, checked_labels
from barchan.sdk.endpoint import Endpoint
from barchan.sdk.transport import Transport, shared_transport

NAME_CHARS_MAX = 128
MEMBERS_MAX = 100_000
GROUPS_KEPT = 64  # that are over; a later asking for an older one finds it in the run's folder


class AsyncRun:
    """A run of this process, made by `client.run()`: enter it, ask for groups, and leave it, which ends its sandboxes.

    Every process that enters a run has a lease of its own, held by the SDK's own thread: when the process is killed,
    its sandboxes end after the lease's grace time, and no other's. It pickles; whoever unpickles it holds the same
    lease, too, and need not enter it.
    """

    def __init__(self, part: Part) -> None:
        """Not called by users: `client.run()` gives runs."""
        self._part = part
        self._known_as: tuple[Endpoint, str] | None = None
        self._groups: dict[str, AsyncGroup] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        terms = self._part.terms
        return _revive, (replace(terms, lease=replace(terms.lease, lease_id=self.lease_id)),)

    @property
    def name(self) -> str:
        return self._part.settings.run_id

    @property
    def lease_id(self) -> str:
        """The lease that this process holds.

        Raises:
            LocalProtocolError: The run was not entered.
        """
        lease_id = self._part.lease.id or self._part.terms.lease.lease_id
        if lease_id is None:
            raise LocalProtocolError(f"run {self.name!r} holds no lease: enter it, `async with client.run(...) as run`")
        return lease_id

    @property
    def client(self) -> AsyncClient:
        """What makes sandboxes under the run's own lease."""
        return self._part.client

    async def __aenter__(self) -> Self:
        self._know_as(await self._part.open())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the lease, and with it the sandboxes of unfinished rollouts, where it was opened; elsewhere let it go.

        After a `BackendError` (its results can't be kept, say) they live for the grace time: it can be gone on with. A
        run that was put aside keeps them anyway.
        """
        if self._known_as is not None:
            _runs.pop(self._known_as, None)
        try:
            for group in self._groups.values():
                await group._stop()
            for rollout in list(self._part.live.values()):
                await rollout._close()
        finally:
            self._groups.clear()
            self._part.live.clear()
            await self._part.leave(is_kept=isinstance(error, BackendError | Preempted))

    async def group(self, task: Task, n: int, *, key: str) -> AsyncGroup:
        """`n` attempts at a task. Its environment is made first, once, whoever else asks for it; then its members start
        from that same state, and come out of the iteration as they are ready.

        Asking again for the key gives the same group, also in another process: the same sandboxes, verdicts that are
        there already (where the run has a folder), and for a member whose driver was killed the next attempt.

        Raises:
            Conflict: The key was used for another task or size.
            TaskError, NotFound: The environment can't be made.
            RunStopped: Too many of this process's latest rollouts were void; it says what these have in common.
        """
        check_count(n=n)
        if n > MEMBERS_MAX:
            raise InvalidSpec(f"n={n}: a group has at most {MEMBERS_MAX} members")
        if not isinstance(task, Task):
            raise InvalidSpec(f"a group is of a Task, and this is a {type(task).__name__}")
        if type(key) is not str or not key:
            raise InvalidSpec("a group needs a key: what names it in every process that asks for it")
        self._part.toolbox(task)  # an unknown tool is told before anything starts
        await self._part.ensure_open()
        if key not in self._groups:
            self._part.check_goes_on()
            name, index, folder = group_name(self.name, key), 0, self._part.folder
            if folder is not None:
                index = (await asyncio.to_thread(folder.claim, name, key, n, task)).group_index
            self._forget_old_groups()
            self._groups.setdefault(key, AsyncGroup(self, name, key, task, n, index))
        group = self._groups[key]
        await group._find_again()
        if (group.task, group.n) != (task, n):
            raise other_group(key, is_of_other_size=group.n != n)
        await group._begin()
        return group

    async def rollout(self, rollout_id: str) -> AsyncRollout:
        """A rollout of this run by its id, wherever it was driven before; from then on it goes on here, where its log
        leaves it: what its driver was killed in the middle of is finished first.

        One that nobody can go on with, since its sandbox has ended and can't be made again, is over and void.

        Raises:
            NotFound: The run has no such rollout, or no folder to find it in.
        """
        await self._part.ensure_open()
        name, index, attempt = member_of(rollout_id)
        known = self._part.live.get(rollout_id) or next(
            (found for group in self._groups.values() if (found := group._member(rollout_id)) is not None), None
        )
        if known is not None and not known.is_elsewhere:
            return known
        folder = self._part.folder
        if folder is None:
            raise NotFound(f"run {self.name!r} knows no rollout {rollout_id}, and has no folder (out=) to find it in")
        group = await asyncio.to_thread(folder.group, name)
        job = self._part.job(rollout_id, group.task, (group.group_index, index, attempt))
        verdict = await asyncio.to_thread(folder.verdict, rollout_id)
        if verdict is not None:
            return ended(self, job, verdict)
        if not folder.has_log(rollout_id):
            raise NotFound(f"run {self.name!r} has no rollout {rollout_id}")
        return await opened(self, job)

    async def rollouts(self) -> list[AsyncRollout]:
        """All of this run that are not over, by their ids; each is taken over from whoever had it, as by `rollout`.

        Raises:
            NotFound: The run has no folder to find them in.
        """
        await self._part.ensure_open()
        folder = self._part.folder
        if folder is None:
            raise NotFound(f"run {self.name!r} has no folder (out=) to find rollouts in")
        turns = asyncio.Semaphore(OPENING_MAX)

        async def one(rollout_id: str) -> AsyncRollout:
            async with turns:
                return await self.rollout(rollout_id)

        unfinished = await asyncio.to_thread(folder.unfinished)
        found = await asyncio.gather(*map(one, unfinished), return_exceptions=True)
        for error in found:  # once none is under way any more: what was taken over is there when it is asked for again
            if isinstance(error, BaseException):
                raise error
        return [rollout for rollout in found if isinstance(rollout, AsyncRollout)]

    def _know_as(self, lease_id: str) -> None:
        self._known_as = (self._part.terms.endpoint, lease_id)
        _runs[self._known_as] = self

    def _forget_old_groups(self) -> None:
        over = [key for key, group in self._groups.items() if group._is_over]
        for key in over[: max(0, len(over) - GROUPS_KEPT)]:
            del self._groups[key]


# Runs of this process by endpoint and lease, so that what comes out of many pickles shares one lease and one folder.
_runs: dict[tuple[Endpoint, str], AsyncRun] = {}


def _revive(terms: RunTerms) -> AsyncRun:
    """Take part in the run of another process; its lease is held from now on."""
    lease_id = terms.lease.lease_id or ""
    run = _runs.get((terms.endpoint, lease_id))
    if run is None:
        run = AsyncRun(Part(shared_transport(terms.endpoint), terms, is_owner=False))
        run._know_as(lease_id)
        run._part.lease.hold_nowait()
    return run


def run_of(
    client: AsyncClient,
    transport: Transport,
    name: str,
    *,
    labels: Mapping[str, str] | None,
    priority: int,
    budget: Budget | None,
    grace_s: float,
    out: str | os.PathLike[str] | None,
    template: str,
    backend: str,
    memory_mib: int,
    pids_max: int,
    capacity_wait_s: float,
    snapshot_every: int,
    breaker: float,
    waiting: Waiting | None,
    attach: bool,
) -> AsyncRun:
    """What `client.run()` gives.

    Raises:
        InvalidSpec: The name is empty or too long, the priority out of range, or there is no folder to attach to.
    """
    if not name or len(name) > NAME_CHARS_MAX or not name.isprintable():
        raise InvalidSpec(f"a run's name has 1 to {NAME_CHARS_MAX} printable characters: {name[:200]!r}")
    if not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise InvalidSpec(f"priority={priority}: from {-PRIORITY_MAX} to {PRIORITY_MAX}")
    check_count(0, snapshot_every=snapshot_every)
    if not 0.0 <= breaker <= 1.0:
        raise InvalidSpec(f"breaker={breaker}: a share from 0 to 1, and 0 for none")
    if attach and out is None:
        raise InvalidSpec(f"run {name!r}: attach needs the run's folder: give out=")
    lease = LeaseRequest(
        grace_s=grace_s,
        labels={**checked_labels(labels or {}), "run": name},
        priority=priority,
        budget=budget,
        waiting=waiting,
    )
    settings = RunSettings(
        run_id=name,
        template=template,
        backend=backend,
        memory_mib=memory_mib,
        pids_max=pids_max,
        capacity_wait_s=capacity_wait_s,
        snapshot_every=snapshot_every,
        breaker=BreakerTerms(share=breaker),
    )
    folder = os.path.abspath(out) if out is not None else None
    terms = RunTerms(endpoint=client.endpoint, lease=lease, settings=settings, out=folder, attach=attach)
    return AsyncRun(Part(transport, terms, is_owner=True))
