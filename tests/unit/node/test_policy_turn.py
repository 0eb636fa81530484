"""Whoever comes between the policy's look and its move keeps the sandbox awake."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from barchan.errors import Conflict
from barchan.node.rest import Rest
from barchan.node.tiers import Tiers


class Running:
    """As a live sandbox, as far as a move down asks of one that stays as it is."""

    def __init__(self) -> None:
        self.sandbox_id = "sb"
        self.phase, self.ending, self.is_here = "ready", None, True
        self.requests = self.attached = 0
        self.last_used = asyncio.get_running_loop().time()
        self.rest = Rest()
        self.spec = SimpleNamespace(lease_id=None)


async def test_a_listener_that_came_after_the_look_keeps_it_awake() -> None:
    """It would wait for a program that was stopped a moment after it had found the sandbox awake."""
    node = SimpleNamespace(last_used=0.0)
    tiers, live = Tiers(cast(Any, node)), cast(Any, Running())
    live.rest.judged_at = live.last_used  # as the policy's look leaves it
    await asyncio.sleep(0.001)
    async with tiers.busy(live, attached=True):
        with pytest.raises(Conflict, match="a request came"):
            await tiers.to(live, "paused", is_asked=False)
    assert (live.phase, live.rest.tier) == ("ready", "running")
