"""Work that must not be left half done is waited for, whoever is cancelled."""

import asyncio

import pytest

from barchan.core.finished import finished


async def test_the_result_or_the_error_comes_through() -> None:
    """As if it had been awaited."""

    async def fail() -> None:
        raise ValueError("mine")

    assert await finished(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="mine"):
        await finished(fail())


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_is_seen_after_the_end(fails: bool) -> None:
    """The work goes on to its end, and how it ended is not what the cancelled one hears of."""
    go = asyncio.Event()
    ended: list[str] = []

    async def work() -> None:
        await go.wait()
        ended.append("work")
        if fails:
            raise ValueError("not heard of")

    async def waiter() -> None:
        try:
            await finished(work())
        finally:
            ended.append("waiter")

    task = asyncio.create_task(waiter())
    await asyncio.sleep(0)
    task.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work", "waiter"]
