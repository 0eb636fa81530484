"""Sandboxes of several images, and images on other bases, on a real node: what is seen, refused and left."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import barchan
from barchan import AsyncClient
from barchan.image.pack import pack_tree
from barchan.image.store import ImageStore, NewLayer
from barchan.image.template import LAYERS_MAX, Layer, TemplateConfig
from barchan.model.image import MERGED_PREFIX
from barchan.sdk.build import build
from barchan.sdk.recipe import Recipe, Run
from tests.nodes import NodeProcess
from tests.stores import copy_base, node_of_its_own

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs")]


@pytest.fixture(scope="module")
def node(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with an image store of its own, which starts with the base image."""
    yield from node_of_its_own(images, tmp_path_factory)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client
        for image in await client.images():
            if image.name != "debian":
                await client.remove_image(image.name)


def node_with(make_node: Callable[[], NodeProcess], store: Path) -> NodeProcess:
    """A node, not yet started, with an image store of its own."""
    node = make_node()
    (node.state_dir / "images").unlink()
    (node.state_dir / "images").symlink_to(store)
    return node


async def make(client: AsyncClient, name: str, command: str, *, on: str = "debian", **settings: object) -> str:
    """An image of its own layer above another one."""
    async with await client.create(on, user="root", memory_mib=64) as sandbox:
        (await sandbox.exec(command)).check()
        await sandbox.snapshot(name, **settings)  # type: ignore[arg-type]
    return name


async def read(client: AsyncClient, image: str, command: str, layers: tuple[str, ...] = ()) -> str:
    async with await client.create(image, layers=layers, memory_mib=64) as sandbox:
        return (await sandbox.exec(command)).check().text.strip()


async def test_a_sandbox_of_several_images(client: AsyncClient, node: NodeProcess) -> None:
    """Each adds its own layers, the last one topmost; nothing is built, and the node says what it was made of."""
    await make(client, "toolkit", "mkdir /tk; echo toolkit > /tk/who; echo toolkit > /who", env={"A": "t", "B": "t"})
    await make(client, "task", "mkdir -p /tk; echo task > /tk/task; echo task > /who; rm /etc/motd", env={"B": "k"})
    images = {image.name: image for image in await client.images()}
    async with await client.create("debian", layers=["toolkit", "task"]) as sandbox:
        seen = await sandbox.exec("cat /who /tk/who /tk/task; ls /etc/motd; echo $A$B; id -un")
        assert seen.text.split() == ["task", "toolkit", "task", "tk", "agent"]
        info = await sandbox.info()
        assert (info.template, info.spec.layers) == ("debian", ("toolkit", "task"))
        other = await client.create("debian", layers=["task", "toolkit"])
        assert (await other.exec("cat /who")).text == "toolkit\n"
        digests = {info.template_digest, (await other.info()).template_digest, images["debian"].digest}
        assert len(digests) == 3
        image = await sandbox.snapshot("made")
        assert image.layers[1:] == (
            images["task"].layers[0],
            images["toolkit"].layers[0],
            *images["debian"].layers,
        )
    assert await read(client, "made", "cat /who /tk/who; echo $A$B") == "task\ntoolkit\ntk"
    assert {image.name for image in await client.images()} == {"debian", "toolkit", "task", "made"}


async def test_wrong_layers_are_refused(client: AsyncClient) -> None:
    """An image that is not there, one with a directory where another has a file, and too many, by name."""
    await make(client, "one", "mkdir -p /srv/a/b /srv/c; touch /srv/c/x")
    await make(client, "two", "mkdir /srv/a; touch /srv/a/b; ln -s /nowhere /srv/c")
    with pytest.raises(barchan.NotFound, match="no image 'three'"):
        await client.create("debian", layers=["one", "three"])
    for _ in range(2):
        with pytest.raises(barchan.Conflict) as refused:
            await client.create("debian", layers=["one", "two"])
        assert refused.value.details == {"upper": "two", "lower": "one", "paths": 2}
        assert "/srv/a/b (file over directory), /srv/c (link over directory)" in str(refused.value)
    with pytest.raises(barchan.InvalidSpec, match="129 images"):
        await client.create("debian", layers=["one"] * 129)
    with pytest.raises(barchan.InvalidSpec, match="list of names"):
        await client.create("debian", layers="one")
    assert await client.list() == []


async def test_what_was_replaced_on_purpose_is_no_conflict(client: AsyncClient) -> None:
    """An image that has made a file of its base's directory may lie on another image of that base."""
    await make(client, "replaced", "rmdir /srv && touch /srv")
    await make(client, "beside", "touch /beside")
    await make(client, "newer", "touch /newer")
    assert await read(client, "newer", "ls -d /srv /beside /newer", ("beside", "replaced")) == "/beside\n/newer\n/srv"


async def test_a_layer_that_comes_twice(client: AsyncClient) -> None:
    """It counts once, at its topmost place: an image twice, and one that brings the base along."""
    await make(client, "one", "echo one > /who")
    await make(client, "two", "echo two > /who")
    assert await read(client, "debian", "cat /who", ("one", "two", "one")) == "one"
    assert await read(client, "one", "cat /who", ("two", "debian")) == "two"


def put(node: NodeProcess, name: str, files: dict[str, str]) -> str:
    """An image of one layer with nothing below, put into the node's store."""
    store = ImageStore(node.state_dir / "images")
    with store.workspace() as workspace:
        tree = workspace / "tree"
        for path, content in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(content)
        digest = pack_tree(tree, workspace / "layer.erofs", mtime_unix_s=0)
        layer = NewLayer(Layer(digest, "erofs"), workspace / "layer.erofs")
        store.commit(TemplateConfig(name=name, user="root"), (layer,))
    return name


async def test_a_shared_layer_that_one_image_has_renamed(client: AsyncClient) -> None:
    """Below its own layer, which counts once, a renamed directory would be empty: that order and base are refused."""
    shared = Run(command="mkdir /opt/old; echo x > /opt/old/file")
    for name, command in (("moved", "mv /opt/old /opt/new"), ("other", "touch /other")):
        image = await build(client, Recipe(base="debian", steps=(shared, Run(command=command))))
        assert len((await client.name_image(image, name)).layers) == 3
    assert await read(client, "debian", "cat /opt/new/file; ls -d /other", ("other", "moved")) == "x\n/other"
    assert await read(client, "debian", "cat /opt/new/file", ("moved", "moved")) == "x"
    with pytest.raises(barchan.Conflict, match=r"images debian .* can't be put together: layer .* has renamed"):
        await client.create("debian", layers=["moved", "other"])
    with pytest.raises(barchan.Conflict, match="has renamed"):
        await client.create("moved", layers=["other"])
    (done,) = await client.rebase("debian", "moved", names=["other"])
    assert "has renamed" in done.refused


async def test_more_layers_than_a_sandbox_can_have(client: AsyncClient, node: NodeProcess) -> None:
    """A hundred images in one sandbox: the lower ones are made one, once, and it shows what they would."""
    names = tuple(put(node, f"n{n}", {f"n/{n}": f"{n}", "last": f"{n}"}) for n in range(100))
    expected = "".join(["99", *sorted(str(n) for n in range(100))])
    for _ in range(2):
        seen = await read(client, "debian", "cat /last; ls /n", names)
        assert seen.replace("\n", "") == expected
        merged = [image for image in await client.images() if image.name.startswith(MERGED_PREFIX)]
        assert len(merged) == 1
    fewer = [item async for item in client.create_many("debian", n=4, layers=names[:80], memory_mib=64)]
    async with contextlib.AsyncExitStack() as ending:
        for sandbox in fewer:
            assert isinstance(sandbox, barchan.AsyncSandbox)
            await ending.enter_async_context(sandbox)
            assert (await sandbox.exec("cat /last")).text == "79"
        assert len((await sandbox.snapshot()).layers) <= LAYERS_MAX
    assert sum(image.name.startswith(MERGED_PREFIX) for image in await client.images()) == 2


async def test_snapshots_of_snapshots_have_no_end(client: AsyncClient) -> None:
    """Each is made of the one before, beyond the layers that a sandbox can have: the lower ones become one."""
    template = "debian"
    for number in range(LAYERS_MAX + 2):
        async with await client.create(template, memory_mib=64) as sandbox:
            await sandbox.exec(
                f"echo {number} >> /tmp/depth; mkdir -p /tmp/made/{number}; rm -rf /tmp/made/{number - 1}"
            )
            image = await sandbox.snapshot()
        assert len(image.layers) <= LAYERS_MAX
        template = image.name
    assert len(image.layers) < LAYERS_MAX / 2
    async with await client.create(template) as last:
        seen = (await last.exec("cat /tmp/depth; ls /tmp/made")).text.split()
    assert seen == [*map(str, range(LAYERS_MAX + 2)), str(LAYERS_MAX + 1)]


async def test_a_node_killed_in_the_middle_of_a_merge(
    make_node: Callable[[], NodeProcess], images: Path, tmp_path: Path
) -> None:
    """Nothing of the merge is left, and the next create makes it; sandboxes that were put together before live on."""
    node = node_with(make_node, copy_base(images, tmp_path / "images"))
    names = tuple(put(node, f"n{n}", {f"n/{n}": f"{n}", f"big/{n}": "x" * (1 << 20)}) for n in range(70))
    store = node.state_dir / "images"
    kept = {path.name for path in (store / "layers").iterdir()}
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        before = await client.create("debian", layers=names[:2], memory_mib=64)
        info = await before.info()
        task = asyncio.create_task(client.create("debian", layers=names, memory_mib=64))
        while not list(store.glob("tmp/*/layer.erofs")):
            await asyncio.sleep(0.001)
        node.kill()
        assert not list(store.glob("templates/merged-*"))
        node.start()
        async with await task as sandbox:
            assert (await sandbox.exec("ls /n /big | wc -l")).text == "143\n"
        assert list(store.glob("tmp/*")) == []
        after = await before.info()
        assert (after.template_digest, after.spec) == (info.template_digest, info.spec)
        assert len({path.name for path in (store / "layers").iterdir()} - kept) == 1
        image = await before.snapshot()
        assert await read(client, image.name, "cat /last 2>/dev/null; ls /n") == "0\n1"
        await before.kill()
    assert node.end() == []


async def test_another_base(client: AsyncClient) -> None:
    """Images go over to a new base with their own layers and settings; what can't is left as it was, and told."""
    base = {image.name: image for image in await client.images()}["debian"]
    await make(client, "old", "echo old > /version; mkdir /srv/old", env={**base.env, "V": "1", "W": "1"})
    await make(client, "task", "echo task > /task", on="old")
    await make(client, "more", "echo more > /more; rm /task", on="task", env={"V": "1", "W": "9", "X": "2"})
    await make(client, "clash", "rmdir /srv/old; touch /srv/new", on="old")
    await make(client, "new", "echo new > /version; mkdir /srv/new", env={**base.env, "V": "2", "Y": "3"})
    await make(client, "newer", "echo newer > /version", on="old")
    before = {image.name: image for image in await client.images()}

    told: list[barchan.Rebased] = []
    done = {
        item.name: item for item in await client.rebase("old", "new", names=["task", "clash"], progress=told.append)
    }
    assert [item.name for item in told] == ["task", "clash"]
    assert done["clash"].refused.startswith("image 'clash' can't lie above 'new': one has a directory where")
    assert "/srv/new (file over directory)" in done["clash"].refused
    assert not done["task"].refused
    assert await read(client, "task", "cat /version /task; echo $V$W$Y") == "new\ntask\n23"
    rest = await client.rebase("old", "new")
    assert [(item.name, bool(item.refused)) for item in rest] == [("clash", True), ("more", False), ("newer", False)]
    assert await read(client, "more", "cat /version /more; echo /task*; echo $V$W$X$Y") == "new\nmore\n/task*\n2923"

    after = {image.name: image for image in await client.images()}
    assert after["clash"] == before["clash"]
    assert after["more"].layers == (*before["more"].layers[:2], *before["new"].layers)
    assert (after["more"].base_layers, after["task"].base_layers) == (3, 2)
    assert after["task"].digest == done["task"].digest != before["task"].digest
    with pytest.raises(barchan.NotFound):
        await client.rebase("old", "new", names=["newer", "nothing"])
    with pytest.raises(barchan.InvalidSpec, match="same layers"):
        await client.rebase("new", "new")
    assert (await client.rebase("old", "new", names=["task"]))[0].refused.endswith("on those of 'old'")


async def test_another_base_for_all_that_can_be_read(client: AsyncClient, node: NodeProcess) -> None:
    """An image whose layer is damaged is left as it was, and told; it is in nobody else's way."""
    for name in ("old", "new"):
        await make(client, name, f"echo {name} > /version")
    for name in ("a", "broken", "c"):
        await make(client, name, f"echo {name} > /{name}", on="old")
    digest = (await client.image("broken")).layers[0]
    layer = node.state_dir / f"images/layers/{digest}.erofs"
    content = layer.read_bytes()
    layer.unlink()  # another file, for the old one is mounted
    layer.write_bytes(content[:1024] + bytes(1024) + content[2048:])
    done = await client.rebase("old", "new")
    assert [(item.name, bool(item.refused)) for item in done] == [("a", False), ("broken", True), ("c", False)]
    assert digest in done[1].refused
    assert await read(client, "c", "cat /version /c") == "new\nc"


async def test_the_command_line(client: AsyncClient, node: NodeProcess) -> None:
    """`run --layer` and `image rebase` do the same, and say what was left as it was."""
    await make(client, "tool", "echo tool > /who; mkdir /srv/x")
    await make(client, "other", "touch /srv/x")

    def said(*words: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", "barchan.cli", "--state-dir", str(node.state_dir), *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout + done.stderr

    run = await asyncio.to_thread(said, "run", "debian", "--layer", "tool", "--", "cat", "/who")
    assert run == (0, "tool\n")
    code, text = await asyncio.to_thread(said, "image", "rebase", "--from", "debian", "--to", "other")
    assert code == 1
    assert "tool: left as it was: image 'tool' can't lie above 'other'" in text
    assert "0 of 1 images are on other now" in text
