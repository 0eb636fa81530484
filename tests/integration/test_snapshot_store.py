"""Memory snapshots on disk and in a blob store: packing is killed, files go from node to node, claims race."""

import asyncio
import hashlib
import json
import random
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from barchan.backends import tools
from barchan.backends.container import criu
from barchan.errors import BlobCorrupt, Conflict, InvalidSpec, NotFound, SnapshotCorrupt
from barchan.image.blobs import BlobStore
from barchan.image.pack import pack_tree
from barchan.image.store import ImageStore, NewLayer
from barchan.image.template import Layer, Template, TemplateConfig
from barchan.model.sandbox import SandboxSpec
from barchan.snapshot.generations import Hibernated, claim, current, give_back, publish, retire
from barchan.snapshot.pagemap import PAGE_BYTES
from barchan.snapshot.remote import memory_key, pull, push
from barchan.snapshot.shelf import Shelf
from tests.lazy_memory import Ground, ask
from tests.memory_dirs import content, make_memory
from tests.stores_http import served

DIGEST = "0" * 64
MIB = 1 << 20
RIGHT = "hashlib.sha256(ballast).hexdigest() == expected and table_is_right()"


def quiet(what: str, done: int, total: int) -> None:
    """No progress is shown."""


def opened_shelf(root: Path) -> Shelf:
    shelf = Shelf(root, free_bytes_min=0)
    assert shelf.start() == []
    return shelf


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_process_killed_while_it_packs_leaves_nothing(tmp_path: Path) -> None:
    """Wherever SIGKILL comes, there is the whole snapshot or none, and the next start leaves no other file."""
    noise = random.Random(3).randbytes(40 << 20)
    memory = make_memory(tmp_path / "memory", list(range(3000)), files={"spool/0": noise})
    root = tmp_path / "shelf"
    opened_shelf(root)
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from barchan.snapshot.shelf import Shelf
        shelf = Shelf(Path(sys.argv[1]), free_bytes_min=0)
        print("begins", flush=True)
        shelf.pack("one", Path(sys.argv[2]))
        print("ended", flush=True)
        sys.stdin.read()
    """)
    ended = 0
    for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1, 0.2, None):
        command = [sys.executable, "-c", code, str(root), str(memory)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as packing:
            assert packing.stdout is not None
            assert packing.stdout.readline() == "begins\n"
            if delay_s is None:
                assert packing.stdout.readline() == "ended\n"
            else:
                time.sleep(delay_s)
            packing.send_signal(signal.SIGKILL)
        shelf = opened_shelf(root)
        if shelf.entries():
            ended += 1
            with shelf.open("one") as found:
                found.verify()
                found.unpack(tmp_path / "again")
            assert content(tmp_path / "again") == content(memory)
            subprocess.run(["rm", "-r", tmp_path / "again"], check=True)
            shelf.remove("one")
        assert names(root) == []
    assert ended >= 1


@pytest.mark.requires("root", "cgroup", "criu")
async def test_a_real_program_comes_back_from_its_file(tmp_path: Path) -> None:
    """What CRIU dumped is the same after packing, also on top of an earlier dump, and the program goes on from it."""
    found = criu.find(tools.SHARED_STATE_DIR)
    assert found is not None
    ground, shelf = Ground("store", found.command), opened_shelf(tmp_path / "shelf")
    with closing(ground):
        ground.start(tmp_path, 8)
        ground.dump(tmp_path / "first")
        first = shelf.pack("first", tmp_path / "first")
        with shelf.open("first") as opened:
            opened.unpack(tmp_path / "first-again")
            maps = opened.page_maps()
        assert content(tmp_path / "first-again") == content(tmp_path / "first")
        assert sum(run.pages for runs in maps.values() for run in runs) == first.pages
        assert any(run.is_lazy for runs in maps.values() for run in runs)
        (tmp_path / "work").mkdir()
        ground.restore(tmp_path / "first-again/criu", tmp_path / "work", lazy=False)
        assert await ask(tmp_path, RIGHT) is True
        ground.dump(tmp_path / "second")
    second = shelf.pack("second", tmp_path / "second", base="first")
    with shelf.open("second") as opened:
        opened.unpack(tmp_path / "second-again")
    assert content(tmp_path / "second-again") == content(tmp_path / "second")
    assert second.pages_base > 8 * MIB // PAGE_BYTES
    assert second.file_bytes < first.file_bytes / 4


def make_image(images: ImageStore, name: str, folder: Path) -> Template:
    tree = folder / "tree"
    tree.mkdir()
    (tree / "file").write_text(name)
    with images.workspace() as workspace:
        path = workspace / "layer"
        pack_tree(tree, path, mtime_unix_s=1)
        layer = Layer(hashlib.sha256(path.read_bytes()).hexdigest(), "erofs")
        return images.commit(TemplateConfig(name=name), (NewLayer(layer, path),))


@pytest.mark.parametrize("kind", ["directory", pytest.param("http", marks=pytest.mark.requires("nginx"))])
async def test_a_snapshot_goes_from_node_to_node(tmp_path: Path, kind: str) -> None:
    """A snapshot with a base is sent once, and comes back whole on another node, image and memory."""
    images, shelf = ImageStore(tmp_path / "images"), opened_shelf(tmp_path / "shelf")
    template = make_image(images, "hib-1", tmp_path)
    noise = {"spool/0": random.Random(4).randbytes(20 << 20)}  # several ranges
    shelf.pack("base", make_memory(tmp_path / "below", list(range(200)), files=noise))
    memory = make_memory(tmp_path / "memory", list(range(260)), files={"spool/0": b"more"})
    shelf.pack("one", memory, base="base")
    store = BlobStore.open(str(tmp_path / "blobs"))
    sent = await push(images, "hib-1", shelf, "one", store, quiet)
    again = await push(images, "hib-1", shelf, "one", store, quiet)
    assert sent.template == template.digest
    assert (again.memory, again.bytes_sent) == (sent.memory, 0) == (shelf.entry("one").digest, 0)
    assert sent.bytes_sent > sum(len(data) for data in noise.values())

    other_images, other = ImageStore(tmp_path / "other-images"), opened_shelf(tmp_path / "other")
    with ExitStack() as entered:
        source = store
        if kind == "http":
            source = BlobStore.open(entered.enter_context(served(tmp_path / "blobs", tmp_path / "nginx")))
        found = await pull(other_images, sent.template, other, "snap", sent.memory, source, quiet)
        assert found.digest == template.digest
        with pytest.raises(Conflict):
            await pull(other_images, sent.template, other, "snap", sent.memory, source, quiet)
        with pytest.raises(NotFound):
            await pull(other_images, sent.template, other, "none", DIGEST, source, quiet)
    with other.open("snap") as opened:
        opened.unpack(tmp_path / "again")
    assert content(tmp_path / "again") == content(memory)
    other.remove("snap")
    assert names(other.root) == []


@pytest.mark.parametrize("where", ["head", "middle", "end", "cut", "other"])
async def test_what_is_damaged_in_the_store_makes_no_snapshot(tmp_path: Path, where: str) -> None:
    """A memory file that was changed, cut or exchanged there is refused, and nothing of it stays; a push mends it."""
    images, shelf = ImageStore(tmp_path / "images"), opened_shelf(tmp_path / "shelf")
    make_image(images, "hib-1", tmp_path)
    memory = make_memory(tmp_path / "memory", list(range(100)))
    shelf.pack("one", memory)
    shelf.pack("two", make_memory(tmp_path / "second", list(range(50))))
    store = BlobStore.open(str(tmp_path / "blobs"))
    sent = await push(images, "hib-1", shelf, "one", store, quiet)
    other_images, other = ImageStore(tmp_path / "other-images"), opened_shelf(tmp_path / "other")
    blob = tmp_path / "blobs" / memory_key(sent.memory)
    data = bytearray(blob.read_bytes())
    if where == "other":
        data = bytearray(shelf.find(shelf.entry("two").digest).read_bytes())
    elif where == "cut":
        del data[-1]
    else:
        data[{"head": 100, "middle": len(data) // 2, "end": -1}[where]] ^= 1
    blob.write_bytes(data)
    with pytest.raises((SnapshotCorrupt, BlobCorrupt)):
        await pull(other_images, sent.template, other, "snap", sent.memory, store, quiet)
    assert names(other.root) == []
    if where in ("head", "cut", "other"):  # seen without reading it all
        await push(images, "hib-1", shelf, "one", store, quiet)
        await pull(other_images, sent.template, other, "snap", sent.memory, store, quiet)


def hibernated(sandbox_id: str = "sb_1", node_id: str = "node-a") -> Hibernated:
    spec = SandboxSpec(template="debian", env={"KEY": "secret"})
    return Hibernated(sandbox_id=sandbox_id, node_id=node_id, template=DIGEST, memory=DIGEST, spec=spec, frozen_s=1.5)


@pytest.fixture(params=["directory", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    """A directory, and what an object store's own conditions do."""
    if request.param == "directory":
        return BlobStore.open(str(tmp_path / "blobs"))
    return BlobStore("memory://", None, MemoryStore(), 10)


async def test_a_sandbox_goes_through_its_generations(store: BlobStore) -> None:
    """Published, claimed, published again, claimed by another, ended: each is said, and other nodes are refused."""
    assert await current(store, "sb_1") is None
    with pytest.raises(NotFound):
        await claim(store, "sb_1", "node-b")
    first = await publish(store, hibernated())
    assert (first.generation, first.state, first.node_id) == (1, "stored", "node-a")
    assert await current(store, "sb_1") == first
    taken = await claim(store, "sb_1", "node-b")
    assert (taken.generation, taken.state, taken.node_id) == (2, "claimed", "node-b")
    assert (taken.spec, taken.frozen_s) == (first.spec, 1.5)
    assert await claim(store, "sb_1", "node-b") == taken
    for refused in (claim(store, "sb_1", "node-a"), publish(store, hibernated()), retire(store, "sb_1", "node-a")):
        with pytest.raises(Conflict, match="node-b"):
            await refused
    assert (await publish(store, hibernated(node_id="node-b"))).generation == 3
    assert (await claim(store, "sb_1", "node-a")).generation == 4
    await retire(store, "sb_1", "node-a")
    await retire(store, "sb_1", "node-a")
    ended = await current(store, "sb_1")
    assert ended is not None
    assert (ended.generation, ended.state, ended.spec) == (5, "ended", None)
    for late in (claim(store, "sb_1", "node-b"), publish(store, hibernated())):
        with pytest.raises(Conflict, match="ended"):
            await late
    assert await store.keys("hibernated/") == ["hibernated/sb_1/000000000005.json"]


async def test_what_was_claimed_in_vain_is_as_before(store: BlobStore) -> None:
    """Only the last claim can be given back."""
    first = await publish(store, hibernated())
    taken = await claim(store, "sb_1", "node-b", seen=first)
    await give_back(store, taken, first)
    again = await current(store, "sb_1")
    assert again is not None
    assert (again.generation, again.state, again.node_id) == (3, "stored", "node-a")
    await claim(store, "sb_1", "node-a", seen=again)
    for late in (give_back(store, taken, first), claim(store, "sb_1", "node-a", seen=first)):
        with pytest.raises(Conflict, match="faster"):
            await late


async def test_one_of_many_claimants_wins(store: BlobStore) -> None:
    """Of 20 nodes that ask at once exactly one gets the sandbox, time after time."""
    for number in range(5):
        await publish(store, hibernated(f"sb_{number}"))
        tried = [claim(store, f"sb_{number}", f"node-{n}") for n in range(20)]
        found = await asyncio.gather(*tried, return_exceptions=True)
        (won,) = [one for one in found if isinstance(one, Hibernated)]
        assert [type(one) for one in found].count(Conflict) == 19
        assert await current(store, f"sb_{number}") == won


async def test_who_looked_long_ago_wins_nothing(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that stalled between its look and its claim can't take a sandbox that went on meanwhile."""
    old = await publish(store, hibernated())
    for number in range(3):
        await claim(store, "sb_1", f"node-{number}")
        await publish(store, hibernated(node_id=f"node-{number}"))
    newest = await current(store, "sb_1")

    async def stale(store: BlobStore, sandbox_id: str) -> Hibernated:
        return old

    with monkeypatch.context() as patched:
        patched.setattr("barchan.snapshot.generations.current", stale)
        with pytest.raises(Conflict, match="faster"):
            await claim(store, "sb_1", "node-z")
    assert await current(store, "sb_1") == newest


async def test_a_lost_answer_is_no_lost_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that the store carried out, and said so in vain, is the claimant's."""
    store = BlobStore.open(str(tmp_path / "blobs"))
    await publish(store, hibernated())
    put_new = store.put_new

    async def repeated(key: str, data: bytes) -> bool:
        await put_new(key, data)
        return await put_new(key, data)

    monkeypatch.setattr(store, "put_new", repeated)
    assert (await claim(store, "sb_1", "node-b")).node_id == "node-b"


async def test_nonsense_in_the_store_is_damage(tmp_path: Path) -> None:
    """A generation that can't be read, or is of another sandbox, is BlobCorrupt; an id that is none is NotFound."""
    store = BlobStore.open(str(tmp_path / "blobs"))
    await publish(store, hibernated())
    path = tmp_path / "blobs/hibernated/sb_1/000000000001.json"
    good = json.loads(path.read_bytes())
    for change in ({"sandbox_id": "sb_2"}, {"generation": 7}, {"spec": None}, {"format": 2}, {"unknown": 1}, None):
        path.write_text("no JSON" if change is None else json.dumps(good | change))
        with pytest.raises(BlobCorrupt):
            await current(store, "sb_1")
    for wrong in ("../sb_1", "", "a/b"):
        with pytest.raises(NotFound):
            await current(store, wrong)


@pytest.mark.requires("nginx")
async def test_a_store_that_can_only_be_read_gives_no_sandbox_away(tmp_path: Path) -> None:
    """Over HTTP nothing can be claimed."""
    (tmp_path / "blobs").mkdir()
    with served(tmp_path / "blobs", tmp_path / "nginx") as url:
        with pytest.raises(InvalidSpec, match="only be read"):
            await BlobStore.open(url).put_new("key", b"")
        with pytest.raises(InvalidSpec, match="only be read"):
            await BlobStore.open(url).delete("key")


async def test_processes_that_race_get_one_winner(tmp_path: Path) -> None:
    """Of six processes that wait for one moment and claim 20 sandboxes, each sandbox goes to exactly one."""
    store = BlobStore.open(str(tmp_path / "blobs"))
    for number in range(20):
        await publish(store, hibernated(f"sb_{number}"))
    code = textwrap.dedent("""
        import asyncio, sys
        from barchan.errors import Conflict
        from barchan.image.blobs import BlobStore
        from barchan.snapshot.generations import claim

        async def main():
            store = BlobStore.open(sys.argv[1])
            print("ready", flush=True)
            sys.stdin.readline()
            for number in range(20):
                try:
                    await claim(store, f"sb_{number}", sys.argv[2])
                    print(number, flush=True)
                except Conflict:
                    pass
        asyncio.run(main())
    """)
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "blobs"), f"node-{n}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(6)
    ]
    for process in racing:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in racing:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    won = [process.communicate()[0].split() for process in racing]
    assert [process.returncode for process in racing] == [0] * 6
    assert sorted(int(number) for one in won for number in one) == list(range(20))
    for n, numbers in enumerate(won):
        for name in numbers:
            found = await current(store, f"sb_{name}")
            assert found is not None
            assert (found.state, found.node_id) == ("claimed", f"node-{n}")
