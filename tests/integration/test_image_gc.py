"""A node makes room on its disk, and takes nothing that a live sandbox needs."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import barchan
from barchan import AsyncClient
from barchan.errors import NotFound
from barchan.image.blobs import BlobStore
from barchan.image.compose import config_of
from barchan.image.remote import fetch, push
from barchan.image.store import ImageStore
from barchan.image.template import Layer, Template
from barchan.model.snapshot import MemoryRecord
from barchan.rollout.artifact import take
from barchan.rollout.task import DiffArtifact, ScriptGrader, Task
from barchan.rollout.tools import Workspace
from barchan.rollout.verdict import verdict_of_error
from tests.nodes import NodeProcess
from tests.stores import node_of_its_own

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def node(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node whose images are its own."""
    yield from node_of_its_own(images, tmp_path_factory)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


@pytest.fixture
def store(node: NodeProcess) -> ImageStore:
    return ImageStore(node.state_dir / "images")


def age(store: ImageStore, name: str, days: float) -> Template:
    """Let an image be that much older, and unused since."""
    made = store.resolve(name)
    older = msgspec.structs.replace(made, created_unix_s=time.time() - days * DAY_S)
    (store.root / "templates" / f"{name}.json").write_bytes(msgspec.json.encode(older))
    (store.root / "used" / f"{name}.json").unlink(missing_ok=True)
    return older


def layer_names(store: ImageStore) -> set[str]:
    return {path.name for path in (store.root / "layers").iterdir()}


def barchan_image(node: NodeProcess, *words: str) -> Any:
    """What the command prints as JSON, told by the node that runs."""
    command = [sys.executable, "-m", "barchan.cli", "image", *words, "--state-dir", str(node.state_dir), "--json"]
    environment = {**os.environ, "BARCHAN_URL": ""}
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout)


async def test_what_live_sandboxes_are_made_of_stays(client: AsyncClient, node: NodeProcess, store: ImageStore) -> None:
    """Neither age nor budget takes their images, nor the bases of those; when they have ended, both do."""
    debian = store.resolve("debian")
    async with await client.create("debian") as maker:
        (await maker.exec("echo one > /home/agent/one")).check()
        above = await maker.snapshot("above")
        (await maker.exec("echo two > /home/agent/two")).check()
        await maker.snapshot("unused")
    sandbox = await client.create("above")
    for name in ("debian", "above", "unused"):
        age(store, name, 8)
    told = await client.collect_images(unused_for_s=7 * DAY_S, keep_bytes=0, dry_run=True)
    assert ([image.name for image in told.images], told.dry_run) == (["unused"], True)
    assert "unused" in {image.name for image in await client.images()}
    report = barchan_image(node, "gc", "--unused-for", "7d")
    assert [image["name"] for image in report["images"]] == ["unused"]
    assert report["freed_bytes"] == told.freed_bytes > 0
    assert layer_names(store) == {f"{digest}.erofs" for digest in above.layers}
    assert (await sandbox.exec("cat /home/agent/one")).text == "one\n"
    again = await sandbox.snapshot("again")  # the layers below are all there
    await client.remove_image(again.name)
    await sandbox.kill()
    mounted = node.request("GET", "/v1/layers")
    assert {layer["digest"] for layer in mounted} == set(above.layers)
    report = barchan_image(node, "gc", "--unused-for", "7d")
    assert [image["name"] for image in report["images"]] == ["above", "debian"]
    assert layer_names(store) == set()
    with pytest.raises(NotFound):
        await client.create("above")
    assert debian.layers[0].digest in above.layers


@pytest.fixture
def base(images: Path, store: ImageStore) -> Template:
    """The base image again, whatever a test before has removed."""
    machine = ImageStore(images)
    made = machine.resolve("debian")
    for layer in made.layers:
        if not store.layer_path(layer).exists():
            subprocess.run(["cp", "-a", machine.layer_path(layer), store.layer_path(layer)], check=True)
    (store.root / "templates" / "debian.json").write_bytes(msgspec.json.encode(made))
    return made


async def test_a_create_counts_as_a_use(
    client: AsyncClient, node: NodeProcess, store: ImageStore, base: Template
) -> None:
    """Of the image, and of its base: neither goes for its age, though both were made long ago."""
    async with await client.create("debian") as maker:
        await maker.snapshot("mine")
    age(store, "debian", 30)
    age(store, "mine", 30)
    async with await client.create("mine"):
        pass
    report = await client.collect_images(unused_for_s=7 * DAY_S)
    assert report.images == ()
    (mine,) = [image for image in await client.images() if image.name == "mine"]
    assert time.time() - mine.used_unix_s < DAY_S
    assert mine.shared_bytes == base.size_bytes
    await client.remove_image("mine")


async def test_a_node_tells_what_it_has_of_each_layer(client: AsyncClient, store: ImageStore, base: Template) -> None:
    """All of layers that are files; an image that was removed takes its own out of the list."""
    (found,) = await client.layers()
    size = store.layer_path(base.layers[0]).stat().st_size
    assert (found.digest, found.kind) == tuple(base.layers[0])
    assert (found.size_bytes, found.local_bytes) == (size, size)


async def test_images_of_a_node_elsewhere_are_listed_by_its_address(node: NodeProcess, base: Template) -> None:
    """What looks into files is for this machine's own node, and says so."""
    command = [sys.executable, "-m", "barchan.cli", "image"]
    address = ["--url", f"unix://{node.socket}", "--json"]
    listed = subprocess.run([*command, "list", *address], capture_output=True, check=True, timeout=60)
    assert [image["digest"] for image in json.loads(listed.stdout)] == [base.digest]
    refused = subprocess.run([*command, "verify", *address], capture_output=True, text=True, check=False, timeout=60)
    assert (refused.returncode, "give no --url" in refused.stderr) == (2, True)


async def test_removing_through_the_command_asks_the_node(
    client: AsyncClient, node: NodeProcess, store: ImageStore, base: Template
) -> None:
    """A sandbox that runs keeps its files; when it has ended, the store keeps nothing."""
    async with await client.create("debian") as maker:
        (await maker.exec("echo x > /home/agent/x")).check()
        own = (await maker.snapshot("gone")).layers[0]
        async with await client.create("gone") as sandbox:
            assert [image["name"] for image in barchan_image(node, "remove", "gone")] == ["gone"]
            assert (await sandbox.exec("cat /home/agent/x")).text == "x\n"
    await gone(store, own)


@pytest.mark.parametrize("way", ["node", "other process", "replaced"])
async def test_what_a_live_sandbox_is_made_of_outlives_its_image(
    client: AsyncClient, store: ImageStore, base: Template, way: str
) -> None:
    """Removed through the node or by another process, or made anew under its name: images of the sandbox can still be
    made. What nobody needs any more goes with the last sandbox.
    """
    async with await client.create("debian") as maker:
        (await maker.exec("echo x > /home/agent/x")).check()
        (own, *_) = (await maker.snapshot("mine")).layers
        async with await client.create("mine") as sandbox:
            if way == "node":
                await client.remove_image("mine")
            elif way == "other process":
                await asyncio.to_thread(store.remove, "mine")
            else:
                await asyncio.to_thread(
                    store.commit, msgspec.structs.replace(config_of(base), name="mine"), base.layers
                )
            (await sandbox.exec("echo y > /home/agent/y")).check()
            image = await sandbox.snapshot("later")
            assert own in image.layers
            async with await client.create("later") as later:
                assert (await later.exec("cat /home/agent/x /home/agent/y")).text == "x\ny\n"
            await client.remove_image("later")
            assert store.has_layer(own)
    await gone(store, own)
    if way == "replaced":
        await client.remove_image("mine")


async def test_a_node_started_again_keeps_what_its_sandboxes_are_made_of(
    node: NodeProcess, store: ImageStore, base: Template
) -> None:
    """Those that it took over, too: what the node before it noted counts until they have ended."""
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        async with await client.create("debian") as maker:
            (await maker.exec("echo x > /home/agent/x")).check()
            (own, *_) = (await maker.snapshot("mine")).layers
        async with await client.create("mine") as sandbox:
            node.kill()
            node.start()
            await asyncio.to_thread(store.remove, "mine")
            image = await sandbox.snapshot("later")
            assert own in image.layers
            await client.remove_image("later")
        await gone(store, own)


async def test_a_layer_that_is_lost_makes_no_zero(client: AsyncClient, store: ImageStore, base: Template) -> None:
    """An attempt's diff can't be kept then, and that is nothing that a policy can have done: void, for the image."""
    async with await client.create("debian") as maker:
        (await maker.exec("echo x > /home/agent/x")).check()
        (own, *_) = (await maker.snapshot("mine")).layers
    task = Task(task_id="t", instruction="", grader=ScriptGrader(command="true"), artifact=DiffArtifact())
    async with await client.create("mine") as sandbox:
        store.layer_path(Layer(own, "erofs")).unlink()
        with pytest.raises(NotFound) as raised:
            await take(Workspace(sandbox, 1000), task, "artifact-test")
    verdict = verdict_of_error(raised.value, "exec")
    assert (verdict.status, verdict.cause) == ("void", "image")
    await client.remove_image("mine")


async def gone(store: ImageStore, digest: str) -> None:
    """Wait until a layer has gone: nodes look every second."""
    for _ in range(100):
        if not store.has_layer(digest):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{digest} is still there")


@pytest.fixture
def lazy_node(images: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node whose base image is read on demand, from a blob store in a directory."""
    machine, blobs = ImageStore(images), BlobStore.open(str(tmp_path / "blobs"))
    asyncio.run(push(machine, "debian", blobs, lambda what, done, total: None))
    asyncio.run(fetch(ImageStore(tmp_path / "images"), "debian", blobs))
    node = NodeProcess(tmp_path_factory.mktemp("node"), tmp_path / "images")
    node.start()
    yield node
    assert node.end() == []


@pytest.mark.requires("fuse")
async def test_what_is_read_on_demand_stays_readable_until_its_last_sandbox_ends(lazy_node: NodeProcess) -> None:
    """Its image is removed meanwhile: other files can still be read; then nothing of it is left, here or cached."""
    store, cache = ImageStore(lazy_node.state_dir / "images"), lazy_node.state_dir / "cache"
    async with barchan.connect_async(f"unix://{lazy_node.socket}") as client:
        sandbox = await client.create("debian")
        (await sandbox.exec("true")).check()
        (layer,) = await client.layers()
        assert layer.kind == "lazy"
        assert 0 < layer.local_bytes < layer.size_bytes
        (shown,) = barchan_image(lazy_node, "show", "debian")["layers"]
        assert 0 < shown["local_bytes"] < shown["size_bytes"] == layer.size_bytes
        report = barchan_image(lazy_node, "verify")
        assert report["damages"] == []
        assert 0 < report["bytes_read"] < layer.size_bytes
        assert (await client.collect_images(unused_for_s=0, keep_bytes=0)).images == ()
        await client.remove_image("debian")
        assert await client.layers() == []
        assert layer_names(store) == {f"{layer.digest}.lazy"}
        (await sandbox.exec("cat /usr/bin/perl > /dev/null && python3 -c 'import json, ssl'")).check()
        await sandbox.kill()
        await gone(store, layer.digest)
        for _ in range(100):
            if not list(cache.glob(f"{layer.digest}*")):
                break
            await asyncio.sleep(0.1)
    assert [path.name for path in cache.iterdir() if path.name.startswith(layer.digest)] == []


def left_of_machines(state_dir: Path, layers: tuple[str, ...]) -> list[Path]:
    """What a node that was killed, and whose image may be gone, has left of microVMs."""
    folder, key = state_dir / "microvm", "0" * 32
    note, template = folder / "live" / "sb_1_2.json", folder / "templates" / key
    record = MemoryRecord(
        backend="microvm",
        kernel="",
        machine="",
        cpu_features=(),
        hostname="",
        network="none",
        layers=layers,
        processes=0,
        resident_bytes=0,
    )
    link = folder / "layers" / f"template-{key}" / "memory"
    for path in (note.parent, template, link):
        path.mkdir(parents=True, exist_ok=True)
    note.write_bytes(b"{}")
    (template / "record.json").write_bytes(msgspec.json.encode(record))
    (link / "ram").write_bytes(b"ram")
    return [note, template, link.parent]


def test_what_machines_have_left_goes_though_nobody_makes_one(make_node: Callable[[], NodeProcess]) -> None:
    """As a node starts and as it makes room; their memory of an image that is there stays, for the next of them."""
    node = make_node()
    (layer, *_) = ImageStore(node.state_dir / "images").resolve("debian").layers
    note, *kept = left_of_machines(node.state_dir, (layer.digest,))
    node.start()
    with barchan.connect(f"unix://{node.socket}") as client:
        deadline = time.monotonic() + 20
        while note.exists():
            assert time.monotonic() < deadline
        client.collect_images()
        assert all(path.exists() for path in kept)
        gone = left_of_machines(node.state_dir, ("f" * 64,))
        client.collect_images(dry_run=True)
        assert all(path.exists() for path in gone)
        client.collect_images()
        assert not any(path.exists() for path in gone)
    assert node.end() == []
