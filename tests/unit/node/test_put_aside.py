"""Sandboxes of a lease that is put aside, however they are at that moment, and how they go over to the next lease."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from barchan.errors import CapacityError, Preempted
from barchan.model.lease import PreemptRequest
from barchan.model.node import LeaseRequest
from barchan.model.sandbox import SandboxSpec
from barchan.model.tiers import Tier, TierChange
from barchan.node.journal import Journal
from barchan.node.leases import Leases
from barchan.node.preempting import Preempting, hand_over
from barchan.node.sandboxes import Sandboxes
from barchan.node.tasks import Tasks

SPEC = SandboxSpec(template="debian", lease_id="le_1", memory_mib=64)


class Tiers:
    """Moves sandboxes as a node does, without any."""

    async def change(self, live: Any, tier: Tier, *, is_asked: bool = True) -> TierChange:
        refused = "" if live.is_here else "it has ended"
        if not refused and tier == "hibernated" and live.rest.tier == "running":
            refused = "it stays awake"
        elif not refused and live.rest.tier != "hibernated":
            live.rest.tier = tier
        return TierChange(sandbox_id=live.sandbox_id, tier=live.rest.tier, freed_bytes=0, refused=refused, took_ms=0.0)


class Node:
    """What preempting takes of a node."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path / "journal")
        self.leases = Leases(self.journal, lambda *_: None)
        self.tasks, self.tiers = Tasks(), Tiers()
        self.live: dict[str, Any] = {}
        self.leases.hold(LeaseRequest(lease_id="le_1", grace_s=100, labels={"run": "r"}))

    def add(self, *, phase: str = "ready", tier: Tier = "running") -> Any:
        sandbox_id = f"sb_{len(self.live)}"
        self.leases.admit("le_1", sandbox_id, 64)
        live = SimpleNamespace(
            sandbox_id=sandbox_id,
            spec=SPEC,
            phase=phase,
            ending=None,
            is_here=phase != "booting",
            booted=asyncio.get_running_loop().create_future(),
            rest=SimpleNamespace(tier=tier, waking=None),
        )
        self.live[sandbox_id] = live
        return live

    async def preempted(self) -> list[tuple[str, Tier]]:
        preempting = Preempting(self)  # type: ignore[arg-type]
        asked = PreemptRequest(keep_s=100.0)
        return [(one.sandbox_id, one.tier) async for one in preempting.preempt("le_1", asked)]


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_each_is_told_of_as_it_goes_and_once_again(node: Node) -> None:
    """Twice the first time; asked for again, once as it lies there."""
    node.add()
    assert await node.preempted() == [("sb_0", "paused"), ("sb_0", "hibernated")]
    assert await node.preempted() == [("sb_0", "hibernated")]


async def test_one_that_wakes_is_put_aside_once_it_is_awake(node: Node) -> None:
    """It is on its way up, and looks as if it slept."""
    live = node.add(phase="paused", tier="paused")
    goes_on = asyncio.Event()

    async def wake() -> None:
        await goes_on.wait()
        live.rest.tier, live.rest.waking = "running", None

    live.rest.waking = asyncio.create_task(wake())
    asyncio.get_running_loop().call_later(0.05, goes_on.set)
    assert await node.preempted() == [("sb_0", "paused"), ("sb_0", "hibernated")]


async def test_one_that_wakes_between_two_steps_is_put_aside_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the run goes on running."""
    live = node.add()
    change, wakes = node.tiers.change, [True]

    async def changed(one: Any, tier: Tier, **options: Any) -> TierChange:
        if tier == "hibernated" and wakes:
            wakes.clear()
            live.rest.tier = "running"
        return await change(one, tier, **options)

    monkeypatch.setattr(node.tiers, "change", changed)
    assert await node.preempted() == [("sb_0", "paused"), ("sb_0", "paused"), ("sb_0", "hibernated")]


async def test_a_create_that_fails_meanwhile_is_not_told_of(node: Node) -> None:
    """There is nothing that could have stopped."""
    live = node.add(phase="booting")
    asyncio.get_running_loop().call_later(0.05, live.booted.set_exception, CapacityError("no room"))
    assert await node.preempted() == []


async def test_its_holder_ends_nothing_of_it(node: Node) -> None:
    """Whoever leaves a run that was put aside, and did not hear of that, would end its lease."""
    node.add()
    await node.preempted()
    with pytest.raises(Preempted):
        await Sandboxes.end_lease(node, "le_1")  # type: ignore[arg-type]
    assert "le_1" in node.leases


async def test_what_can_not_be_written_does_not_go_over(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays with its lease, and goes over when it is asked for again."""
    live = node.add()
    node.leases.started("le_1", "sb_0")
    new = node.leases.hold(LeaseRequest(lease_id="le_2", grace_s=100, labels={"run": "r"}))
    asked = replace(SPEC, lease_id="le_2")
    written: list[str | None] = []

    def full(_: str, spec: SandboxSpec) -> None:
        raise CapacityError("full")

    monkeypatch.setattr(node.journal, "rehold", full)
    with pytest.raises(CapacityError):
        hand_over(node, live, asked)  # type: ignore[arg-type]
    assert (live.spec.lease_id, new.used.sandboxes, node.leases.get("le_1").used.sandboxes) == ("le_1", 0, 1)
    monkeypatch.setattr(node.journal, "rehold", lambda _, spec: written.append(spec.lease_id))
    for _ in range(2):
        hand_over(node, live, asked)  # type: ignore[arg-type]
    assert (live.spec.lease_id, new.used.sandboxes, node.leases.get("le_1").used.sandboxes) == ("le_2", 1, 0)
    assert written == ["le_2"]


async def test_one_whose_own_lease_is_let_go_stays_counted(node: Node) -> None:
    """Its holder asks for it again before it holds the lease again."""
    live = node.add()
    node.leases.release(node.leases.get("le_1"))
    hand_over(node, live, SPEC)  # type: ignore[arg-type]
    assert node.leases.get("le_1").used.sandboxes == 1
