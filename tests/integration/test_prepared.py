"""Prepared pools: one set-up, handed out many times, each time to one."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import barchan
from barchan import AsyncClient, AsyncPrepared
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]
SETUP = "id -un > /tmp/who; head -c 16 /dev/urandom | od -An -tx1 > /tmp/once"
WAIT_S = 60.0


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def filled(pool: AsyncPrepared, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while (told := pool.statistics()).ready < count:
        assert time.monotonic() < deadline, told
        await asyncio.sleep(0.02)


async def alive(client: AsyncClient, pool: str) -> "Counter[str]":
    """How many of a pool's sandboxes are in each phase."""
    return Counter(info.phase for info in await client.list(labels={"pool": pool}))


async def test_each_is_handed_out_once(client: AsyncClient) -> None:
    """More at once than are ready: all get one of their own, of the one set-up; what is left ends with the pool."""
    async with await client.prepare("debian", setup=SETUP, count=6, memory_mib=64, labels={"pool": "once"}) as pool:
        await filled(pool, 6)
        assert (await alive(client, "once"))["paused"] >= 6
        got = await asyncio.gather(*(pool.create() for _ in range(20)))
        assert len({sandbox.id for sandbox in got}) == 20
        told = pool.statistics()
        assert told.claimed_total >= 6 and told.claimed_total + told.forked_total == 20
        assert (told.setups_total, told.died_total, told.wanted) == (1, 0, 6)
        said = await asyncio.gather(*(sandbox.exec("cat /tmp/who /tmp/once; echo mine > /tmp/mine") for sandbox in got))
        assert len({result.check().text for result in said}) == 1
        user = (await client.image("debian")).user
        assert said[0].text.splitlines()[0] == user
        await filled(pool, 6)
        later = await pool.create()
        assert (await later.exec("test -e /tmp/mine")).exit_code == 1
    assert sum((await alive(client, "once")).values()) == 21
    with pytest.raises(barchan.LocalProtocolError, match="closed"):
        await pool.create()


async def test_a_set_up_that_fails_leaves_nothing(client: AsyncClient) -> None:
    """Its output is told; so are wishes that can't be."""
    with pytest.raises(barchan.SetupFailed, match="no such thing"):
        await client.prepare(
            "debian", setup="echo no such thing; exit 3", count=2, memory_mib=64, labels={"pool": "failed"}
        )
    with pytest.raises(barchan.InvalidSpec):
        await client.prepare("debian", count=2)
    with pytest.raises(barchan.InvalidSpec):
        await client.prepare("debian", setup=SETUP, count=0)
    with pytest.raises(barchan.InvalidSpec):
        await client.prepare("debian", setup=SETUP, count=1, detach=True)
    assert await alive(client, "failed") == {}


async def test_what_dies_is_replaced(client: AsyncClient) -> None:
    """Ready ones that ended are never handed out; where their parent has, too, the set-up is run again."""
    async with await client.prepare("debian", setup=SETUP, count=3, memory_mib=64, labels={"pool": "dies"}) as pool:
        await filled(pool, 3)
        first = await pool.create()
        once = (await first.exec("cat /tmp/once")).text
        await filled(pool, 3)
        await first.kill()
        assert await client.kill(labels={"pool": "dies"}) == 4
        sandbox = await pool.create()
        assert (await sandbox.exec("cat /tmp/once")).text not in (once, "")
        told = pool.statistics()
        assert (told.setups_total, told.died_total) == (2, 3)
        await filled(pool, 3)
        assert (await (await pool.create()).exec("cat /tmp/once")).text == (await sandbox.exec("cat /tmp/once")).text


async def test_options_make_a_fork_of_its_own(client: AsyncClient) -> None:
    """What is ready is as it is; a time to live begins when a sandbox is made, and not with the set-up."""
    options = {"pool": "options"}
    async with await client.prepare("debian", setup=SETUP, count=1, memory_mib=64, labels=options, ttl_s=300) as pool:
        await filled(pool, 1)
        sandbox = await pool.create(env={"A": "b"}, labels={"own": "yes"})
        assert (await sandbox.exec("echo $A; wc -l < /tmp/who")).text == "b\n1\n"
        info = await sandbox.info()
        assert (info.spec.labels, info.spec.ttl_s) == ({"pool": "options", "own": "yes"}, 300)
        assert (await (await pool.create()).info()).spec.ttl_s == 300
        told = pool.statistics()
        assert (told.claimed_total, told.forked_total) == (1, 1)


async def test_one_that_nobody_came_to_have_goes_to_the_next(client: AsyncClient) -> None:
    """A create that is cancelled at any point leaves it in the pool, or not there at all."""
    async with await client.prepare("debian", setup=SETUP, count=4, memory_mib=64, labels={"pool": "next"}) as pool:
        await filled(pool, 4)
        handed = 0
        for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34):
            task = asyncio.create_task(pool.create())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
                handed += 1
        await filled(pool, 4)
        assert sum((await alive(client, "next")).values()) == handed + 5


@pytest.mark.requires("criu")
async def test_processes_of_the_set_up_go_on_in_each(client: AsyncClient) -> None:
    """With kind `memory`: what the script has left running."""
    script = "(while :; do date +%N > /tmp/beat; sleep 0.05; done) > /dev/null 2>&1 & echo $! > /tmp/pid"
    pool = await client.prepare("debian", setup=script, count=2, kind="memory", memory_mib=64)
    async with pool:
        await filled(pool, 2)
        for sandbox in (await pool.create(), await pool.create()):
            goes_on = "kill -0 $(cat /tmp/pid) && rm -f /tmp/beat && until [ -s /tmp/beat ]; do sleep 0.05; done"
            (await sandbox.exec(goes_on, timeout_s=WAIT_S)).check()
        assert pool.statistics().claimed_total == 2


async def test_a_client_that_closes_takes_its_pools_along(node: NodeProcess) -> None:
    """While they are filled, too."""
    client = await barchan.connect_async(f"unix://{node.socket}")
    pools = [
        await client.prepare("debian", setup="true", count=8, memory_mib=64, labels={"pool": "gone"}) for _ in range(3)
    ]
    await filled(pools[0], 1)
    await client.close()
    async with barchan.connect_async(f"unix://{node.socket}") as other:
        assert await alive(other, "gone") == {}
    with pytest.raises(barchan.LocalProtocolError):
        await pools[0].create()


async def test_a_pool_outlives_its_node(make_node: Callable[[], NodeProcess]) -> None:
    """Killed while creates and refills go on: each create gets its own or a typed error, and nothing is left."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        pool = await client.prepare("debian", setup=SETUP, count=4, memory_mib=64, labels={"pool": "node"})
        await filled(pool, 2)
        got = []
        for _ in range(2):
            tasks = [asyncio.create_task(pool.create()) for _ in range(5)]
            await asyncio.sleep(0.01)
            node.kill()
            node.start()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, barchan.AsyncSandbox | barchan.BarchanError), result
                got += [result] if isinstance(result, barchan.AsyncSandbox) else []
        await filled(pool, 4)
        assert len({sandbox.id for sandbox in got}) == len(got)
        for sandbox in [*got, await pool.create()]:
            assert (await sandbox.exec("cat /tmp/once")).text
        await pool.close()
        assert sum((await alive(client, "node")).values()) == len(got) + 1
    assert node.sandboxes() == []
    assert node.end() == []


def test_threads_share_a_pool(node: NodeProcess) -> None:
    """The synchronous face: no two get the same one."""
    with barchan.connect(f"unix://{node.socket}") as client:
        with (
            client.prepare("debian", setup="true", count=3, memory_mib=64) as pool,
            ThreadPoolExecutor(4) as threads,
        ):
            made = [future.result() for future in [threads.submit(pool.create) for _ in range(8)]]
            assert len({sandbox.id for sandbox in made}) == 8
            told = pool.statistics()
            assert told.claimed_total + told.forked_total == 8
        assert made[0].exec("true").ok
