"""The warm pool of a real node: claims in a burst, what a claim brings, and what the pool survives."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

import barchan
from barchan import AsyncClient
from barchan.model.pool import PoolInfo
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]
WAIT_S = 30.0
SMALL = {"memory_mib": 64, "disk_mib": 64}


@pytest.fixture(scope="module")
def pool_node(make_node: Callable[[], NodeProcess]) -> NodeProcess:
    node = make_node()
    node.start("--warm", "0")
    return node


@pytest.fixture
async def client(pool_node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{pool_node.socket}") as client:
        yield client
        await client.set_pool(0)


async def filled(client: AsyncClient, slots: int) -> PoolInfo:
    """The pool once it is full."""
    found = await client.set_pool(slots)
    deadline = time.monotonic() + WAIT_S
    while found.ready < slots:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.02)
        found = await client.pool()
    return found


def slot_processes(node: NodeProcess) -> list[int]:
    """Inits in the groups of sandboxes and slots, and keepers: all that the supervisor has started."""
    supervisor = node.watch.supervisor_pid()
    return [int(pid) for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()]


async def test_a_burst_larger_than_the_pool(client: AsyncClient) -> None:
    """Every claim gets a sandbox of its own, none used before; those beyond the pool start cold."""
    before = await filled(client, 24)
    claims = 60

    async def one(number: int) -> tuple[str, str, int]:
        sandbox = await client.create("debian", hostname=f"box-{number}", **SMALL)
        script = "ls -A /tmp /dev/shm; echo used > /tmp/mark; hostname; tail -n 1 /proc/self/uid_map"
        found = (await sandbox.exec(script)).check().text.split()
        assert found[:3] == ["/dev/shm:", "/tmp:", f"box-{number}"]
        await sandbox.kill()
        return sandbox.id, found[4], number

    made = await asyncio.gather(*(one(number) for number in range(claims)))
    assert len({sandbox_id for sandbox_id, _, _ in made}) == claims
    after = await client.pool()
    claimed = after.claimed_total - before.claimed_total
    assert claimed >= 24
    assert claimed + after.cold_total - before.cold_total == claims
    assert after.died_total == before.died_total


async def test_what_a_create_asks_for_is_there(client: AsyncClient) -> None:
    """User, environment, limits and network of one that was claimed, and its files may be kept."""
    await filled(client, 2)
    before = (await client.pool()).claimed_total
    async with await client.create(
        "debian", env={"A": "b"}, user="root", pids_max=20, memory_mib=64, allow=["example.org"]
    ) as sandbox:
        assert (await client.pool()).claimed_total == before + 1
        assert (await sandbox.exec("echo $A; id -u; echo $http_proxy")).check().text.split()[:2] == ["b", "0"]
        forks = await sandbox.exec("for i in $(seq 30); do sleep 5 & done; wait", timeout_s=2)
        assert "fork" in forks.error_text
        grown = await sandbox.exec(["python3", "-c", "bytearray(200 << 20)"])
        assert grown.oom_killed
        await sandbox.exec("echo 1 > /kept")
        image = await sandbox.snapshot("warm-kept")
        async with await client.create(image.name) as again:
            assert (await again.exec("cat /kept")).text == "1\n"
    await client.remove_image("warm-kept")


async def test_it_is_filled_again(client: AsyncClient) -> None:
    """After claims, and after somebody killed what waits in it; who asks meanwhile gets a sandbox all the same."""
    await filled(client, 4)
    sandboxes = [await client.create("debian", **SMALL) for _ in range(3)]
    assert (await filled(client, 4)).ready >= 4
    for sandbox in sandboxes:
        assert (await sandbox.exec("true")).ok
        await sandbox.kill()


async def test_slots_that_are_killed_are_never_seen(client: AsyncClient, pool_node: NodeProcess) -> None:
    """Inits and keepers of all slots killed while creates come: each create succeeds."""
    await filled(client, 8)
    for pid in slot_processes(pool_node):
        with suppress(ProcessLookupError):  # the end of one may be that of another
            os.kill(pid, signal.SIGKILL)
    sandboxes = await asyncio.gather(*(client.create("debian", **SMALL) for _ in range(8)))
    for sandbox in sandboxes:
        assert (await sandbox.exec("echo fine")).text == "fine\n"
        await sandbox.kill()


async def test_a_refused_create_gives_its_slot_back(client: AsyncClient) -> None:
    """Nothing is lost by a create that finds no room."""
    await filled(client, 3)
    run_client = client
    with pytest.raises(barchan.NotFound):
        await run_client.create("debian", lease_id="no-such-lease")
    assert (await client.pool()).ready == 3


async def test_a_killed_node_leaves_no_slots(make_node: Callable[[], NodeProcess]) -> None:
    """Its sandboxes live on, its slots don't; the next node fills its own and finds the sandbox."""
    node = make_node()
    node.start("--warm", "4")
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        await filled(client, 4)
        kept = await client.create("debian", detach=True, ttl_s=60, **SMALL)
    supervisor = node.watch.supervisor_pid()
    node.kill()
    deadline = time.monotonic() + WAIT_S
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children")
    while len(children.read_text().split()) > 1 and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert len(children.read_text().split()) == 1
    node.start("--warm", "2")
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        assert (await filled(client, 2)).ready == 2
        assert [info.sandbox_id for info in await client.list()] == [kept.id]
        await client.kill(labels={})


async def test_a_set_up_runs_before_the_create_returns(client: AsyncClient) -> None:
    """As the sandbox's user, in its directory; a fork has what it made, and does not run it again."""
    await filled(client, 1)
    script = "echo made >> /tmp/log; id -u >> /tmp/log"
    async with await client.create("debian", user="root", setup=script, **SMALL) as sandbox:
        assert (await sandbox.exec("cat /tmp/log")).text == "made\n0\n"
        (child,) = await sandbox.fork(1)
        assert isinstance(child, barchan.AsyncSandbox)
        assert (await child.exec("cat /tmp/log")).text == "made\n0\n"
        await child.kill()


async def test_a_set_up_that_fails_takes_its_sandbox_along(client: AsyncClient) -> None:
    """The error has the exit code and what the script said; nothing of the sandbox is left."""
    with pytest.raises(barchan.SetupFailed, match="no such package") as failed:
        await client.create("debian", setup="echo no such package; exit 7", **SMALL)
    assert failed.value.details["exit_code"] == 7
    with pytest.raises(barchan.SetupFailed, match=r"longer than 0\.3 s"):
        await client.create("debian", setup="sleep 30", setup_timeout_s=0.3, **SMALL)
    assert await client.list() == []
