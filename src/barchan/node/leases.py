"""Leases: a sandbox lives as long as somebody holds its lease, and a grace time longer, within the lease's budget."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from barchan.core.admission import check_budget, is_out_of_tokens, spent_in_s
from barchan.core.summed import Summed
from barchan.errors import Conflict, NotFound, SandboxExpired
from barchan.model.lease import SILENT_S, EndCause, LeaseBeat, LeaseEnd, Preemption, PreemptRequest
from barchan.model.node import Budget, LeaseInfo, LeaseRequest, LeaseUse
from barchan.model.sandbox import SandboxSpec
from barchan.model.tiers import Waiting
from barchan.node.journal import Journal, LeaseRow

RESTART_GRACE_S = 15.0
HOLDERS_MAX = 1000  # whose tokens are told apart; then those of holders that have gone are one sum
ANONYMOUS = ""  # holders that send no beats
Over = Literal["lease_ended", "budget"]
_NO_BUDGET = Budget()
_ANY_WAITING = Waiting()


class Lease:
    """One lease: its terms, who holds it, and what its sandboxes use. Times are the event loop's."""

    def __init__(self, lease_id: str, row: LeaseRow) -> None:
        self.lease_id = lease_id
        self.terms = row.terms
        self.connections = Counter[str]()  # that hold it, by holder
        self.beats: dict[str, float] = {}  # the last one of each holder with a connection
        self.silent: set[str] = set()  # of those: whose beats stay away
        self.beat_unix_s: float | None = None
        self.tokens = row.tokens
        self.preemption = row.preemption
        self.ended = asyncio.Event()
        self.dismissed = asyncio.Event()  # ended or preempted: nobody holds it any more
        self.spent_s = row.sandbox_s  # by sandboxes that have ended
        self.memory_mib = Summed(0)  # by sandbox, from its admission to its end; 0 of one that is on disk
        self.since = Summed(0.0)  # by sandbox, from when it was started or woken; none for those asleep
        self.before_s = Summed(0.0)  # by sandbox, until it went to sleep the last time
        self.grace: asyncio.TimerHandle | None = None  # runs out at `ends_at`
        self.ends_at = 0.0
        self.spent: asyncio.TimerHandle | None = None

    @property
    def budget(self) -> Budget:
        return self.terms.budget or _NO_BUDGET

    @property
    def holders(self) -> int:
        """Connections that hold it."""
        return sum(count for holder, count in self.connections.items() if holder not in self.silent)

    @property
    def used(self) -> LeaseUse:
        now = asyncio.get_running_loop().time()
        return LeaseUse(
            sandboxes=len(self.memory_mib),
            memory_mib=self.memory_mib.total,
            sandbox_s=self.spent_s + self.before_s.total + len(self.since) * now - self.since.total,
            tokens=sum(self.tokens.values()),
        )

    def info(self) -> LeaseInfo:
        left_s = None if self.grace is None else self.ends_at - asyncio.get_running_loop().time()
        return LeaseInfo(
            lease_id=self.lease_id,
            grace_s=self.terms.grace_s,
            labels=self.terms.labels,
            priority=self.terms.priority,
            budget=self.terms.budget,
            used=self.used,
            holders=self.holders,
            phase="preempted" if self.preemption is not None else "held" if self.holders else "abandoned",
            silent=sum(self.connections[holder] for holder in self.silent),
            beat_unix_s=self.beat_unix_s,
            ends_unix_s=None if left_s is None else time.time() + left_s,
            preemption=self.preemption,
        )


class Leases:
    """`on_over(lease_id, cause)` is called when a lease's sandboxes have to end: nobody held it for its grace time, or
    went on with it after it was preempted (`lease_ended`), or its seconds or tokens are used up (`budget`).
    """

    def __init__(self, journal: Journal, on_over: Callable[[str, Over], None]) -> None:
        self._journal = journal
        self._on_over = on_over
        self._leases: dict[str, Lease] = {}
        for lease_id, row in journal.leases().items():
            lease = self._leases[lease_id] = Lease(lease_id, row)
            if row.preemption is not None:
                lease.dismissed.set()

    def begin(self) -> None:
        """Have those end that nobody holds, and that are used up: what an earlier node had started is there by now."""
        for lease in self._leases.values():
            if lease.preemption is not None:
                self._arm(lease, max(0.0, lease.preemption.until_unix_s - time.time()))
            elif not lease.holders:  # its holders need time to find the new node
                self._arm(lease, max(lease.terms.grace_s, RESTART_GRACE_S))
            self._watch(lease)

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    @property
    def held(self) -> int:
        return sum(lease.holders > 0 for lease in self._leases.values())

    @property
    def preempted(self) -> list[str]:
        """Ids of those that somebody has put aside."""
        return [lease.lease_id for lease in self._leases.values() if lease.preemption is not None]

    def list(self) -> list[LeaseInfo]:
        return [lease.info() for lease in self._leases.values()]

    def get(self, lease_id: str) -> Lease:
        """A lease that has not ended.

        Raises:
            SandboxExpired: It has ended, of late. Preempted: It has, and was put aside before.
            NotFound: There is none of this id.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            over = self._journal.lease_over(lease_id)
            if over is not None and over.preemption is not None:
                raise over.dismissal()
            if over is not None and over.end is not None:
                raise SandboxExpired(
                    f"lease {lease_id} is over: {over.end.why} (try: connect again; barchan ps --runs says more)",
                    lease_id=lease_id,
                    cause="lease_ended",
                )
            raise NotFound(f"there is no lease {lease_id}: open one before creating", lease_id=lease_id)
        return lease

    def check(self, lease_id: str | None) -> None:
        """Refuse what is asked of a sandbox, or of a lease, that was put aside.

        Raises:
            Preempted: It was.
        """
        lease = self._leases.get(lease_id or "")
        if lease is not None and lease.preemption is not None:
            raise lease.info().dismissal()

    def is_abandoned(self, lease_id: str | None) -> bool:
        """Whether nobody holds it: it is in its grace time, or was preempted."""
        lease = self._leases.get(lease_id or "")
        return lease is not None and lease.holders == 0

    def are_of_one_run(self, one_id: str | None, other_id: str) -> bool:
        """Whether they are two leases that processes of one run hold."""
        one, other = self._leases.get(one_id or ""), self._leases.get(other_id)
        if one is None or other is None or one is other:
            return False
        return "run" in one.terms.labels and one.terms.labels["run"] == other.terms.labels.get("run")

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
            Preempted: It was put aside.
            CapacityError, BackendError: It can't be written down; then there is none.
        """
        lease_id = request.lease_id or f"le_{secrets.token_hex(8)}"
        terms = replace(request, lease_id=None, holder=None)
        self.check(lease_id)
        lease = self._leases.get(lease_id)
        if lease is None:
            over = self._journal.lease_over(lease_id) if request.lease_id is not None else None
            if over is not None and over.preemption is not None:
                raise over.dismissal()
            self._journal.lease_save(lease_id, terms)
            lease = self._leases[lease_id] = Lease(lease_id, LeaseRow(terms=terms, sandbox_s=0.0))
        elif lease.terms != terms:
            raise Conflict(f"lease {lease_id} was opened on other terms", lease_id=lease_id)
        holder = request.holder or ANONYMOUS
        lease.connections[holder] += 1
        if request.holder is not None:
            self._heard(lease, request.holder)
        self._held_again(lease)
        return lease

    def release(self, lease: Lease, holder: str | None = None) -> None:
        """A connection that held it is gone."""
        holder = holder or ANONYMOUS
        was_held = lease.holders > 0
        lease.connections[holder] -= 1
        if not lease.connections[holder]:
            del lease.connections[holder]
            lease.beats.pop(holder, None)
            lease.silent.discard(holder)
        if was_held:
            self._let_go(lease)

    def beat(self, lease_id: str, beat: LeaseBeat) -> LeaseInfo:
        """A holder is alive; one whose beats had stayed away holds it again.

        Raises:
            NotFound: There is no such lease. Preempted: It was put aside.
        """
        lease = self.get(lease_id)
        self._use(lease, beat)
        self.check(lease_id)
        if beat.holder in lease.connections:
            self._heard(lease, beat.holder)
            self._held_again(lease)
        lease.beat_unix_s = time.time()
        return lease.info()

    def _use(self, lease: Lease, beat: LeaseBeat) -> None:
        if beat.tokens <= lease.tokens.get(beat.holder, 0):
            return
        if len(lease.tokens) >= HOLDERS_MAX and beat.holder not in lease.tokens:
            gone = [holder for holder in lease.tokens if holder not in (ANONYMOUS, *lease.connections)]
            lease.tokens[ANONYMOUS] = lease.tokens.get(ANONYMOUS, 0) + sum(map(lease.tokens.pop, gone))
        was_out = is_out_of_tokens(lease.budget, lease.used)
        lease.tokens[beat.holder] = beat.tokens
        self._journal.lease_tokens(lease.lease_id, lease.tokens)
        if not was_out and is_out_of_tokens(lease.budget, lease.used):
            self._on_over(lease.lease_id, "budget")

    def look(self, stalled_s: float = 0.0) -> None:
        """Take holders whose beats stay away for gone; whoever holds a lease no more begins its grace time.

        Args:
            stalled_s: For how long nobody was heard, since the last look, for this node stood still itself.
        """
        now = asyncio.get_running_loop().time()
        for lease in list(self._leases.values()):
            was_held = lease.holders > 0
            for holder, beat_at in lease.beats.items():
                lease.beats[holder] = beat_at + stalled_s
                if now - lease.beats[holder] > SILENT_S:
                    lease.silent.add(holder)
            if was_held:
                self._let_go(lease)
        going = {run for lease in self._leases.values() if lease.holders and (run := lease.terms.labels.get("run"))}
        for lease_id in self.preempted:  # none of whose sandboxes are left to go over to the run's next lease
            if self._leases[lease_id].terms.labels.get("run") in going:
                self.handed_over(lease_id)

    def _heard(self, lease: Lease, holder: str) -> None:
        lease.beats[holder] = asyncio.get_running_loop().time()
        lease.beat_unix_s = time.time()
        lease.silent.discard(holder)

    def _held_again(self, lease: Lease) -> None:
        if lease.holders and lease.grace is not None:
            lease.grace.cancel()
            lease.grace = None

    def _let_go(self, lease: Lease) -> None:
        if not lease.holders and not lease.dismissed.is_set():
            self._arm(lease, lease.terms.grace_s)

    # how it ends

    def preempt(self, lease_id: str, asked: PreemptRequest) -> None:
        """Nobody holds it from now on, and nobody needs to, until `keep_s` are over. Repeating may make that longer.

        Raises:
            NotFound: There is no such lease.
        """
        lease, now = self.get(lease_id), time.time()
        until_unix_s = now + asked.keep_s
        if lease.preemption is None:
            preemption = Preemption(by=asked.by, at_unix_s=now, until_unix_s=until_unix_s)
        elif until_unix_s > lease.preemption.until_unix_s:
            preemption = replace(lease.preemption, until_unix_s=until_unix_s)
        else:
            return
        self._journal.lease_preempt(lease_id, preemption)
        lease.preemption = preemption
        lease.dismissed.set()
        self._arm(lease, until_unix_s - now)

    def handed_over(self, lease_id: str | None) -> None:
        """A sandbox of it went over to another lease: with the last one a preempted lease is over."""
        lease = self._leases.get(lease_id or "")
        if lease is not None and lease.preemption is not None and not len(lease.memory_mib):
            self.end(lease.lease_id, "resumed")

    def end(self, lease_id: str, cause: EndCause = "ended") -> None:
        """Forget a lease at once; what it held is the caller's to end."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        lease.ended.set()
        lease.dismissed.set()
        for timer in (lease.grace, lease.spent):
            if timer is not None:
                timer.cancel()
        end = LeaseEnd(cause=cause, at_unix_s=time.time(), sandboxes=len(lease.memory_mib))
        self._journal.lease_drop(
            lease_id, replace(lease.info(), holders=0, silent=0, phase="ended", ends_unix_s=None, end=end)
        )

    def _arm(self, lease: Lease, after_s: float) -> None:
        if lease.grace is not None:
            lease.grace.cancel()
        loop = asyncio.get_running_loop()
        lease.ends_at = loop.time() + after_s  # uvloop's handle of what is due at once does not know when
        lease.grace = loop.call_later(after_s, self._expire, lease)

    def _expire(self, lease: Lease) -> None:
        self.end(lease.lease_id, "abandoned" if lease.preemption is None else "preempted")
        self._on_over(lease.lease_id, "lease_ended")

    # what its sandboxes use

    def admit(self, lease_id: str, sandbox_id: str, memory_mib: int) -> None:
        """Take one more sandbox into the lease's budget.

        Raises:
            NotFound: There is no such lease. CapacityError, QuotaExceeded: It does not fit the budget.
            Preempted: The lease was put aside.
        """
        self.check(lease_id)
        lease = self.get(lease_id)
        check_budget(lease.budget, lease.used, memory_mib)
        lease.memory_mib[sandbox_id] = memory_mib

    def started(self, lease_id: str, sandbox_id: str) -> None:
        """An admitted sandbox begins to use seconds.

        Raises:
            SandboxExpired: The lease ended while the sandbox waited for its turn.
            QuotaExceeded: The seconds or tokens were used up meanwhile.
            Preempted: The lease was put aside meanwhile.
        """
        self.check(lease_id)
        lease = self._leases.get(lease_id)
        if lease is None:
            raise SandboxExpired(f"lease {lease_id} ended before the sandbox was started", cause="lease_ended")
        check_budget(replace(lease.budget, sandboxes_max=None, memory_mib_max=None), lease.used, 0)
        lease.since[sandbox_id] = asyncio.get_running_loop().time()
        self._watch(lease)

    def adopt(self, lease_id: str | None, sandbox_id: str, memory_mib: int, awake_s: float, *, is_awake: bool) -> None:
        """Count a sandbox that an earlier node started, whatever the budget says: before `begin`."""
        lease = self._leases.get(lease_id or "")
        if lease is not None:
            lease.memory_mib[sandbox_id] = memory_mib
            lease.before_s[sandbox_id] = awake_s
            if is_awake:
                lease.since[sandbox_id] = asyncio.get_running_loop().time()

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
