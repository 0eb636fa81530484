"""Leases end a grace time after their last holder, and not before."""

import asyncio
from pathlib import Path

import pytest

from barchan.node import leases as module
from barchan.node.journal import Journal
from barchan.node.leases import Leases


class Ended:
    """What a node would be told."""

    def __init__(self) -> None:
        self.ids: list[str] = []


async def test_a_lease_ends_after_its_grace(tmp_path: Path) -> None:
    """Counted from the moment that its last connection went."""
    ended = Ended()
    leases = Leases(Journal(tmp_path / "journal"), ended.ids.append)
    lease = leases.hold(None, 0.1)
    leases.hold(lease.lease_id, 0.1)
    leases.release(lease.lease_id)
    await asyncio.sleep(0.2)
    assert (ended.ids, leases.held) == ([], 1)
    leases.release(lease.lease_id)
    await asyncio.sleep(0.05)
    assert ended.ids == []
    await asyncio.sleep(0.15)
    assert ended.ids == [lease.lease_id]
    assert lease.lease_id not in leases


async def test_a_holder_that_returns_in_time_keeps_it(tmp_path: Path) -> None:
    """A connection that broke costs nothing."""
    ended = Ended()
    leases = Leases(Journal(tmp_path / "journal"), ended.ids.append)
    lease = leases.hold("le_1", 0.1)
    leases.release("le_1")
    await asyncio.sleep(0.05)
    leases.hold("le_1", 0.1)
    await asyncio.sleep(0.15)
    assert (lease.lease_id, ended.ids) == ("le_1", [])


async def test_a_restarted_node_gives_holders_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least the restart grace, even for a lease whose own is shorter."""
    monkeypatch.setattr(module, "RESTART_GRACE_S", 0.2)
    Leases(Journal(tmp_path / "journal"), [].append).hold("le_1", 0.01)
    ended = Ended()
    leases = Leases(Journal(tmp_path / "journal"), ended.ids.append)
    await asyncio.sleep(0.1)
    assert "le_1" in leases
    await asyncio.sleep(0.2)
    assert ended.ids == ["le_1"]


async def test_an_ended_lease_is_forgotten_at_once(tmp_path: Path) -> None:
    """Also on disk: the next node does not know it."""
    journal = Journal(tmp_path / "journal")
    leases = Leases(journal, [].append)
    leases.hold("le_1", 60)
    leases.end("le_1")
    leases.release("le_1")
    assert (len(leases), journal.leases()) == (0, {})
