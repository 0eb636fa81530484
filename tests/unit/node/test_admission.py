"""Turns to start a sandbox: bounded, in order, never lost."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from barchan.core.admission import Limits
from barchan.errors import CapacityError, InvalidSpec
from barchan.model.sandbox import SandboxSpec
from barchan.node.admission import Admission, check_spec
from barchan.node.density import pressure

LIMITS = Limits(starting_max=2, queued_max=3, running_max=1000, memory_reserve_mib=0, disk_reserve_mib=0)


@pytest.mark.parametrize("workdir", ["relative", "./a", "~", "/a\0b"])
def test_a_working_directory_that_is_no_place_is_refused(workdir: str) -> None:
    """By the create, not by the first program."""
    spec = SandboxSpec(template="debian", lease_id="le_1", workdir=workdir)
    with pytest.raises(InvalidSpec, match=r"workdir=.* is no absolute path"):
        check_spec(spec, 1024, 2)
    check_spec(replace(spec, workdir="/somewhere"), 1024, 2)


async def test_no_more_than_the_bound_start_at_once(tmp_path: Path) -> None:
    """Two at a time, the others in the order in which they came."""
    admission = Admission(LIMITS, tmp_path, lambda: 0)
    most = 0
    order: list[int] = []

    async def one(number: int) -> None:
        nonlocal most
        async with admission.slot(0):
            most = max(most, admission.starting)
            order.append(number)
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one(number) for number in range(5)))
    assert (most, order, admission.starting, admission.queued) == (2, [0, 1, 2, 3, 4], 0, 0)


async def test_higher_priorities_go_first(tmp_path: Path) -> None:
    """Whoever came first within one priority; who has a place already keeps it."""
    admission = Admission(LIMITS, tmp_path, lambda: 0)
    order: list[str] = []
    release = asyncio.Event()

    async def one(name: str, priority: int) -> None:
        async with admission.slot(0, priority):
            order.append(name)
            await release.wait()

    wanted = [("a", -5), ("b", 0), ("low", -1), ("high 1", 3), ("high 2", 3)]
    tasks = []
    for name, priority in wanted:
        tasks.append(asyncio.create_task(one(name, priority)))
        await asyncio.sleep(0)
    assert (order, admission.queued) == (["a", "b"], 3)
    release.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "high 1", "high 2", "low"]


async def test_a_full_queue_refuses(tmp_path: Path) -> None:
    """Two start, three wait, the sixth is told when to come back."""
    admission = Admission(LIMITS, tmp_path, lambda: 0)
    release = asyncio.Event()

    async def one() -> None:
        async with admission.slot(0):
            await release.wait()

    tasks = [asyncio.create_task(one()) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError):
        await one()
    release.set()
    await asyncio.gather(*tasks)
    assert admission.starting == 0


@pytest.mark.parametrize("granted", [False, True])
async def test_a_cancelled_wait_gives_its_turn_on(tmp_path: Path, granted: bool) -> None:
    """Whether it was still waiting, or had just been given the turn."""
    admission = Admission(LIMITS, tmp_path, lambda: 0)
    first, second = admission.slot(0), admission.slot(0)
    await first.__aenter__()
    await second.__aenter__()

    async def one() -> None:
        async with admission.slot(0):
            pass

    waiting = asyncio.create_task(one())
    await asyncio.sleep(0)
    if granted:
        await first.__aexit__(None, None, None)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    if not granted:
        await first.__aexit__(None, None, None)
    await second.__aexit__(None, None, None)
    assert (admission.starting, admission.queued) == (0, 0)
    await asyncio.wait_for(one(), 1)


async def test_a_wait_that_is_cancelled_as_its_turn_comes_is_just_cancelled(tmp_path: Path) -> None:
    """Whoever leaves passes over a turn that nobody waits for any more, before the one who waited has noticed."""
    admission = Admission(LIMITS, tmp_path, lambda: 0)
    first, second = admission.slot(0), admission.slot(0)
    await first.__aenter__()
    await second.__aenter__()

    async def one() -> None:
        async with admission.slot(0):
            pass

    waiting = asyncio.create_task(one())
    await asyncio.sleep(0)
    waiting.cancel()
    await first.__aexit__(None, None, None)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await second.__aexit__(None, None, None)
    assert (admission.starting, admission.queued) == (0, 0)


async def test_memory_asked_for_is_counted_between_two_looks(tmp_path: Path) -> None:
    """Creates that come faster than the node looks at its sandboxes don't slip past the limit."""
    total_mib = pressure().memory_total_mib
    limits = replace(LIMITS, starting_max=10, memory_overcommit=2.0)
    admission = Admission(limits, tmp_path, lambda: 0)
    async with admission.slot(0, 0, total_mib), admission.slot(1, 0, total_mib):
        with pytest.raises(CapacityError, match="memory"):
            async with admission.slot(2, 0, total_mib):
                raise AssertionError("let in")
