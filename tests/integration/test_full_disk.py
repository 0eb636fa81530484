"""A disk without a byte left: what a guest has written is kept, and nobody goes on that has no room to write."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import barchan
from barchan.errors import BarchanError, CapacityError, SandboxLost
from barchan.testing.faults.actions import fill
from barchan.testing.faults.ground import make_disk, unmount
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "userns", "mkfs.ext4"), pytest.mark.timeout(120)]
LOST_S = 60.0
KEPT_MIB = 128
GROW = "for name in a b c d e; do fallocate -l 250M $name && sleep 1 || exit; done"  # more than the pool begins with
# Past the page cache, so that it is the disk's bytes that are compared.
SUM = "tee >(sha256sum > /dev/shm/sum)"
WRITE = f"head -c {KEPT_MIB}M /dev/urandom | {SUM} | dd of=kept bs=1M iflag=fullblock oflag=direct"
READ = "dd if=kept bs=1M iflag=direct | sha256sum | cmp - /dev/shm/sum"


@pytest.fixture
def node(images: Path, tmp_path: Path) -> Iterator[NodeProcess]:
    """A node whose state has a small disk of its own."""
    make_disk(tmp_path / "disk.img", tmp_path / "disk")
    node = NodeProcess(tmp_path / "disk/state", images)
    try:
        node.start()
        yield node
        assert node.end() == []
    finally:
        unmount(tmp_path / "disk")


async def test_what_is_written_while_the_disk_is_full_is_kept(node: NodeProcess) -> None:
    """The layers of guests have their room already, and no write fails, then or later."""
    filler = node.state_dir / "filler"
    async with (
        barchan.connect_async(f"unix://{node.socket}") as client,
        await client.create("debian", disk_mib=2048) as sandbox,
    ):
        (await sandbox.exec(GROW)).check()
        fill(filler)
        (await sandbox.exec(["bash", "-c", WRITE])).check()
        (await sandbox.exec("echo small > other; sync other . kept")).check()
        filler.unlink()
        (await sandbox.exec(["bash", "-c", READ])).check()
        assert (await sandbox.exec("cat other")).text == "small\n"


async def refusal(client: barchan.AsyncClient) -> BarchanError:
    with pytest.raises(BarchanError) as caught:
        await client.create("debian")
    return caught.value


async def test_guests_that_write_more_than_there_is(node: NodeProcess) -> None:
    """Before one could run out of room that it has by its limits, all are ended, by the platform's doing. Until there
    is room again it is that which creates are refused for; then new ones start in a new pool.
    """
    filler = node.state_dir / "filler"
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        sandbox = await client.create("debian", disk_mib=4096)
        fill(filler)
        with pytest.raises(SandboxLost):
            await sandbox.exec("head -c 4G /dev/zero > more", timeout_s=LOST_S)
        async with asyncio.timeout(LOST_S):
            while not isinstance(refused := await refusal(client), CapacityError):  # the supervisor is at its end
                await asyncio.sleep(0.2)
        assert refused.details["retry_after_ms"], refused
        filler.unlink()
        async with asyncio.timeout(LOST_S):
            while True:
                try:
                    other = await client.create("debian")
                except BarchanError:  # the supervisor is at its end
                    await asyncio.sleep(0.2)
                else:
                    break
        assert (await other.exec("echo on > kept; sync; cat kept")).text == "on\n"
        await other.kill()
