"""Leases: a sandbox lives as long as somebody holds its lease, and a grace time longer."""

import asyncio
import secrets
from collections.abc import Callable

from barchan.model.node import LeaseInfo
from barchan.node.journal import Journal

RESTART_GRACE_S = 15.0


class _Lease:
    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.holders = 0
        self.timer: asyncio.TimerHandle | None = None


class Leases:
    """`on_expired(lease_id)` is called when nobody held a lease for its grace time."""

    def __init__(self, journal: Journal, on_expired: Callable[[str], None]) -> None:
        self._journal = journal
        self._on_expired = on_expired
        self._leases: dict[str, _Lease] = {}
        for lease_id, grace_s in journal.leases().items():  # their holders need time to find the restarted node
            self._leases[lease_id] = _Lease(grace_s)
            self._arm(lease_id, max(grace_s, RESTART_GRACE_S))

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    @property
    def held(self) -> int:
        return sum(lease.holders > 0 for lease in self._leases.values())

    def hold(self, lease_id: str | None, grace_s: float) -> LeaseInfo:
        """A connection starts to hold a lease, new or known."""
        lease_id = lease_id or f"le_{secrets.token_hex(8)}"
        lease = self._leases.get(lease_id)
        if lease is None:
            lease = self._leases[lease_id] = _Lease(grace_s)
        lease.grace_s = grace_s
        self._journal.lease_save(lease_id, grace_s)
        lease.holders += 1
        if lease.timer is not None:
            lease.timer.cancel()
            lease.timer = None
        return LeaseInfo(lease_id=lease_id, grace_s=grace_s)

    def release(self, lease_id: str) -> None:
        """A connection that held it is gone."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        lease.holders -= 1
        if lease.holders == 0:
            self._arm(lease_id, lease.grace_s)

    def end(self, lease_id: str) -> None:
        """Forget a lease at once; what it held is the caller's to end."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None and lease.timer is not None:
            lease.timer.cancel()
        self._journal.lease_drop(lease_id)

    def _arm(self, lease_id: str, after_s: float) -> None:
        self._leases[lease_id].timer = asyncio.get_running_loop().call_later(after_s, self._expire, lease_id)

    def _expire(self, lease_id: str) -> None:
        self.end(lease_id)
        self._on_expired(lease_id)
