"""A node's memory: what it says of it, whom it refuses, and whose fault it is when the host has none left."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import barchan
from barchan import AsyncClient
from barchan.rollout.verdict import verdict_of_error
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]
CGROUPS = Path("/sys/fs/cgroup")
OVERCOMMIT = 0.06  # of a host with 24 GiB: 1.4
MIB = 1 << 20


@pytest.fixture(scope="module")
def full_node(make_node: Callable[[], NodeProcess]) -> NodeProcess:
    node = make_node()
    node.start("--memory-overcommit", str(OVERCOMMIT))
    return node


@pytest.fixture
async def client(full_node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{full_node.socket}") as client:
        yield client


def memory_limit(node: NodeProcess) -> Path:
    """The file that bounds all of a node's sandboxes together."""
    stat = node.state_dir.stat()
    name = f"n{stat.st_ino:x}-{stat.st_dev:x}"
    paths = (CGROUPS / "memory/barchan" / name / "memory.limit_in_bytes", CGROUPS / "barchan" / name / "memory.max")
    return next(path for path in paths if path.exists())


async def test_it_says_what_is_asked_for_and_used(client: AsyncClient) -> None:
    """Limits count as asked for while a sandbox is awake; what a paused one holds can be had back."""
    before = (await client.node_info()).memory
    assert before is not None
    async with await client.create("debian", memory_mib=256) as sandbox:
        await sandbox.start(["python3", "-c", f"x = bytearray({64 * MIB}); input()"])
        deadline = time.monotonic() + 20
        while (await sandbox.stats()).memory_bytes < 64 * MIB and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        awake = (await client.node_info()).memory
        assert awake is not None
        assert awake.requested_mib == before.requested_mib + 256
        assert awake.used_mib >= 64
        assert awake.total_mib >= awake.available_mib > 0
        await sandbox.pause()
        paused = (await client.node_info()).memory
        assert paused is not None
        assert paused.requested_mib == before.requested_mib
        assert paused.reclaimable_mib >= 0


async def test_more_than_the_overcommit_is_refused(client: AsyncClient) -> None:
    """With what is short in the message; a sandbox that is paused makes room for another."""
    memory = (await client.node_info()).memory
    assert memory is not None
    most_mib = memory.requested_max_mib
    assert most_mib == int(memory.total_mib * OVERCOMMIT)
    async with await client.create("debian", memory_mib=most_mib - 100) as sandbox:
        with pytest.raises(barchan.CapacityError, match="awake"):
            await client.create("debian", memory_mib=200)
        await sandbox.pause()
        await asyncio.sleep(0.5)  # the node looks four times a second
        async with await client.create("debian", memory_mib=200) as other:
            assert (await other.exec("echo fine")).text == "fine\n"
        assert (await sandbox.exec("echo awake")).text == "awake\n"


async def test_a_kill_by_the_host_is_no_fault_of_the_guest(client: AsyncClient, full_node: NodeProcess) -> None:
    """A program killed though its own limit was not reached: the sandbox is lost, marked so, and its rollout void."""
    async with await client.create("debian", memory_mib=1024) as sandbox:
        limit = memory_limit(full_node)
        before = limit.read_text()
        used = (await client.node_info()).memory
        assert used is not None
        limit.write_text(str((used.used_mib + 128) * MIB))
        try:
            with pytest.raises(barchan.SandboxLost) as lost:
                await sandbox.exec(["python3", "-c", f"x = bytearray({700 * MIB})"])
        finally:
            limit.write_text("-1" if "limit_in_bytes" in limit.name else before)
        assert str(lost.value.details["cause"]).startswith("evicted: ")
        assert (await sandbox.info()).end_cause == lost.value.details["cause"]
        assert verdict_of_error(lost.value, "exec").status == "void"


async def test_its_own_limit_stays_the_guests_fault(client: AsyncClient) -> None:
    """What reaches the limit it was given is killed in the guest, which lives on."""
    async with await client.create("debian", memory_mib=64) as sandbox:
        assert (await sandbox.exec(["python3", "-c", f"x = bytearray({200 * MIB})"])).oom_killed
        assert (await sandbox.exec("kill -9 $$")).oom_killed is False
        assert (await sandbox.exec("echo alive")).text == "alive\n"
