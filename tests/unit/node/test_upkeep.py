"""What the node does by itself from time to time."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from barchan.node import upkeep
from barchan.node.rest import Rest


class SlowHolds:
    """Each look takes far longer than the pause between two turns."""

    @property
    def is_due(self) -> bool:
        time.sleep(0.03)
        return False


async def test_an_idle_time_out_stands_still_in_a_sleep_however_long_a_turn_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sleep was asked for: what is added is the time that has passed, not the pause between two turns."""
    monkeypatch.setattr(upkeep, "SWEEP_S", 0.001)
    expired: list[str] = []
    live = SimpleNamespace(
        spec=SimpleNamespace(idle_timeout_s=0.2), ending=None, is_here=True, rest=Rest(), requests=0, attached=0,
        is_equipped=False, last_used=asyncio.get_running_loop().time(),
    )  # fmt: skip
    live.rest.is_asked = True
    node = SimpleNamespace(
        live={"sb": live}, holds=SlowHolds(), journal=SimpleNamespace(settle=lambda: None),
        expire=lambda live, cause: expired.append(cause), lost={},
        leases=SimpleNamespace(look=lambda stalled_s: None),
    )  # fmt: skip
    node.journal.prune = lambda: None
    node.unmount = lambda: asyncio.sleep(0)
    sweeping = asyncio.create_task(upkeep.sweep(cast(Any, node)))
    await asyncio.sleep(0.7)
    live.rest.is_asked = False
    idle_s = asyncio.get_running_loop().time() - live.rest.idle_from
    assert idle_s < 0.2 and not expired
    async with asyncio.timeout(10):
        while not expired:
            await asyncio.sleep(0.01)
    sweeping.cancel()
    assert expired[0] == "idle_timeout"
