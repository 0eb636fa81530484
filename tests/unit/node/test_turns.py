"""Who moves next: bounded, the waited-for first, and no place is lost."""

import asyncio

import pytest

from barchan.node.turns import FIRST, LAST, Queue


async def test_no_more_than_its_places() -> None:
    """However many come at once."""
    queue, inside, most = Queue(3), 0, 0

    async def one() -> None:
        nonlocal inside, most
        async with queue.turn():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.001)
            inside -= 1

    await asyncio.gather(*(one() for _ in range(20)))
    assert (most, inside) == (3, 0)


async def test_the_waited_for_come_first() -> None:
    """Then those that nobody waits for, each kind in its order."""
    queue, order = Queue(1), []

    async def one(name: str, rank: int) -> None:
        async with queue.turn(lambda: rank):
            order.append(name)

    async with queue.turn():
        tasks = [asyncio.create_task(one(f"last-{number}", LAST)) for number in range(2)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(one(f"first-{number}", FIRST)) for number in range(2)]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == ["first-0", "first-1", "last-0", "last-1"]


async def test_who_goes_away_leaves_its_place() -> None:
    """Cancelled while it waits, and at the moment its turn comes."""
    queue = Queue(1)

    async def one() -> None:
        async with queue.turn():
            await asyncio.sleep(0.001)

    async with queue.turn():
        waiting = [asyncio.create_task(one()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
    waiting[1].cancel()  # its turn has come, and it has not seen it
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]
    async with asyncio.timeout(5):
        await waiting[2]
        await one()


async def test_one_that_comes_to_be_waited_for_comes_first() -> None:
    """Though it had lined up with those that nobody waits for."""
    queue, order, ranks = Queue(1), [], [LAST, LAST, LAST]

    async def one(index: int) -> None:
        async with queue.turn(lambda: ranks[index]):
            order.append(index)

    async with queue.turn():
        tasks = [asyncio.create_task(one(index)) for index in range(3)]
        await asyncio.sleep(0)
        ranks[2] = FIRST
    await asyncio.gather(*tasks)
    assert order == [2, 0, 1]
