"""Leases: a sandbox lives as long as somebody holds its lease, and a grace time longer, within the lease's budget."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from barchan.core.admission import check_budget, spent_in_s
from barchan.core.summed import Summed
from barchan.errors import Conflict, NotFound, SandboxExpired
from barchan.model.node import Budget, LeaseInfo, LeaseRequest, LeaseUse
from barchan.model.sandbox import SandboxSpec
from barchan.model.tiers import Waiting
from barchan.node.journal import Journal

RESTART_GRACE_S = 15.0
Over = Literal["lease_ended", "budget"]
_NO_BUDGET = Budget()
_ANY_WAITING = Waiting()


class Lease:
    """One lease: its terms, who holds it, and what its sandboxes use. Times are the event loop's."""

    def __init__(self, lease_id: str, terms: LeaseRequest, spent_s: float = 0.0) -> None:
        self.lease_id = lease_id
        self.terms = terms
        self.holders = 0
        self.ended = asyncio.Event()
        self.spent_s = spent_s  # by sandboxes that have ended
        self.memory_mib = Summed(0)  # by sandbox, from its admission to its end; 0 of one that is on disk
        self.since = Summed(0.0)  # by sandbox, from when it was started or woken; none for those asleep
        self.before_s = Summed(0.0)  # by sandbox, until it went to sleep the last time
        self.grace: asyncio.TimerHandle | None = None
        self.spent: asyncio.TimerHandle | None = None

    @property
    def budget(self) -> Budget:
        return self.terms.budget or _NO_BUDGET

    @property
    def used(self) -> LeaseUse:
        now = asyncio.get_running_loop().time()
        return LeaseUse(
            sandboxes=len(self.memory_mib),
            memory_mib=self.memory_mib.total,
            sandbox_s=self.spent_s + self.before_s.total + len(self.since) * now - self.since.total,
        )

    def info(self) -> LeaseInfo:
        return LeaseInfo(
            lease_id=self.lease_id,
            grace_s=self.terms.grace_s,
            labels=self.terms.labels,
            priority=self.terms.priority,
            budget=self.terms.budget,
            used=self.used,
            holders=self.holders,
        )


class Leases:
    """`on_over(lease_id, cause)` is called when a lease's sandboxes have to end: nobody held it for its grace time
    (`lease_ended`), or its seconds are used up (`budget`).
    """

    def __init__(self, journal: Journal, on_over: Callable[[str, Over], None]) -> None:
        self._journal = journal
        self._on_over = on_over
        self._leases: dict[str, Lease] = {}
        for lease_id, (terms, spent_s) in journal.leases().items():  # their holders need time to find the new node
            lease = self._leases[lease_id] = Lease(lease_id, terms, spent_s)
            self._arm(lease, max(terms.grace_s, RESTART_GRACE_S))

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    @property
    def held(self) -> int:
        return sum(lease.holders > 0 for lease in self._leases.values())

    def list(self) -> list[LeaseInfo]:
        return [lease.info() for lease in self._leases.values()]

    def get(self, lease_id: str) -> Lease:
        """A lease that has not ended.

        Raises:
            NotFound: There is none of this id.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise NotFound(f"there is no lease {lease_id}: open one before creating", lease_id=lease_id)
        return lease

    def is_abandoned(self, lease_id: str | None) -> bool:
        """Whether it is in its grace time."""
        lease = self._leases.get(lease_id or "")
        return lease is not None and lease.holders == 0

    def labelled(self, spec: SandboxSpec, lease_id: str | None) -> SandboxSpec:
        """The spec as it is under a lease: with its waiting, and its labels where the spec has none of their names."""
        lease = self._leases.get(lease_id or "")
        if lease is None:
            return spec
        waiting = spec.waiting if spec.waiting != _ANY_WAITING else lease.terms.waiting or _ANY_WAITING
        return replace(spec, labels={**lease.terms.labels, **spec.labels}, waiting=waiting)

    # who holds it

    def hold(self, request: LeaseRequest) -> Lease:
        """A connection starts to hold a lease, new or known.

        Raises:
            Conflict: It is known, and on other terms.
        """
        lease_id = request.lease_id or f"le_{secrets.token_hex(8)}"
        terms = replace(request, lease_id=None)
        lease = self._leases.get(lease_id)
        if lease is None:
            lease = self._leases[lease_id] = Lease(lease_id, terms)
            self._journal.lease_save(lease_id, terms)
        elif lease.terms != terms:
            raise Conflict(f"lease {lease_id} was opened on other terms", lease_id=lease_id)
        lease.holders += 1
        if lease.grace is not None:
            lease.grace.cancel()
            lease.grace = None
        return lease

    def release(self, lease: Lease) -> None:
        """A connection that held it is gone."""
        lease.holders -= 1
        if lease.holders == 0 and not lease.ended.is_set():
            self._arm(lease, lease.terms.grace_s)

    def end(self, lease_id: str) -> None:
        """Forget a lease at once; what it held is the caller's to end."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        lease.ended.set()
        for timer in (lease.grace, lease.spent):
            if timer is not None:
                timer.cancel()
        self._journal.lease_drop(lease_id)

    def _arm(self, lease: Lease, after_s: float) -> None:
        lease.grace = asyncio.get_running_loop().call_later(after_s, self._expire, lease)

    def _expire(self, lease: Lease) -> None:
        self.end(lease.lease_id)
        self._on_over(lease.lease_id, "lease_ended")

    # what its sandboxes use

    def admit(self, lease_id: str, sandbox_id: str, memory_mib: int) -> None:
        """Take one more sandbox into the lease's budget.

        Raises:
            NotFound: There is no such lease. CapacityError, QuotaExceeded: It does not fit the budget.
        """
        lease = self.get(lease_id)
        check_budget(lease.budget, lease.used, memory_mib)
        lease.memory_mib[sandbox_id] = memory_mib

    def started(self, lease_id: str, sandbox_id: str) -> None:
        """An admitted sandbox begins to use seconds.

        Raises:
            SandboxExpired: The lease ended while the sandbox waited for its turn.
            QuotaExceeded: The seconds were used up meanwhile.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise SandboxExpired(f"lease {lease_id} ended before the sandbox was started", cause="lease_ended")
        check_budget(Budget(sandbox_s_max=lease.budget.sandbox_s_max), lease.used, 0)
        lease.since[sandbox_id] = asyncio.get_running_loop().time()
        self._watch(lease)

    def adopt(self, lease_id: str | None, sandbox_id: str, memory_mib: int, awake_s: float, *, is_awake: bool) -> None:
        """Count a sandbox that an earlier node started, whatever the budget says."""
        lease = self._leases.get(lease_id or "")
        if lease is not None:
            lease.memory_mib[sandbox_id] = memory_mib
            lease.before_s[sandbox_id] = awake_s
            if is_awake:
                lease.since[sandbox_id] = asyncio.get_running_loop().time()
            self._watch(lease)

    def stand_still(self, lease_id: str | None, sandbox_id: str, *, on_disk: bool = False) -> None:
        """A sandbox uses no seconds while it is asleep, and `on_disk` no memory; repeating is harmless."""
        lease = self._leases.get(lease_id or "")
        if lease is not None and on_disk and sandbox_id in lease.memory_mib:
            lease.memory_mib[sandbox_id] = 0
        if lease is not None and (since := lease.since.pop(sandbox_id)) is not None:
            used_s = asyncio.get_running_loop().time() - since
            lease.before_s[sandbox_id] = (lease.before_s.pop(sandbox_id) or 0.0) + used_s
            self._watch(lease)

    def go_on(self, lease_id: str | None, sandbox_id: str, memory_mib: int) -> None:
        """It is awake again, whatever the budget says: no wake waits for other sandboxes; repeating is harmless."""
        lease = self._leases.get(lease_id or "")
        if lease is not None and sandbox_id in lease.memory_mib:
            lease.memory_mib[sandbox_id] = memory_mib
            if sandbox_id not in lease.since:
                lease.since[sandbox_id] = asyncio.get_running_loop().time()
                self._watch(lease)

    def leave(self, lease_id: str | None, sandbox_id: str) -> None:
        """A sandbox is gone; repeating is harmless."""
        lease = self._leases.get(lease_id or "")
        if lease is None or lease.memory_mib.pop(sandbox_id) is None:
            return
        now = asyncio.get_running_loop().time()
        used_s, since = lease.before_s.pop(sandbox_id) or 0.0, lease.since.pop(sandbox_id)
        used_s += 0.0 if since is None else now - since
        if used_s:
            lease.spent_s += used_s
            self._journal.lease_use(lease.lease_id, lease.spent_s)
            self._watch(lease)

    def _watch(self, lease: Lease) -> None:
        """Be there when the seconds are used up."""
        if lease.spent is not None:
            lease.spent.cancel()
            lease.spent = None
        after_s = spent_in_s(lease.budget, lease.used, len(lease.since))
        if after_s is not None:
            lease.spent = asyncio.get_running_loop().call_later(after_s, self._spent, lease)

    def _spent(self, lease: Lease) -> None:
        lease.spent = None
        limit_s = lease.budget.sandbox_s_max
        if limit_s is not None and lease.used.sandbox_s < limit_s:  # a timer may be early by the clock's resolution
            self._watch(lease)
            return
        self._on_over(lease.lease_id, "budget")
