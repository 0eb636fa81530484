"""Beats of a lease's holders, what they tell, and leases that are put aside."""

import asyncio
import time
from pathlib import Path

import pytest

from barchan.errors import NotFound, Preempted, QuotaExceeded
from barchan.model.lease import LeaseBeat, PreemptRequest
from barchan.model.node import Budget, LeaseInfo, LeaseRequest
from barchan.node import leases as module
from barchan.node.journal import Journal
from barchan.node.leases import Leases, Over

TERMS = LeaseRequest(lease_id="le_1", grace_s=0.05, holder="a")


class Node:
    """Leases over a journal, which an earlier one may have written."""

    def __init__(self, path: Path) -> None:
        self.over: list[tuple[str, Over]] = []
        self.journal = Journal(path / "journal")
        self.leases = Leases(self.journal, lambda lease_id, cause: self.over.append((lease_id, cause)))

    def info(self, lease_id: str = "le_1") -> LeaseInfo:
        return self.leases.get(lease_id).info()

    async def wait_over(self) -> None:
        async with asyncio.timeout(10):
            while not self.over:
                await asyncio.sleep(0.01)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(module, "SILENT_S", 0.1)
    return Node(tmp_path)


async def test_a_holder_without_beats_holds_nothing(node: Node) -> None:
    """Its connection may stay for ever; a later beat holds the lease again, and the grace time is over."""
    node.leases.hold(TERMS)
    await asyncio.sleep(0.15)
    assert (node.info().phase, node.info().silent) == ("held", 0)
    node.leases.look()
    assert (node.info().phase, node.info().holders, node.info().silent) == ("abandoned", 0, 1)
    assert node.info().ends_unix_s is not None
    node.leases.beat("le_1", LeaseBeat(holder="a"))
    assert (node.info().phase, node.info().holders, node.info().ends_unix_s) == ("held", 1, None)
    await asyncio.sleep(0.08)
    assert node.over == []
    await asyncio.sleep(0.05)
    node.leases.look()
    await node.wait_over()
    assert node.over == [("le_1", "lease_ended")]
    (over,) = node.journal.leases_over()
    assert (over.phase, over.end and over.end.cause) == ("ended", "abandoned")


async def test_one_that_beats_holds_it_for_all(node: Node) -> None:
    """So does one that sends no beats at all, and is held by its connection alone."""
    lease = node.leases.hold(TERMS)
    node.leases.hold(LeaseRequest(lease_id="le_1", grace_s=0.05))
    await asyncio.sleep(0.15)
    node.leases.look()
    assert (node.info().phase, node.info().holders, node.info().silent) == ("held", 1, 1)
    node.leases.release(lease)
    assert node.info().phase == "abandoned"
    node.leases.beat("le_1", LeaseBeat(holder="a"))
    node.leases.release(lease, "a")
    assert node.info().phase == "abandoned"
    node.leases.beat("le_1", LeaseBeat(holder="a"))
    assert node.info().phase == "abandoned", "a beat without a connection holds nothing"
    await node.wait_over()


async def test_a_node_that_stood_still_blames_nobody(node: Node) -> None:
    """It has heard no beats because it did not listen."""
    node.leases.hold(TERMS)
    await asyncio.sleep(0.15)
    node.leases.look(stalled_s=0.15)
    assert node.info().phase == "held"


async def test_tokens_of_all_holders_use_up_the_budget(tmp_path: Path, node: Node) -> None:
    """Each tells its own sum, in any order and as often as it likes; the next node goes on with what was used."""
    terms = LeaseRequest(lease_id="le_1", budget=Budget(tokens_max=100), holder="a")
    node.leases.hold(terms)
    for holder, tokens in (("a", 60), ("b", 30), ("a", 60), ("a", 10)):
        node.leases.beat("le_1", LeaseBeat(holder=holder, tokens=tokens))
    assert (node.info().used.tokens, node.over) == (90, [])
    node.leases.admit("le_1", "sb_1", 64)
    node.journal.settle()
    node.journal.close()
    later = Node(tmp_path)
    assert later.info().used.tokens == 90
    later.leases.beat("le_1", LeaseBeat(holder="b", tokens=40))
    assert later.over == [("le_1", "budget")]
    with pytest.raises(QuotaExceeded, match="100 tokens"):
        later.leases.admit("le_1", "sb_2", 64)
    later.leases.beat("le_1", LeaseBeat(holder="b", tokens=41))
    assert len(later.over) == 1, "once"
    with pytest.raises(NotFound):
        later.leases.beat("le_2", LeaseBeat(holder="b"))


async def test_holders_without_end_are_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have gone are one sum; nothing of it is forgotten."""
    monkeypatch.setattr(module, "HOLDERS_MAX", 5)
    lease = node.leases.hold(LeaseRequest(lease_id="le_1", holder="stays"))
    node.leases.hold(LeaseRequest(lease_id="le_1"))  # one that sends no beats
    node.leases.beat("le_1", LeaseBeat(holder="stays", tokens=1))
    for number in range(50):
        node.leases.beat("le_1", LeaseBeat(holder=f"h{number}", tokens=10))
        assert len(lease.tokens) <= 6
    assert node.info().used.tokens == 501
    node.leases.beat("le_1", LeaseBeat(holder="stays", tokens=3))
    assert node.info().used.tokens == 503


async def test_a_preempted_lease_needs_no_holder(tmp_path: Path, node: Node) -> None:
    """Nobody holds it, its holders are told by whom, and it stays for as long as it was asked to, over a restart."""
    lease = node.leases.hold(LeaseRequest(lease_id="le_1", grace_s=0.05, labels={"run": "r7"}, holder="a"))
    node.leases.admit("le_1", "sb_1", 64)
    node.leases.preempt("le_1", PreemptRequest(keep_s=1000.0, by="carol"))
    assert lease.dismissed.is_set() and not lease.ended.is_set()
    node.leases.release(lease, "a")
    refused = (
        lambda: node.leases.hold(LeaseRequest(lease_id="le_1", grace_s=0.05, labels={"run": "r7"})),
        lambda: node.leases.admit("le_1", "sb_2", 64),
        lambda: node.leases.beat("le_1", LeaseBeat(holder="a")),
        lambda: node.leases.check("le_1"),
    )
    for ask in refused:
        with pytest.raises(Preempted, match=r"run 'r7' was preempted by carol.*--resume"):
            ask()
    first = node.info().preemption
    node.leases.preempt("le_1", PreemptRequest(keep_s=10.0, by="dave"))
    assert node.info().preemption == first, "the longer time counts, and who was first"
    await asyncio.sleep(0.1)
    node.journal.close()
    later = Node(tmp_path)
    later.leases.begin()
    assert (later.info().phase, later.info().preemption, later.leases.is_abandoned("le_1")) == (
        "preempted",
        first,
        True,
    )
    assert abs((later.info().ends_unix_s or 0.0) - (time.time() + 1000.0)) < 60.0
    with pytest.raises(Preempted):
        later.leases.hold(LeaseRequest(lease_id="le_1", grace_s=0.05, labels={"run": "r7"}))


async def test_a_preempted_lease_is_over_with_its_last_sandbox(node: Node) -> None:
    """Whoever had it is told the same after that; nobody gets a lease of its id."""
    node.leases.hold(TERMS)
    for sandbox_id in ("sb_1", "sb_2"):
        node.leases.admit("le_1", sandbox_id, 64)
    node.leases.preempt("le_1", PreemptRequest(keep_s=1000.0))
    for sandbox_id in ("sb_1", "sb_2"):
        assert "le_1" in node.leases
        node.leases.leave("le_1", sandbox_id)
        node.leases.handed_over("le_1")
    assert "le_1" not in node.leases
    with pytest.raises(Preempted, match=r"went over to the run that goes on .*out="):
        node.leases.hold(TERMS)
    (over,) = node.journal.leases_over()
    assert over.end is not None and (over.end.cause, node.over) == ("resumed", [])


async def test_one_without_sandboxes_is_over_once_the_run_goes_on(node: Node) -> None:
    """Its sandboxes have ended, as graders' do: nothing can go over to the run's next lease any more."""
    for lease_id in ("le_1", "le_2"):
        node.leases.hold(LeaseRequest(lease_id=lease_id, labels={"run": "r"}))
        if lease_id == "le_1":
            node.leases.admit(lease_id, "sb_1", 64)
        node.leases.preempt(lease_id, PreemptRequest(keep_s=1000.0))
        node.leases.release(node.leases.get(lease_id))
    node.leases.look()
    assert {"le_1", "le_2"} <= set(node.leases.preempted)
    node.leases.hold(LeaseRequest(labels={"run": "r"}))
    node.leases.look()
    assert node.leases.preempted == ["le_1"]
    node.leases.leave("le_1", "sb_1")
    node.leases.look()
    assert node.leases.preempted == []


async def test_one_that_nobody_goes_on_with_ends(node: Node) -> None:
    """Once the time it is kept for is over."""
    node.leases.hold(TERMS)
    node.leases.admit("le_1", "sb_1", 64)
    node.leases.preempt("le_1", PreemptRequest(keep_s=0.05))
    await node.wait_over()
    (over,) = node.journal.leases_over()
    assert over.end is not None and (over.end.cause, over.end.sandboxes) == ("preempted", 1)
    with pytest.raises(Preempted, match="have ended"):
        node.leases.hold(TERMS)
