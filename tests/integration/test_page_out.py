"""Page-out, with real swap on compressed memory: what goes, and that it comes back as it was."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import barchan
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]
CONTROL = Path("/sys/class/zram-control")
HEAP_BYTES = 64 << 20
PYTHON = f"""
import sys
heap = bytearray({HEAP_BYTES})
for at in range(0, len(heap), 4096):
    heap[at] = at // 4096 % 251
print("on", flush=True)
for line in sys.stdin:
    print(sum(heap[::4096]), flush=True)
"""
SUM = sum(page % 251 for page in range(HEAP_BYTES // 4096))
USUAL = barchan.Waiting()


@pytest.fixture
def swap() -> Iterator[None]:
    """Swap on compressed memory, for the whole host while a test runs."""
    number = (CONTROL / "hot_add").read_text().strip()
    device = f"/dev/zram{number}"
    try:
        Path(f"/sys/block/zram{number}/disksize").write_text("256M")
        subprocess.run(["mkswap", device], check=True, capture_output=True)
        subprocess.run(["swapon", device], check=True)
        try:
            yield
        finally:
            subprocess.run(["swapoff", device], check=True)
    finally:
        (CONTROL / "hot_remove").write_text(number)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[barchan.AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def with_heap(
    client: barchan.AsyncClient, waiting: barchan.Waiting = USUAL
) -> tuple[barchan.AsyncSandbox, barchan.AsyncProcess]:
    """A sandbox with a Python that holds 64 MiB of what it knows the sum of."""
    sandbox = await client.create("debian", memory_mib=192, waiting=waiting)
    process = await sandbox.start(["python3", "-u", "-c", PYTHON])
    async for _ in process.output():
        break
    return sandbox, process


@pytest.mark.requires("zram", "mkswap")
async def test_cold_memory_goes_to_swap_and_comes_back(client: barchan.AsyncClient, swap: None) -> None:
    """Most of the heap leaves the sandbox's memory; the next request finds every byte."""
    sandbox, process = await with_heap(client)
    info = await sandbox.page_out()
    assert (info.phase, info.tier, info.stays_paused) == ("paused", "paged_out", "")
    assert info.memory_freed_bytes > HEAP_BYTES // 2
    assert (await sandbox.page_out()).tier == "paged_out"
    await process.write_stdin("\n")
    said = b""
    async for _, _, data in process.output():
        said += data
        if said.count(b"\n") == 2:
            break
    assert said.decode() == f"on\n{SUM}\n"
    assert (await sandbox.info()).tier == "running"
    assert (await sandbox.stats()).memory_bytes > HEAP_BYTES // 2


@pytest.mark.requires("zram", "mkswap")
async def test_what_a_short_turn_touches_stays(client: barchan.AsyncClient, swap: None) -> None:
    """One that goes down by itself again is not packed anew for the little that came back, but for much."""
    sandbox, process = await with_heap(client, barchan.Waiting(after_s=0.1, hibernate=False))
    freed = []
    for turn in range(3):
        if turn:
            await (sandbox.exec("true") if turn == 1 else process.write_stdin("\n"))
        async with asyncio.timeout(20):
            while (info := await sandbox.info()).tier != "paged_out":
                await asyncio.sleep(0.05)
        freed.append(info.memory_freed_bytes)
    assert [freed[0] > HEAP_BYTES // 2, freed[1], freed[2] > HEAP_BYTES // 2] == [True, 0, True]


@pytest.mark.requires("zram", "mkswap")
async def test_what_it_wrote_to_files_leaves_memory(client: barchan.AsyncClient, swap: None) -> None:
    """The page cache of its own files goes, and the files are as they were."""
    sandbox = await client.create("debian", memory_mib=192)
    write = "cd /var/tmp && head -c 64M /dev/urandom > big && sync big && sha256sum big > sum"
    (await sandbox.exec(write)).check()
    info = await sandbox.page_out()
    assert info.memory_freed_bytes > HEAP_BYTES // 2
    assert (await sandbox.exec("cd /var/tmp && sha256sum --check sum")).check().text == "big: OK\n"


async def test_without_swap_it_says_so(client: barchan.AsyncClient) -> None:
    """Only the page cache goes; it stays paused."""
    has_swap = Path("/proc/swaps").read_text().count("\n") > 1
    sandbox, _ = await with_heap(client)
    info = await sandbox.page_out()
    assert (info.phase, info.tier) == ("paused", "paged_out" if has_swap else "paused")
    assert ("no swap" in info.stays_paused) is not has_swap
    (change,) = await client.page_out_many(sandbox_ids=[sandbox.id])
    assert ("no swap" in change.refused) is not has_swap
