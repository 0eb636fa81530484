"""The reader without a node or sandboxes: what it answers, when, and what it knows of first reads."""

import asyncio
import errno
import hashlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from barchan.backends.container.hot import FirstReads
from barchan.backends.container.lazy import LazyReader, ReaderSettings, Unavailable
from barchan.backends.container.supervisor import Answer
from barchan.errors import BackendError
from barchan.image import remote
from barchan.image.blobs import BlobStore
from barchan.image.hot import HotRecord, read_hot, write_hot
from barchan.image.pack import pack_tree
from barchan.image.store import ImageStore, NewLayer
from barchan.image.stored import read_lazy
from barchan.image.template import Layer, TemplateConfig
from barchan.wire.supervisor import Message
from tests.fuse import open_fuse
from tests.hostile_layers import pack_hostile
from tests.leaks import parent_of, processes

pytestmark = [pytest.mark.requires("root", "fuse"), pytest.mark.timeout(60)]

CONTENT = {f"f{n}": random.Random(n).randbytes(400_000) for n in range(8)}


def silent(*_: object, **__: object) -> None:
    """Progress that nobody watches."""


class Served:
    """A reader of one image, whose only layer is kept lazily, and its mount."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.device, self.directory = open_fuse()
        self.told: list[Unavailable] = []
        self.images = ImageStore(root / "images")
        self.store = BlobStore.open(str(root / "store"))
        self.mounted = -1
        self.reader: LazyReader

    async def begin(self) -> None:
        folder = self.root / "tree"
        folder.mkdir()
        for name, content in CONTENT.items():
            (folder / name).write_bytes(content)
        made = ImageStore(self.root / "made")
        with made.workspace() as workspace:
            digest = pack_tree(folder, workspace / "layer")
            made.commit(TemplateConfig(name="data"), (NewLayer(Layer(digest, "erofs"), workspace / "layer"),))
        await remote.push(made, "data", self.store, silent)
        self.template = await remote.fetch(self.images, "data", self.store)
        self.layer = self.template.layers[0]
        self.state_dir = self.root / "state"
        self.state_dir.mkdir()
        self.reader = self.node()
        self.mounted = await self.reader.mount(self.layer.digest, self.images.layer_path(self.layer))

    def node(self) -> LazyReader:
        settings = ReaderSettings(cache_mib=64, wait_s=0.5)
        return LazyReader(self.state_dir, self.ask, self.told.append, settings)

    async def ask(self, op: str) -> Answer:
        assert op == "fuse"
        return Answer(Message("ok", ()), [os.dup(self.device), os.dup(self.directory)])

    def pids(self) -> list[int]:
        return [pid for pid, argv in processes() if str(self.state_dir / "cache") in argv]

    async def read(self, name: str) -> str:
        def whole() -> str:
            with open(os.open(name, os.O_RDONLY, dir_fd=self.mounted), "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        return await asyncio.to_thread(whole)

    def forget(self, name: str) -> None:
        """Have the kernel drop what it keeps of a file's data."""
        fd = os.open(name, os.O_RDONLY, dir_fd=self.mounted)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    async def end(self) -> None:
        """Let go of the file system: the reader ends by itself."""
        await self.reader.close()
        for fd in (self.mounted, self.directory, self.device):
            if fd >= 0:
                os.close(fd)
        while self.pids():
            await asyncio.sleep(0.02)


def sha256(name: str) -> str:
    return hashlib.sha256(CONTENT[name]).hexdigest()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    served = Served(tmp_path)
    await served.begin()
    yield served
    await served.end()
    assert not (served.state_dir / "reader.sock").exists()


async def test_an_error_comes_only_after_the_node_was_told(served: Served) -> None:
    """Without a node a read that fails waits; told and acknowledged it is an error, and later reads are right."""
    assert await served.read("f0") == sha256("f0")
    (served.root / "store").rename(served.root / "away")
    await served.reader.close()
    reading = asyncio.create_task(served.read("f5"))
    await asyncio.sleep(1.5)
    assert not reading.done() and served.told == []
    served.reader = served.node()
    served.reader.start([served.layer.digest])
    with pytest.raises(OSError) as caught:
        await reading
    assert caught.value.errno == errno.EIO
    assert {told.layer for told in served.told} == {served.layer.digest}
    assert all(Path(f"/proc/self/task/{told.pid}").exists() or told.pid for told in served.told)
    (served.root / "away").rename(served.root / "store")
    assert await served.read("f5") == sha256("f5")
    assert (await served.reader.statistics())["waiting"] == 0


async def test_killed_at_any_time_it_goes_on_with_what_it_had(served: Served) -> None:
    """What is in the cache is not fetched again, and a killed reader leaves nobody waiting."""
    for name in CONTENT:
        reading = asyncio.create_task(served.read(name))
        await asyncio.sleep(0.01)
        for pid in served.pids():
            os.kill(pid, signal.SIGKILL)
        assert await reading == sha256(name)
    for pid in served.pids():
        os.kill(pid, signal.SIGKILL)
    for name in CONTENT:
        served.forget(name)
        assert await served.read(name) == sha256(name)
    assert (await served.reader.statistics())["bytes_fetched"] == 0
    assert served.told == []


async def test_first_reads_are_noted_once_and_fetched_early_ever_after(served: Served, tmp_path: Path) -> None:
    """In the order of their first touch; another reader with an empty cache has them before anybody reads."""
    first = FirstReads(served.reader, served.images, record_s=1.0)
    first.begin(served.template, {served.layer.digest})
    await asyncio.sleep(0.2)
    assert await served.read("f6") == sha256("f6")
    assert await served.read("f2") == sha256("f2")
    while not (record := await read_hot(served.store, served.template.digest)):
        await asyncio.sleep(0.05)
    await first.close()
    index = read_lazy(served.images.layer_path(served.layer)).index
    ((digest, chunks),) = record
    assert digest == served.layer.digest
    assert len(chunks) >= 2 * 400_000 // index.chunk_bytes
    assert chunks.index(max(chunks[:3])) < 3 and list(chunks) != sorted(chunks)  # f6 lies behind f2

    other = Served(tmp_path / "other")
    other.state_dir, other.images, other.layer = tmp_path / "other", served.images, served.layer
    other.state_dir.mkdir()
    other.reader = other.node()
    other.mounted = await other.reader.mount(served.layer.digest, served.images.layer_path(served.layer))
    again = FirstReads(other.reader, served.images)
    again.begin(served.template, {served.layer.digest})
    while (await other.reader.statistics())["bytes_cached"] < len(chunks) * index.chunk_bytes:
        await asyncio.sleep(0.02)
    os.close(other.mounted)
    await other.reader.drop(digest)
    again.begin(served.template, set())  # which nobody has to fetch for
    other.mounted = await other.reader.mount(digest, served.images.layer_path(served.layer))
    again.begin(served.template, {digest})  # mounted anew, with nothing of it here any more
    while (await other.reader.statistics())["bytes_cached"] < len(chunks) * index.chunk_bytes:
        await asyncio.sleep(0.02)
    await again.close()
    fetched = (await other.reader.statistics())["bytes_fetched"]
    assert await other.read("f6") == sha256("f6")
    assert (await other.reader.statistics())["bytes_fetched"] == fetched
    await other.end()


async def test_a_record_that_lacks_a_layer_is_added_to(served: Served) -> None:
    """By the first sandbox for which that layer was mounted anew; by no other, of which the kernel may hide reads."""
    before: HotRecord = (("0" * 64, (7,)),)
    await write_hot(served.store, served.template.digest, before)
    warm = FirstReads(served.reader, served.images, record_s=0.2)
    warm.begin(served.template, set())
    await asyncio.sleep(0.1)
    assert await served.read("f6") == sha256("f6")
    await asyncio.sleep(0.3)
    await warm.close()
    assert await read_hot(served.store, served.template.digest) == before
    cold = FirstReads(served.reader, served.images, record_s=1.0)
    cold.begin(served.template, {served.layer.digest})
    await asyncio.sleep(0.2)
    assert await served.read("f2") == sha256("f2")
    while (record := await read_hot(served.store, served.template.digest)) == before:
        await asyncio.sleep(0.05)
    await cold.close()
    assert {digest for digest, _ in record} == {"0" * 64, served.layer.digest}
    assert await served.reader.stop_record(served.layer.digest) == []  # it notes no more


async def test_a_layer_that_rests_keeps_its_data(served: Served) -> None:
    """Unmounted with its image there: what was read is not fetched again; the image gone, it goes, too."""
    path = served.images.layer_path(served.layer)
    assert await served.read("f1") == sha256("f1")
    for _ in range(2):
        os.close(served.mounted)
        served.mounted = -1
        await served.reader.drop(served.layer.digest, keeps_data=True)
        assert served.reader.served == set() and served.reader.known == {served.layer.digest}
        fetched = (await served.reader.statistics())["bytes_fetched"]
        served.mounted = await served.reader.mount(served.layer.digest, path)
        assert await served.read("f1") == sha256("f1")
        assert (await served.reader.statistics())["bytes_fetched"] == fetched
    os.close(served.mounted)
    served.mounted = -1
    await served.reader.drop(served.layer.digest, keeps_data=True)
    await served.reader.drop(served.layer.digest)
    assert served.reader.known == set()


async def test_a_dropped_layer_leaves_nothing(served: Served) -> None:
    """Unmounted, and its image removed."""
    assert await served.read("f1") == sha256("f1")
    os.close(served.mounted)
    served.mounted = -1
    await served.reader.drop(served.layer.digest)
    assert sorted(path.name for path in (served.state_dir / "cache").iterdir()) == ["lock"]
    assert served.reader.known == set()


async def test_a_layer_whose_description_is_spoilt_hurts_no_other(served: Served) -> None:
    """The next reader starts and says so; reads of it are reported, and it is whole again once it is mounted anew."""
    assert await served.read("f0") == sha256("f0")
    path = served.images.layer_path(served.layer)
    (served.state_dir / "cache" / path.name).write_bytes(b"")
    said: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    for pid in served.pids():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(OSError) as caught:
        await served.read("f5")
    assert caught.value.errno == errno.EIO
    assert {told.layer for told in served.told} == {served.layer.digest}
    assert all("can't be read" in told.cause for told in served.told)
    assert [str(context["message"]) for context in said] == [f"the reader can't serve layer {served.layer.digest[:12]}"]
    os.close(await served.reader.mount(served.layer.digest, path))
    assert await served.read("f5") == sha256("f5")


async def test_without_the_child_that_mounts_another_reader_comes(served: Served) -> None:
    """A reader that can't mount is of no use for new sandboxes, and ends."""
    pids = served.pids()
    (child,) = [pid for pid in pids if parent_of(pid) in pids]
    os.kill(child, signal.SIGKILL)
    while set(pids) & set(served.pids()):
        await asyncio.sleep(0.01)
    os.close(await served.reader.mount(served.layer.digest, served.images.layer_path(served.layer)))
    assert await served.read("f3") == sha256("f3")
    assert served.told == []


async def test_a_layer_that_no_packer_made_is_not_mounted(served: Served, tmp_path: Path) -> None:
    """The kernel gets to see only what was looked at: no device, and no attribute that layers don't have."""
    made = ImageStore(tmp_path / "hostile")
    with made.workspace() as workspace:
        packed = workspace / "layer"
        digest = pack_hostile(tmp_path / "tree", packed)
        made.commit(TemplateConfig(name="hostile"), (NewLayer(Layer(digest, "erofs"), packed),))
    await remote.push(made, "hostile", served.store, silent)
    layer = (await remote.fetch(served.images, "hostile", served.store)).layers[0]
    with pytest.raises(BackendError, match="null is a device"):
        await served.reader.mount(layer.digest, served.images.layer_path(layer))
    assert await served.read("f2") == sha256("f2")


async def test_a_read_of_a_layer_that_was_given_up_is_reported(served: Served) -> None:
    """By mistake, while it is mounted: nobody sees an error that the node was not told of."""
    assert await served.read("f1") == sha256("f1")
    await served.reader.drop(served.layer.digest)
    with pytest.raises(OSError) as caught:
        await served.read("f6")
    assert caught.value.errno == errno.EIO
    assert served.told != []
