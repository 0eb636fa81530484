"""A node that has images from a blob store: asked by name when a sandbox is made, once, and no more than needed."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import barchan
from barchan.cli.common import Common
from barchan.cli.image_build import base_config
from barchan.cli.rollout_run import _require_images
from barchan.errors import BlobCorrupt, BlobUnavailable, Conflict, InvalidSpec, NotFound
from barchan.image.blobs import BlobStore
from barchan.image.remote import pull, push
from barchan.image.store import ImageStore, NewLayer, layer_gone
from barchan.image.template import Layer, Template, TemplateConfig
from barchan.model.image import BUILT_PREFIX
from barchan.model.sandbox import SandboxSpec
from barchan.node.images import NodeImages
from barchan.node.store_images import StoreImages
from barchan.rollout.task import ScriptGrader, Task
from barchan.sdk.build import build
from barchan.sdk.endpoint import endpoint_of, store_url
from barchan.sdk.recipe import Recipe, Run, Take
from tests.nodes import NodeProcess
from tests.stores import copy_base
from tests.stores_http import served

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]


@pytest.fixture
def pushed(images: Path, tmp_path: Path) -> Path:
    """A blob store with the base image in it as `debian` and as `elsewhere`."""
    machine, root = ImageStore(copy_base(images, tmp_path / "machine")), tmp_path / "blobs"
    debian = machine.resolve("debian")
    store = BlobStore.open(str(root))
    asyncio.run(push(machine, "debian", store, lambda what, done, total: None))
    (root / "images/elsewhere.json").write_bytes((root / "images/debian.json").read_bytes())
    assert (root / f"images/sha256:{debian.digest}.json").exists()
    return root


@pytest.fixture
def node(images: Path, pushed: Path, tmp_path: Path) -> Iterator[NodeProcess]:
    """A node that has the base image's layers, and other images from the store."""
    node = NodeProcess(tmp_path / "node", copy_base(images, tmp_path / "images"))
    node.start("--store", pushed.as_uri())
    yield node
    assert node.end() == []


@pytest.mark.requires("nginx")
async def test_one_unknown_image_is_asked_for_once(pushed: Path, tmp_path: Path) -> None:
    """Twenty creates of one image that is not here ask the store once, and get the same lazily kept template."""
    with served(pushed, tmp_path / "nginx") as url:
        images = NodeImages(ImageStore(tmp_path / "empty"), url)
        spec = SandboxSpec(template="elsewhere", detach=True, ttl_s=60)
        found = await asyncio.gather(*(images.template_for(spec) for _ in range(20)))
        assert {layer.kind for template in found for layer in template.layers} == {"lazy"}
        assert len({template.digest for template in found}) == 1
        with pytest.raises(NotFound, match="nor in"):
            await images.resolve("nowhere")
        by_digest = await NodeImages(ImageStore(tmp_path / "other"), url).resolve(found[0].digest)
        assert by_digest.digest == found[0].digest
    asked = (tmp_path / "nginx/access.log").read_text()
    assert asked.count("/blobs/images/elsewhere.json") == 1
    assert ".data" not in asked


async def test_a_dead_store_is_the_platform_s_fault(pushed: Path, tmp_path: Path) -> None:
    """It is neither a missing image nor the client's connection; all who wait hear it, and the next ask again."""
    images = NodeImages(ImageStore(tmp_path / "empty"), pushed.as_uri())
    pushed.rename(tmp_path / "away")
    found = await asyncio.gather(*(images.resolve("debian") for _ in range(5)), return_exceptions=True)
    assert [type(error) for error in found] == [BlobUnavailable] * 5
    (tmp_path / "away").rename(pushed)
    (pushed / "images/bad.json").write_text("{")
    with pytest.raises(BlobCorrupt):
        await images.resolve("bad")
    assert (await images.resolve("debian")).name == "debian"


async def test_a_layer_that_goes_while_an_image_is_fetched_is_fetched_too(pushed: Path, tmp_path: Path) -> None:
    """Removed between the look for it and the commit: it is no missing image; where it goes again, nobody's fault."""

    class Losing(ImageStore):
        losses = 1

        def commit(self, config: TemplateConfig, layers: tuple[NewLayer | Layer, ...], **options: Any) -> Template:
            if self.losses:
                self.losses -= 1
                raise layer_gone(Layer("0" * 64, "lazy"))
            return super().commit(config, layers, **options)

    store = Losing(tmp_path / "empty")
    images = StoreImages(store, pushed.as_uri())
    assert (await images.fetch("debian")).name == "debian"
    store.losses = 2
    with pytest.raises(BlobUnavailable, match="can't be had now"):
        await images.fetch("elsewhere")


def test_a_node_makes_sandboxes_of_images_from_its_store(node: NodeProcess, pushed: Path, tmp_path: Path) -> None:
    """An image it has never heard of runs, from the layers that it has; the store gone, known images still do."""
    with barchan.connect(state_dir=node.state_dir, store=pushed) as client:
        assert client.node_info().store == pushed.as_uri()
        with client.create("elsewhere", memory_mib=256) as sandbox:
            assert sandbox.exec(["echo", "here"]).stdout == b"here\n"
        with pytest.raises(NotFound, match="nor in"):
            client.create("nowhere")
        shutil.move(pushed, tmp_path / "away")
        with client.create("elsewhere", memory_mib=256) as sandbox:
            assert sandbox.exec(["true"]).exit_code == 0
        with pytest.raises(BlobUnavailable, match="can't be had now"):
            client.create("nowhere")
    with pytest.raises(Conflict, match="has images from"):
        barchan.connect(state_dir=node.state_dir, store=tmp_path / "another")


@pytest.mark.requires("userns", "mkfs.btrfs")
async def test_recipes_go_on_from_images_of_the_store(node: NodeProcess, pushed: Path) -> None:
    """Their base, their layers and what they take from: none of it was on the node before. What the command line knows
    of bases comes from there, too.
    """
    for name in ("base", "layer", "taken", "wanted"):
        shutil.copy(pushed / "images/debian.json", pushed / f"images/{name}.json")
    recipe = Recipe(
        base="base",
        layers=("layer",),
        steps=(Take(image="taken", source="/etc/debian_version", path="/v"), Run(command="cat /v")),
    )
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        assert [image.name for image in await client.images()] == ["debian"]
        built = await client.image(await build(client, recipe))
        assert built.name.startswith(BUILT_PREFIX) and len(built.layers) == 2
        assert (await client.image("sha256:" + built.digest[:20])).name == built.name
        with pytest.raises(NotFound, match=r"no image 'nowhere' to build on here, nor in file:.*--base nowhere=NAME"):
            await build(client, Recipe(base="nowhere"))
        task = Task(task_id="t", instruction="", grader=ScriptGrader(command="true"))
        await _require_images(client, [task], "wanted")
        with pytest.raises(NotFound, match=r"task t: no image 'nowhere' here, nor in"):
            await _require_images(client, [task], "nowhere")
    config = base_config(Common(state_dir=node.state_dir))("elsewhere")
    assert config is not None and (config.user, config.env["LANG"]) == ("root", "C.UTF-8")
    assert base_config(Common(state_dir=node.state_dir))("nowhere") is None


@pytest.mark.requires("fuse", "userns", "mkfs.btrfs")
def test_a_node_with_nothing_runs_an_image_of_its_store(pushed: Path, tmp_path: Path) -> None:
    """Asked for by name, it runs, though all that was made of it here is a small file; pulled, it needs no store."""
    (tmp_path / "empty").mkdir()
    node = NodeProcess(tmp_path / "node", tmp_path / "empty")
    node.start("--store", pushed.as_uri())
    with barchan.connect(state_dir=node.state_dir) as client, client.create("debian", memory_mib=256) as sandbox:
        assert sandbox.exec(["python3", "-c", "import json; print(json.dumps([1]))"]).stdout == b"[1]\n"
    assert node.end() == []
    images = ImageStore(tmp_path / "empty")
    (lazy,) = images.resolve("debian").layers
    assert images.layer_path(lazy).stat().st_size < 1 << 20
    whole = asyncio.run(pull(images, "debian", BlobStore.open(str(pushed)), lambda what, done, total: None))
    assert (lazy.kind, whole.layers[0].kind, whole.layers[0].digest) == ("lazy", "erofs", lazy.digest)
    shutil.rmtree(pushed)
    node.start()
    with barchan.connect(state_dir=node.state_dir) as client, client.create("debian", memory_mib=256) as sandbox:
        assert sandbox.exec(["python3", "-c", "import ssl"]).exit_code == 0
    assert node.end() == []


def test_a_store_goes_with_a_node_of_one_s_own() -> None:
    """Paths become URLs that do not depend on where a node runs; a node with an address has a store of its own."""
    assert store_url("blobs") == Path("blobs").absolute().as_uri()
    assert store_url("s3://bucket/prefix/") == "s3://bucket/prefix"
    assert endpoint_of(None, "/x", "/blobs").store == "file:///blobs"
    with pytest.raises(InvalidSpec, match="not both"):
        endpoint_of("http://127.0.0.1:1", None, "/blobs")


def test_images_go_to_a_store_and_back_from_the_command_line(images: Path, tmp_path: Path) -> None:
    """`push` and `pull` take a store's address; `--lazy` leaves the data there; mistakes say what to write."""
    copy_base(images, tmp_path / "one/images")
    store = f"file://{tmp_path}/blobs"

    def run(state: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "barchan.cli", "image", *arguments, "--state-dir", os.fspath(tmp_path / state)]
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
        assert done.returncode == code, done.stderr
        return done

    sent = json.loads(run("one", "push", "debian", store, "--json").stdout)
    assert (sent["layers_sent"], sent["layers_there"]) == (1, 0)
    assert b"0 layers; 1 were there" in run("one", "push", "debian", store).stdout
    lazy = json.loads(run("two", "pull", store, "--image", "debian", "--lazy", "--name", "later", "--json").stdout)
    told = run("two", "pull", store, "--image", "debian", "--json")
    assert json.loads(told.stdout)["digest"] == lazy["digest"]
    assert b" of " in told.stderr
    assert b"--image NAME" in run("two", "pull", store, code=2).stderr
    assert (
        b"--user, --env: no option for a blob store"
        in run("two", "pull", store, "--image", "debian", "--user", "x", "--env", "A=1", code=2).stderr
    )
    assert b"--zstd: no option for a blob store" in run("one", "push", "debian", store, "--zstd", code=2).stderr
    assert b"--lazy: no option for anything but" in run("two", "pull", "dir:/x", "--lazy", code=2).stderr
    assert b"no image 'other'" in run("two", "pull", store, "--image", "other", code=1).stderr
