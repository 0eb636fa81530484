"""Images read on demand: right bytes or none, whatever becomes of the reader, the store, the cache or the node."""

import asyncio
import hashlib
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

import barchan
from barchan import AsyncClient, AsyncSandbox
from barchan.errors import BlobUnavailable
from barchan.image import remote
from barchan.image.blobs import BlobStore
from barchan.image.pack import pack_tree
from barchan.image.store import ImageStore, NewLayer
from barchan.image.stored import data_key, read_lazy
from barchan.image.template import Layer, TemplateConfig
from barchan.model.sandbox import SandboxSpec
from barchan.rollout.verdict import verdict_of_error
from tests.leaks import parent_of, processes
from tests.nodes import NodeProcess
from tests.stores import copy_base
from tests.stores_http import served

pytestmark = [pytest.mark.requires("root", "cgroup", "fuse"), pytest.mark.timeout(120)]

FILES, FILE_BYTES, BIG_BYTES = 24, 300_000, 12 << 20
WAIT_S = 60.0


class Sent(NamedTuple):
    """A store in a directory, and what its image has in /data: name -> sha256."""

    root: Path
    sums: dict[str, str]


def silent(*_: object, **__: object) -> None:
    """Progress that nobody watches."""


@pytest.fixture(scope="module")
def sent(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Sent:
    """The image `data`: a layer of random files over the base image, in a store."""
    root = tmp_path_factory.mktemp("sent")
    local = ImageStore(copy_base(images, root / "images"))
    source, folder = random.Random(4), root / "tree" / "data"
    folder.mkdir(parents=True)
    sums = {}
    for name, size in {**{f"f{n:02d}": FILE_BYTES for n in range(FILES)}, "big": BIG_BYTES}.items():
        content = source.randbytes(size)
        (folder / name).write_bytes(content)
        sums[name] = hashlib.sha256(content).hexdigest()
    base = local.resolve("debian")
    with local.workspace() as workspace:
        packed = workspace / "layer.erofs"
        digest = pack_tree(root / "tree", packed)
        config = TemplateConfig(name="data", user=base.user, workdir=base.workdir, env=base.env)
        local.commit(config, (NewLayer(Layer(digest, "erofs"), packed), *base.layers))
    asyncio.run(remote.push(local, "data", BlobStore.open(str(root / "store")), silent))
    return Sent(root=root / "store", sums=sums)


class Place:
    """A node with an image store of its own, into which `data` was fetched: its topmost layer is read on demand."""

    def __init__(self, node: NodeProcess, store: Path, sums: dict[str, str]) -> None:
        self.node = node
        self.store = store
        self.sums = sums
        self.images = ImageStore(node.state_dir / "images")
        layer = self.images.resolve("data").layers[0]
        self.index = read_lazy(self.images.layer_path(layer)).index

    @property
    def data(self) -> Path:
        """The layer's data in the store."""
        return self.store / data_key(self.index)

    def readers(self) -> list[int]:
        """Readers of this node; each has a child that mounts, which is not told."""
        own = str(self.node.state_dir / "cache")
        found = {pid for pid, argv in processes() if "barchan.image.lazy" in argv and own in argv}
        parents = {pid: parent_of(pid) for pid in found}
        return [pid for pid, parent in parents.items() if parent and parent not in found]

    def cached_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in (self.node.state_dir / "cache").glob("*.data"))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncClient]:
        async with barchan.connect_async(f"unix://{self.node.socket}") as client:
            yield client


MakePlace = Callable[..., Awaitable[Place]]


@pytest.fixture
def make_place(sent: Sent, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakePlace]:
    """Makes places, each with a copy of the store, and starts their nodes."""
    made: list[Place] = []

    async def make(*options: str, with_base: bool = True, address: Callable[[Path], str] = str) -> Place:
        root = tmp_path_factory.mktemp("place")
        shutil.copytree(sent.root, root / "store")
        local = ImageStore(copy_base(images, root / "images") if with_base else root / "images")
        await remote.fetch(local, "data", BlobStore.open(address(root / "store")))
        node = NodeProcess(tmp_path_factory.mktemp("node"), root / "images")
        made.append(Place(node, root / "store", sent.sums))
        node.start(*options)
        return made[-1]

    yield make
    assert [line for place in made for line in place.node.end()] == []


async def sums(sandbox: AsyncSandbox, names: str = "*") -> dict[str, str]:
    """sha256 of files of /data, as the guest reads them."""
    result = await sandbox.exec(f"cd /data && sha256sum {names}", timeout_s=WAIT_S)
    return {name: digest for digest, name in (line.split() for line in result.check().text.splitlines())}


async def test_a_sandbox_starts_and_reads_what_it_touches_only(make_place: MakePlace) -> None:
    """Programs run, files are right, and a part of the image came; a second sandbox costs nothing more."""
    place = await make_place(with_base=False)
    async with place.client() as client:
        async with await client.create("data") as sandbox:
            assert (await sandbox.exec("python3 -c 'print(6 * 7)'")).check().text == "42\n"
            assert await sums(sandbox, "f03 f11") == {name: place.sums[name] for name in ("f03", "f11")}
            touched = place.cached_bytes()
            whole = sum(read_lazy(path).index.raw_bytes for path in (place.node.state_dir / "cache").glob("*.lazy"))
            assert 0 < touched < whole / 3
        async with await client.create("data") as again:
            assert await sums(again, "f03 f11") == {name: place.sums[name] for name in ("f03", "f11")}
            assert place.cached_bytes() == touched


async def test_a_killed_reader_is_replaced_and_its_reads_are_answered(make_place: MakePlace) -> None:
    """Killed again and again while two sandboxes read all there is: they get every byte, and no error."""
    place = await make_place()
    async with place.client() as client:
        one, other = await client.create("data"), await client.create("data")
        reading = [asyncio.create_task(sums(sandbox)) for sandbox in (one, other)]
        for _ in range(4):
            await asyncio.sleep(0.1)
            for pid in place.readers():
                with suppress(ProcessLookupError):  # it left by itself between the look and the kill
                    os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*reading) == [place.sums, place.sums]
        while len(place.readers()) != 1:
            await asyncio.sleep(0.05)


async def until_lost(sandbox: AsyncSandbox) -> BlobUnavailable:
    """Wait for the sandbox's end; it must be for want of bytes."""
    with pytest.raises(BlobUnavailable) as caught:
        async with asyncio.timeout(WAIT_S):
            while True:
                await sandbox.exec("true")
                await asyncio.sleep(0.1)
    return caught.value


# Reads one file after the other, over and over, and says so if that ever fails.
READ_ON = """
cd /data; echo begun
while :; do for f in f*; do
    if cat $f > /dev/null 2>&1; then echo read $f; else echo FAILED $f; echo FAILED > /dev/shm/failed; fi
done; done
"""


async def test_a_store_that_goes_ends_who_reads_and_nobody_else(make_place: MakePlace) -> None:
    """The reading sandbox ends as lost, before its program saw an error; one that reads what is here lives on."""
    place = await make_place("--image-wait-s", "1")
    async with place.client() as client:
        idle, reading = await client.create("data"), await client.create("data")
        await sums(idle, "f00")
        place.store.rename(place.store.with_name("away"))
        process = await reading.start(READ_ON)
        seen: list[bytes] = []
        with pytest.raises(BlobUnavailable) as caught:
            async for _, _, data in process.output():
                seen.append(data)
        told = b"".join(seen)
        assert b"begun" in told and b"FAILED" not in told
        assert str(caught.value.details["cause"]).startswith("blob_unavailable: layer")
        verdict = verdict_of_error(caught.value, "exec")
        assert (verdict.status, verdict.fault, verdict.cause, verdict.reward) == (
            "void",
            "platform",
            "image_unavailable",
            None,
        )
        assert (await reading.info()).phase == "lost"
        assert await sums(idle, "f00") == {"f00": place.sums["f00"]}
        place.store.with_name("away").rename(place.store)
        assert await sums(idle) == place.sums


async def test_who_gives_up_a_mount_leaves_it_to_the_others(make_place: MakePlace) -> None:
    """Two creates wait for one mount; the first is cancelled, and the second gets its sandbox."""
    place = await make_place()
    place.store.rename(place.store.with_name("away"))
    async with place.client() as client:
        first = asyncio.create_task(client.create("data"))
        await asyncio.sleep(0.5)
        second = asyncio.create_task(client.create("data"))
        await asyncio.sleep(0.5)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        place.store.with_name("away").rename(place.store)
        assert await sums(await second, "f01") == {"f01": place.sums["f01"]}


async def test_creates_that_fail_for_want_of_bytes_say_so(make_place: MakePlace) -> None:
    """All that wait for a mount; one that is repeated; one whose sandbox has begun to boot."""
    place = await make_place("--image-wait-s", "1", with_base=False)
    away = place.store.with_name("away")
    place.store.rename(away)
    async with place.client() as client:
        wish = SandboxSpec(template="data", create_id="again", detach=True, ttl_s=600)
        found = await asyncio.gather(client.create(wish), client.create("data"), return_exceptions=True)
        assert [type(error) for error in found] == [BlobUnavailable] * 2
        away.rename(place.store)
        with pytest.raises(BlobUnavailable):
            await client.create(wish)
        await (await client.create("data")).kill()
        # The layers are mounted, and not a byte of them is anywhere here.
        place.store.rename(away)
        for pid in place.readers():
            os.kill(pid, signal.SIGKILL)
        for path in (place.node.state_dir / "cache").glob("*.data"):
            path.unlink()
        await asyncio.to_thread(Path("/proc/sys/vm/drop_caches").write_text, "3")
        with pytest.raises(BlobUnavailable, match="has ended: blob_unavailable"):
            await client.create("data")


async def test_a_layer_that_became_whole_is_read_from_its_file(make_place: MakePlace) -> None:
    """As soon as no sandbox uses what was read on demand; what was cached goes."""
    place = await make_place()
    async with place.client() as client:
        sandbox = await client.create("data")
        await sums(sandbox, "f00")
        await remote.pull(place.images, "data", BlobStore.open(str(place.store)), silent)
        place.store.rename(place.store.with_name("away"))
        other = await client.create("data")
        assert place.cached_bytes() > 0
        await sandbox.kill()
        await other.kill()
        assert await sums(await client.create("data")) == place.sums
        assert place.cached_bytes() == 0


async def test_time_spent_waiting_for_a_store_is_no_time_out(make_place: MakePlace) -> None:
    """A program whose time goes by so ends its sandbox as lost; one that sleeps has had its time."""
    place = await make_place("--image-wait-s", "3600")
    async with place.client() as client:
        reading, sleeping = await client.create("data"), await client.create("data")
        place.store.rename(place.store.with_name("away"))
        with pytest.raises(BlobUnavailable, match="have waited"):
            await reading.exec("cat /data/f00 /data/f20", timeout_s=2)
        result = await sleeping.exec("sleep 600", timeout_s=2)
        assert result.timed_out
        place.store.with_name("away").rename(place.store)
        assert await sums(sleeping, "f02") == {"f02": place.sums["f02"]}


async def test_a_store_that_is_away_for_a_while_is_waited_for(make_place: MakePlace) -> None:
    """Reads wait within the bound, and succeed."""
    place = await make_place()
    async with place.client() as client, await client.create("data") as sandbox:
        place.store.rename(place.store.with_name("away"))
        reading = asyncio.create_task(sums(sandbox))
        await asyncio.sleep(0.5)
        assert not reading.done()
        place.store.with_name("away").rename(place.store)
        assert await reading == place.sums


@pytest.mark.requires("nginx")
async def test_a_slow_store_is_waited_for(make_place: MakePlace, tmp_path: Path) -> None:
    """Over HTTP, at a rate at which a read of many chunks takes far longer than one chunk may."""
    with ExitStack() as stack:

        def serve(root: Path) -> str:
            return stack.enter_context(served(root, tmp_path / "nginx", "limit_rate 100k;"))

        place = await make_place("--image-wait-s", "3", address=serve)
        async with place.client() as client, await client.create("data") as sandbox:
            assert await sums(sandbox, "f00 f17") == {name: place.sums[name] for name in ("f00", "f17")}


async def test_a_sandbox_that_waits_for_a_store_can_be_ended(make_place: MakePlace) -> None:
    """Long before the bound, and with its reader as healthy as before."""
    place = await make_place("--image-wait-s", "3600")
    async with place.client() as client:
        sandbox, other = await client.create("data"), await client.create("data")
        place.store.rename(place.store.with_name("away"))
        reading = asyncio.create_task(sums(sandbox))
        await asyncio.sleep(0.5)
        async with asyncio.timeout(WAIT_S):
            await sandbox.kill()
        with pytest.raises(barchan.SandboxExpired):
            await reading
        place.store.with_name("away").rename(place.store)
        assert await sums(other) == place.sums


async def test_a_corrupt_chunk_is_refused_and_the_others_are_right(make_place: MakePlace) -> None:
    """Nobody sees a wrong byte: who reads it is ended, who reads another file is not."""
    place = await make_place("--image-wait-s", "5")
    stored = place.index.stored(place.index.count // 2)
    with place.data.open("r+b") as file:
        file.seek(stored.offset + stored.length // 2)
        file.write(b"wrong bytes")
    async with place.client() as client:
        found: dict[str, str] = {}
        for name in place.sums:
            sandbox = await client.create("data")
            try:
                found |= await sums(sandbox, name)
                await sandbox.kill()
            except BlobUnavailable as error:
                assert "sha256" in str(error.details["cause"]) or "zstd" in str(error.details["cause"])
        assert len(found) == len(place.sums) - 1
        assert found.items() <= place.sums.items()


async def test_a_small_cache_is_right_as_well(make_place: MakePlace) -> None:
    """A budget far below what is read: chunks come and go, and every byte is right."""
    place = await make_place("--image-cache-mib", "2")
    async with place.client() as client:
        one, other = await client.create("data"), await client.create("data")
        for _ in range(2):
            for found in await asyncio.gather(sums(one), sums(other)):
                assert found == place.sums
            await asyncio.to_thread(Path("/proc/sys/vm/drop_caches").write_text, "1")
        assert place.cached_bytes() < 4 << 20


async def test_the_next_node_serves_what_an_earlier_one_started(make_place: MakePlace) -> None:
    """Sandboxes read on while no node is there and after one came, also when the reader died in between."""
    place = await make_place("--image-wait-s", "2")
    async with place.client() as client:
        sandbox = await client.create("data", detach=True, ttl_s=600)
        await sandbox.exec("cat /data/f00 > /dev/null")
    place.node.kill()
    for pid in place.readers():
        os.kill(pid, signal.SIGKILL)
    place.node.start("--image-wait-s", "2")
    async with place.client() as client:
        again = await client.attach(sandbox.id)
        assert await sums(again) == place.sums


async def test_a_read_that_fails_while_no_node_is_there_waits_for_one(make_place: MakePlace) -> None:
    """Without a node nothing is answered; the next one ends the sandbox first."""
    place = await make_place("--image-wait-s", "1")
    async with place.client() as client:
        sandbox = await client.create("data", detach=True, ttl_s=600)
        place.store.rename(place.store.with_name("away"))
        await sandbox.start(READ_ON)
        place.node.kill()
        await asyncio.sleep(2.0)
        place.node.start("--image-wait-s", "1")
        async with place.client() as second:
            with pytest.raises(BlobUnavailable):
                async with asyncio.timeout(WAIT_S):
                    while True:
                        await (await second.attach(sandbox.id)).exec("true")
