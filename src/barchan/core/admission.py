"""May one more sandbox start here, now, later or not? Pure: counts in, decision out."""

from typing import Literal

from msgspec import Struct

from barchan.core.density import Pressure, step
from barchan.errors import CapacityError, QuotaExceeded
from barchan.model.node import Budget, LeaseUse

_NEXT_LEASE = "(try: a run with a larger budget; barchan ps --runs shows what was used)"
BUDGET_RETRY_MS = 1000  # nobody knows when a lease's own sandboxes will end


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds of one node. Starting is bounded apart from running, since starting is what costs CPU.

    Attributes:
        starting_max: Sandboxes being made at once.
        queued_max: Creates waiting for a place among those.
        running_max: Live sandboxes.
        memory_reserve_mib: Host memory that must stay available.
        disk_reserve_mib: Host disk that must stay free.
        warm: Slots kept ready for creates, at least.
        memory_overcommit: How many times the host's memory the limits of all sandboxes that are awake may add up to.
    """

    starting_max: int
    queued_max: int
    running_max: int
    memory_reserve_mib: int = 512
    disk_reserve_mib: int = 1024
    warm: int = 0
    memory_overcommit: float = 16.0


class Load(Struct, frozen=True, kw_only=True):
    """What a node carries at this moment. `requested_mib`: memory limits of those that are awake, with this one's."""

    starting: int
    queued: int
    running: int
    requested_mib: int
    pressure: Pressure
    disk_available_mib: int
    start_ms_p50: float


Decision = Literal["start", "queue"]


def decide(limits: Limits, load: Load) -> Decision:
    """Let one more sandbox start now or wait for its turn.

    Raises:
        CapacityError: Neither; `retry_after_ms` estimates when asking again makes sense.
    """
    if load.running + load.starting + load.queued >= limits.running_max:
        raise CapacityError(f"this node runs its {limits.running_max} sandboxes", retry_after_ms=1000)
    _check_memory(limits, load)
    if load.disk_available_mib < limits.disk_reserve_mib:
        raise CapacityError(
            f"only {load.disk_available_mib} MiB of disk are free, and a sandbox is started with "
            f"{limits.disk_reserve_mib} at least (try: barchan image gc, or barchan snapshot rm)",
            retry_after_ms=5000,
        )
    if load.starting < limits.starting_max:
        return "start"
    if load.queued >= limits.queued_max:
        turn_ms = load.start_ms_p50 * load.queued / limits.starting_max
        raise CapacityError(f"{load.queued} creates are waiting already", retry_after_ms=max(10, int(turn_ms)))
    return "queue"


def _check_memory(limits: Limits, load: Load) -> None:
    pressure = load.pressure
    if step(pressure, limits.memory_reserve_mib) in ("refuse", "evict"):
        stalled = 100 * (pressure.memory_stalled_full or 0.0)
        raise CapacityError(
            f"the host is short of memory: {pressure.memory_available_mib} MiB are available, "
            f"{limits.memory_reserve_mib} of them to be left, and its programs wait for it {stalled:.0f} % of the time",
            retry_after_ms=2000,
        )
    allowed_mib = int(pressure.memory_total_mib * limits.memory_overcommit)
    if load.requested_mib > allowed_mib:
        raise CapacityError(
            f"the sandboxes that are awake may take {load.requested_mib} MiB with this one, more than "
            f"{limits.memory_overcommit:g} times the host's {pressure.memory_total_mib} "
            "(try: a smaller memory_mib, or pausing some)",
            retry_after_ms=2000,
        )


def check_budget(budget: Budget, used: LeaseUse, memory_mib: int) -> None:
    """Let one more sandbox of `memory_mib` into a lease.

    Raises:
        CapacityError: Not now; room comes back when a sandbox of the lease ends.
        QuotaExceeded: Never: its seconds or tokens are used up, or its memory is less than this one sandbox asks for.
    """
    if budget.sandbox_s_max is not None and used.sandbox_s >= budget.sandbox_s_max:
        raise QuotaExceeded(
            f"the lease has used up its budget of {budget.sandbox_s_max:g} sandbox-seconds {_NEXT_LEASE}",
            budget="sandbox_s_max",
        )
    if is_out_of_tokens(budget, used):
        raise QuotaExceeded(
            f"the lease has used up its budget of {budget.tokens_max} tokens {_NEXT_LEASE}", budget="tokens_max"
        )
    if budget.memory_mib_max is not None and memory_mib > budget.memory_mib_max:
        raise QuotaExceeded(
            f"memory_mib={memory_mib} is more than the lease's whole budget of {budget.memory_mib_max} MiB "
            "(try: less memory_mib, or a budget with a larger memory_mib_max)",
            budget="memory_mib_max",
        )
    if budget.sandboxes_max is not None and used.sandboxes >= budget.sandboxes_max:
        raise CapacityError(
            f"the lease's budget is {budget.sandboxes_max} sandboxes at once",
            budget="sandboxes_max",
            retry_after_ms=BUDGET_RETRY_MS,
        )
    if budget.memory_mib_max is not None and used.memory_mib + memory_mib > budget.memory_mib_max:
        raise CapacityError(
            f"the lease's budget is {budget.memory_mib_max} MiB of memory, and its sandboxes have {used.memory_mib}",
            budget="memory_mib_max",
            retry_after_ms=BUDGET_RETRY_MS,
        )


def is_out_of_tokens(budget: Budget, used: LeaseUse) -> bool:
    """Whether a lease's tokens are used up."""
    return budget.tokens_max is not None and used.tokens >= budget.tokens_max


def spent_in_s(budget: Budget, used: LeaseUse, running: int) -> float | None:
    """When `running` sandboxes will have used up a lease's seconds, counted from now; None: never as things are."""
    if budget.sandbox_s_max is None or running == 0:
        return None
    return max(0.0, (budget.sandbox_s_max - used.sandbox_s) / running)
