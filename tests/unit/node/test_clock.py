"""A sandbox's clock stands still with its timers, and goes on with what was left."""

import asyncio

from barchan.node.clock import Clock
from tests.unit.node.egress_harness import on_both_loops


async def test_a_timer_waits_for_its_clock() -> None:
    """Not while it stands still, however long; then after what was left."""
    clock, fired = Clock(), asyncio.Event()
    clock.call_later(0.05, fired.set)
    clock.stop()
    clock.stop()
    await asyncio.sleep(0.15)
    assert not fired.is_set()
    assert clock.go_on() >= 0.1
    assert clock.go_on() == 0.0
    async with asyncio.timeout(5):
        await fired.wait()


async def test_a_timer_made_while_it_stands_still() -> None:
    """Counts from when the clock goes on."""
    clock, fired = Clock(), asyncio.Event()
    clock.stop()
    timer = clock.call_later(0.01, fired.set)
    await asyncio.sleep(0.05)
    assert not fired.is_set()
    assert timer.left_s == 0.01
    clock.go_on()
    async with asyncio.timeout(5):
        await fired.wait()
    timer.cancel()


@on_both_loops
class TestDueAtOnce:
    async def test_a_timer_that_is_due_at_once_can_be_held(self) -> None:
        """One whose time was over while the sandbox slept, and which sleeps again before it is called."""
        clock, fired = Clock(), asyncio.Event()
        clock.call_later(0.0, fired.set)
        clock.stop()
        await asyncio.sleep(0.01)
        assert not fired.is_set()
        clock.go_on()
        async with asyncio.timeout(5):
            await fired.wait()


async def test_a_cancelled_timer_never_fires() -> None:
    """Cancelled while it runs or while it is held."""
    clock = Clock()
    fired: list[str] = []
    running, held = (clock.call_later(0.02, fired.append, name) for name in ("running", "held"))
    running.cancel()
    clock.stop()
    held.cancel()
    clock.go_on()
    await asyncio.sleep(0.06)
    assert fired == []


async def test_its_time_leaves_out_what_it_slept() -> None:
    """The event loop's time minus that."""
    clock = Clock()
    before = clock.time()
    clock.stop()
    await asyncio.sleep(0.05)
    assert clock.time() - before < 0.04
    assert clock.is_stopped
    clock.go_on()
    assert clock.slept_s >= 0.04
    assert clock.time() - before < 0.04


async def test_what_the_guest_missed_is_told_apart() -> None:
    """Asleep in memory, the guest's own clock goes on; on disk it stands still."""
    clock = Clock()
    clock.stop()
    await asyncio.sleep(0.02)
    clock.go_on()
    assert clock.missed_s == clock.slept_s > 0
    paused_s = clock.missed_s
    clock.stop()
    await asyncio.sleep(0.02)
    clock.go_on(0.005)
    assert clock.missed_s == paused_s + 0.005
    assert clock.slept_s > clock.missed_s
