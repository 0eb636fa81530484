"""Leases end a grace time after their last holder, and not before; their budgets are counted by the sandbox."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from barchan.errors import CapacityError, Conflict, NotFound, QuotaExceeded, SandboxExpired
from barchan.model.lease import LeaseBeat, PreemptRequest
from barchan.model.node import Budget, LeaseRequest, LeaseUse
from barchan.model.sandbox import SandboxSpec
from barchan.model.tiers import Waiting
from barchan.node import leases as module
from barchan.node.database import Database
from barchan.node.journal import Journal
from barchan.node.leases import Leases, Over
from tests.unit.node.egress_harness import on_both_loops

SOON = LeaseRequest(grace_s=0.1)


class Told:
    """What a node would be told."""

    def __init__(self) -> None:
        self.over: list[tuple[str, Over]] = []

    def __call__(self, lease_id: str, cause: Over) -> None:
        self.over.append((lease_id, cause))

    async def wait(self) -> None:
        async with asyncio.timeout(10):
            while not self.over:
                await asyncio.sleep(0.01)


def opened(tmp_path: Path, told: Told | None = None) -> Leases:
    return Leases(Journal(tmp_path / "journal"), told or Told())


async def test_a_lease_ends_after_its_grace(tmp_path: Path) -> None:
    """Counted from the moment that its last connection went."""
    told = Told()
    leases = opened(tmp_path, told)
    lease = leases.hold(SOON)
    leases.hold(LeaseRequest(lease_id=lease.lease_id, grace_s=0.1))
    leases.release(lease)
    await asyncio.sleep(0.2)
    assert (told.over, leases.held, lease.info().holders) == ([], 1, 1)
    went = asyncio.get_running_loop().time()
    leases.release(lease)
    assert told.over == []
    await told.wait()
    assert asyncio.get_running_loop().time() - went >= 0.09
    assert told.over == [(lease.lease_id, "lease_ended")]
    assert lease.lease_id not in leases
    assert lease.ended.is_set()


@on_both_loops
class TestOver:
    async def test_one_that_was_over_before_the_node_started_ends_at_once(self, tmp_path: Path) -> None:
        """What is due at once has no time on every event loop."""
        before = opened(tmp_path)
        lease_id = before.hold(SOON).lease_id
        before.preempt(lease_id, PreemptRequest(keep_s=0.001))
        grace = before.get(lease_id).grace
        assert grace is not None
        grace.cancel()  # that node was killed
        await asyncio.sleep(0.01)
        told = Told()
        leases = Leases(Journal(tmp_path / "journal"), told)
        leases.begin()
        assert leases.get(lease_id).info().ends_unix_s is not None
        await told.wait()
        assert (told.over, lease_id in leases) == ([(lease_id, "lease_ended")], False)


async def test_a_holder_that_returns_in_time_keeps_it(tmp_path: Path) -> None:
    """A connection that broke costs nothing."""
    told = Told()
    leases = opened(tmp_path, told)
    request = LeaseRequest(lease_id="le_1", grace_s=0.1)
    lease = leases.hold(request)
    leases.release(lease)
    assert leases.hold(request) is lease
    await asyncio.sleep(0.25)
    assert (lease.lease_id, told.over) == ("le_1", [])


async def test_other_terms_are_refused(tmp_path: Path) -> None:
    """Whoever holds a lease that is there holds it as it was opened; nobody changes it under the others."""
    leases = opened(tmp_path)
    lease = leases.hold(LeaseRequest(lease_id="le_1", priority=5))
    for other in (LeaseRequest(lease_id="le_1"), LeaseRequest(lease_id="le_1", priority=5, labels={"a": "b"})):
        with pytest.raises(Conflict, match="le_1"):
            leases.hold(other)
    assert lease.info().holders == 1


async def test_a_restarted_node_gives_holders_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least the restart grace, even for a lease whose own is shorter."""
    monkeypatch.setattr(module, "RESTART_GRACE_S", 0.2)
    opened(tmp_path).hold(LeaseRequest(lease_id="le_1", grace_s=0.01))
    told = Told()
    started = asyncio.get_running_loop().time()
    leases = opened(tmp_path, told)
    leases.begin()
    assert "le_1" in leases
    await told.wait()
    assert asyncio.get_running_loop().time() - started >= 0.19
    assert told.over == [("le_1", "lease_ended")]


async def test_nothing_is_over_before_what_it_held_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's start takes as long as it takes: what is over, or used up, ends when its sandboxes are known."""
    monkeypatch.setattr(module, "RESTART_GRACE_S", 0.0)
    before = opened(tmp_path)
    before.hold(LeaseRequest(lease_id="le_1", grace_s=0))
    before.hold(LeaseRequest(lease_id="le_2", grace_s=0))
    before.hold(LeaseRequest(lease_id="le_3", grace_s=60, budget=Budget(sandbox_s_max=5)))
    before.preempt("le_2", PreemptRequest(keep_s=0.01))
    told = Told()
    leases = opened(tmp_path, told)
    for number in (1, 2, 3):
        leases.adopt(f"le_{number}", f"sb_{number}", 64, 10.0, is_awake=True)
    await asyncio.sleep(0.1)
    assert told.over == []
    leases.begin()
    async with asyncio.timeout(10):
        while len(told.over) < 3:
            await asyncio.sleep(0.01)
    assert sorted(told.over) == [("le_1", "lease_ended"), ("le_2", "lease_ended"), ("le_3", "budget")]


class Full:
    """A disk that takes nothing more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        execute = Database.execute

        def refuse(database: Database, sql: str, parameters: Any = ()) -> Any:
            if self.is_full and sql.split()[0] in ("DELETE", "INSERT", "UPDATE"):
                raise CapacityError("full")
            return execute(database, sql, parameters)

        monkeypatch.setattr(Database, "execute", refuse)


async def test_a_full_disk_keeps_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is over all the same, and its sandboxes with it; that is written down once there is room."""
    told, journal = Told(), Journal(tmp_path / "journal")
    leases = Leases(journal, told)
    lease = leases.hold(SOON)
    again = leases.hold(LeaseRequest(lease_id="le_2"))
    disk = Full(monkeypatch)
    leases.release(lease)
    leases.end("le_2")
    await told.wait()
    assert told.over == [(lease.lease_id, "lease_ended")]
    assert lease.lease_id not in leases
    disk.is_full = False
    again = leases.hold(LeaseRequest(lease_id="le_2", grace_s=3))
    journal.settle()
    assert {lease_id: row.terms.grace_s for lease_id, row in journal.leases().items()} == {"le_2": 3}
    assert again is leases.get("le_2")


async def test_a_hold_that_can_not_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nothing would ever end it, and the next node would not know it."""
    journal = Journal(tmp_path / "journal")
    leases = Leases(journal, Told())
    disk = Full(monkeypatch)
    for lease_id in (None, "le_1"):
        with pytest.raises(CapacityError):
            leases.hold(LeaseRequest(lease_id=lease_id))
    assert len(leases) == 0
    disk.is_full = False
    leases.hold(LeaseRequest(lease_id="le_1"))
    assert list(journal.leases()) == ["le_1"]


async def test_a_start_that_waited_does_not_begin_without_tokens(tmp_path: Path) -> None:
    """They were used up while it waited for its turn."""
    leases = opened(tmp_path)
    leases.hold(LeaseRequest(lease_id="le_1", budget=Budget(tokens_max=10, sandboxes_max=1, memory_mib_max=64)))
    leases.admit("le_1", "sb_1", 64)
    leases.started("le_1", "sb_1")
    leases.beat("le_1", LeaseBeat(holder="a", tokens=10))
    with pytest.raises(QuotaExceeded, match="10 tokens"):
        leases.started("le_1", "sb_1")


async def test_a_restarted_node_knows_terms_and_use(tmp_path: Path) -> None:
    """Labels, priority and budget, the seconds of sandboxes that ended, and those of one that still lives."""
    request = LeaseRequest(
        lease_id="le_1", labels={"run": "a"}, priority=7, budget=Budget(sandbox_s_max=100, sandboxes_max=3)
    )
    leases = opened(tmp_path)
    lease = leases.hold(request)
    leases.admit("le_1", "sb_1", 64)
    leases.started("le_1", "sb_1")
    lease.since["sb_1"] -= 30
    leases.leave("le_1", "sb_1")
    after = opened(tmp_path)
    after.adopt("le_1", "sb_2", 128, 20, is_awake=True)
    (info,) = after.list()
    assert (info.labels, info.priority, info.budget) == ({"run": "a"}, 7, request.budget)
    assert (info.used.sandboxes, info.used.memory_mib, info.holders) == (1, 128, 0)
    assert 50 <= info.used.sandbox_s < 60


async def test_an_ended_lease_is_forgotten_at_once(tmp_path: Path) -> None:
    """Also on disk: the next node does not know it. Another of its name starts from nothing."""
    journal = Journal(tmp_path / "journal")
    leases = Leases(journal, Told())
    request = LeaseRequest(lease_id="le_1", grace_s=60, budget=Budget(sandboxes_max=1))
    lease = leases.hold(request)
    leases.admit("le_1", "sb_1", 64)
    leases.end("le_1")
    assert (len(leases), journal.leases()) == (0, {})
    again = leases.hold(request)
    leases.release(lease)  # a connection of the ended one goes late
    leases.leave("le_1", "sb_1")
    assert (again.info().holders, again.used) == (1, LeaseUse())


async def test_sandboxes_and_memory_come_back(tmp_path: Path) -> None:
    """What does not fit is told to wait, until a sandbox of the same lease is gone."""
    leases = opened(tmp_path)
    leases.hold(LeaseRequest(lease_id="le_1", budget=Budget(sandboxes_max=2, memory_mib_max=200)))
    leases.admit("le_1", "sb_1", 64)
    leases.admit("le_1", "sb_2", 64)
    with pytest.raises(CapacityError) as many:
        leases.admit("le_1", "sb_3", 64)
    assert many.value.details["budget"] == "sandboxes_max"
    leases.leave("le_1", "sb_1")
    with pytest.raises(CapacityError) as big:
        leases.admit("le_1", "sb_3", 150)
    assert big.value.details["budget"] == "memory_mib_max"
    leases.leave("le_1", "sb_2")
    leases.admit("le_1", "sb_3", 150)


async def test_used_up_seconds_end_what_runs_and_let_nothing_in(tmp_path: Path) -> None:
    """Two sandboxes use them twice as fast; a start that waited for its turn meanwhile is refused, too."""
    told = Told()
    leases = opened(tmp_path, told)
    lease = leases.hold(LeaseRequest(lease_id="le_1", budget=Budget(sandbox_s_max=0.2)))
    for name in ("sb_1", "sb_2", "sb_3"):
        leases.admit("le_1", name, 64)
    leases.started("le_1", "sb_1")
    leases.started("le_1", "sb_2")
    await told.wait()
    assert told.over[0] == ("le_1", "budget")
    assert lease.used.sandbox_s >= 0.2
    with pytest.raises(QuotaExceeded):
        leases.started("le_1", "sb_3")
    for name in ("sb_1", "sb_2", "sb_3"):
        leases.leave("le_1", name)
    with pytest.raises(QuotaExceeded):
        leases.admit("le_1", "sb_4", 64)
    assert "le_1" in leases


async def test_a_start_that_outlived_its_lease_is_refused(tmp_path: Path) -> None:
    """It waited in the queue; started now, nothing would ever end it."""
    leases = opened(tmp_path)
    leases.hold(LeaseRequest(lease_id="le_1"))
    leases.admit("le_1", "sb_1", 64)
    leases.end("le_1")
    with pytest.raises(SandboxExpired):
        leases.started("le_1", "sb_1")
    with pytest.raises(SandboxExpired, match=r"lease le_1 is over: ended by its client \(try: ") as caught:
        leases.admit("le_1", "sb_2", 64)
    assert caught.value.details["cause"] == "lease_ended"
    with pytest.raises(NotFound):
        leases.admit("le_2", "sb_2", 64)


async def test_sleep_uses_no_seconds(tmp_path: Path) -> None:
    """Its memory counts on, but for one on disk; its seconds stand still, and go on from where they were."""
    leases = opened(tmp_path)
    lease = leases.hold(LeaseRequest(lease_id="le_1", budget=Budget(sandbox_s_max=100, memory_mib_max=64)))
    leases.admit("le_1", "sb_1", 64)
    leases.started("le_1", "sb_1")
    await asyncio.sleep(0.05)
    leases.stand_still("le_1", "sb_1")
    leases.stand_still("le_1", "sb_1")
    used = lease.used.sandbox_s
    await asyncio.sleep(0.1)
    assert (lease.used.sandbox_s, lease.used.memory_mib) == (used, 64)
    assert used > 0.04
    leases.stand_still("le_1", "sb_1", on_disk=True)
    leases.stand_still("le_1", "sb_gone", on_disk=True)
    assert (lease.used.sandboxes, lease.used.memory_mib) == (1, 0)
    leases.admit("le_1", "sb_2", 64)
    leases.go_on("le_1", "sb_1", 64)
    leases.go_on("le_1", "sb_gone", 64)
    assert lease.used.memory_mib == 128
    with pytest.raises(CapacityError):
        leases.admit("le_1", "sb_3", 1)
    leases.leave("le_1", "sb_2")
    await asyncio.sleep(0.05)
    assert used + 0.04 < lease.used.sandbox_s
    leases.stand_still("le_1", "sb_1")
    leases.leave("le_1", "sb_1")
    assert lease.used.sandboxes == 0
    assert lease.used.sandbox_s > used + 0.04


async def test_a_sleeping_sandbox_is_adopted_asleep(tmp_path: Path) -> None:
    """It has used what it had used, and uses no more."""
    leases = opened(tmp_path)
    lease = leases.hold(LeaseRequest(lease_id="le_1"))
    leases.adopt("le_1", "sb_1", 64, 12.0, is_awake=False)
    await asyncio.sleep(0.02)
    assert lease.used.sandbox_s == 12.0


async def test_its_sandboxes_wait_as_it_says(tmp_path: Path) -> None:
    """But for one that says so itself."""
    leases = opened(tmp_path)
    never, soon = Waiting(pause=False), Waiting(after_s=1)
    leases.hold(LeaseRequest(lease_id="le_1", waiting=never))
    assert leases.labelled(SandboxSpec(template="debian"), "le_1").waiting == never
    assert leases.labelled(SandboxSpec(template="debian", waiting=soon), "le_1").waiting == soon
    assert leases.labelled(SandboxSpec(template="debian"), None).waiting == Waiting()
