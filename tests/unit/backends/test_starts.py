"""Starts of programs, and one who wants none."""

import asyncio

import pytest

from barchan.backends.starts import Starts


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_nothing_starts_while_somebody_wants_none() -> None:
    """What was under way ends first; what comes meanwhile waits, and goes on afterwards."""
    starts, said, first_may_end = Starts(), list[str](), asyncio.Event()

    async def start(name: str, until: asyncio.Event | None = None) -> None:
        async with starts.one():
            said.append(f"{name} begins")
            if until is not None:
                await until.wait()
            said.append(f"{name} ends")

    async def none(until: asyncio.Event) -> None:
        async with starts.none():
            said.append("none")
            await until.wait()
            said.append("over")

    over = asyncio.Event()
    tasks = [asyncio.create_task(start("first", first_may_end))]
    await settle()
    tasks.append(asyncio.create_task(none(over)))
    await settle()
    tasks.append(asyncio.create_task(start("second")))
    await settle()
    assert said == ["first begins"]
    first_may_end.set()
    await settle()
    assert said == ["first begins", "first ends", "none"]
    over.set()
    await asyncio.gather(*tasks)
    assert said == ["first begins", "first ends", "none", "over", "second begins", "second ends"]


async def test_failures_and_cancellations_hold_nobody_up() -> None:
    """A start that fails counts no more; whoever is cancelled in wanting none lets starts begin."""
    starts = Starts()
    with pytest.raises(ValueError, match="no"):
        async with starts.one():
            raise ValueError("no")
    async with starts.none():
        pass
    async with starts.one():
        waiting = asyncio.create_task(starts.none().__aenter__())
        await settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    async with asyncio.timeout(1), starts.one():
        pass
