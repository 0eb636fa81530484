"""What sandboxes wrote before they were hibernated: counted as their own, and gone with them however they end."""

import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import barchan
from barchan.model.fork import ForkRequest
from barchan.model.node import SnapshotRequest
from barchan.model.sandbox import SandboxSpec
from barchan.node import images as node_images
from barchan.node import snapshots
from barchan.node.admission import default_limits
from barchan.node.live import Live
from barchan.node.sandboxes import Sandboxes
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "criu"), pytest.mark.timeout(180)]


@asynccontextmanager
async def running(state_dir: Path, images: Path) -> AsyncIterator[Sandboxes]:
    """A node within this process."""
    (state_dir / "images").symlink_to(images)
    sandboxes = Sandboxes(state_dir, default_limits(), "0")
    await sandboxes.start()
    try:
        yield sandboxes
    finally:
        await sandboxes.shutdown()
        await sandboxes.close()


async def cycle(sandboxes: Sandboxes, live: Live) -> None:
    await sandboxes.tiers.to(live, "hibernated")
    await sandboxes.tiers.to(live, "running")


async def test_own_layers_are_counted_right_once_some_were_merged(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it goes to disk: what is below them is what it was made of."""
    monkeypatch.setattr(snapshots, "LAYERS_MAX", 4)
    monkeypatch.setattr(node_images, "MERGED_LAYERS", 2)
    async with running(tmp_path, images) as sandboxes:
        spec = SandboxSpec(template="debian", detach=True, ttl_s=600, memory_mib=64)
        live = sandboxes.live[(await sandboxes.create(spec)).sandbox_id]
        made_of, seen = live.template.layers, set(live.template.layers)
        for _ in range(6):
            await cycle(sandboxes, live)
            seen |= set(live.template.layers)
            assert live.template.layers[live.rest.own_layers :] == made_of
            row = sandboxes.journal.find(live.sandbox_id)
            assert row is not None
            assert row.own_layers == live.rest.own_layers
        assert live.rest.own_layers < 4
        for template in sandboxes.images.templates():  # which `image gc` would remove
            if template.name.startswith("merged-") and template.layers[0] in seen - set(made_of):
                await snapshots.remove_image(sandboxes, template.name)


async def test_what_a_parent_wrote_is_its_childrens_own_too(images: Path, tmp_path: Path) -> None:
    """Whether or not it was on disk meanwhile, and whoever finds them: a snapshot has the same base."""
    async with running(tmp_path, images) as sandboxes:
        spec = SandboxSpec(template="debian", detach=True, ttl_s=600, memory_mib=64)
        live = sandboxes.live[(await sandboxes.create(spec)).sandbox_id]
        made_of = live.template
        await cycle(sandboxes, live)
        (child,) = await sandboxes.forks.fork(live, ForkRequest(n=1, kind="fs", fork_id="f1"))
        assert isinstance(child, Live)
        await child.booted
        row = sandboxes.journal.find(child.sandbox_id)
        assert row is not None
        assert (child.rest.own_layers, row.own_layers) == (1, 1)
        info = await sandboxes.tree.keep(child, SnapshotRequest())
        assert info.image.base_layers == len(made_of.layers)
        await sandboxes.tree.remove(info.snapshot_id)


def left(client: barchan.Client, node: NodeProcess) -> list[str]:
    """What hibernated sandboxes have on a node's disk."""
    own = f"asleep-{client.node_info().node_id[5:]}-"
    shelf = [path.name for path in (node.state_dir / "snapshots").iterdir()]
    return [*shelf, *(image.name for image in client.images() if image.name.startswith(own))]


def test_a_dead_supervisor_leaves_nothing_of_them(make_node: Callable[[], NodeProcess]) -> None:
    """Neither of one that is on disk, and ends later, nor of one that was there before."""
    node = make_node()
    node.start()
    with barchan.connect(f"unix://{node.socket}") as client:
        asleep, awake = [client.create("debian", memory_mib=64) for _ in range(2)]
        for sandbox in (asleep, awake):
            sandbox.hibernate()
        awake.resume()
        pid = node.watch.supervisor_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(barchan.SandboxLost):
            for _ in range(100):
                awake.exec("true")
                time.sleep(0.05)
        assert asleep.kill()
        assert left(client, node) == []
        with client.create("debian", memory_mib=64) as again:
            assert again.exec("true").exit_code == 0


def test_what_died_with_its_node_leaves_nothing_at_the_next_start(make_node: Callable[[], NodeProcess]) -> None:
    """The images of what it had written go with the news that it is lost."""
    node = make_node()
    node.start()
    with barchan.connect(f"unix://{node.socket}") as client:
        sandbox = client.create("debian", memory_mib=64)
        sandbox.hibernate()
        sandbox.resume()
        assert left(client, node) != []
        pid = node.watch.supervisor_pid()
        assert pid is not None
        node.kill()
        os.kill(pid, signal.SIGKILL)
        node.start()
        with pytest.raises(barchan.SandboxLost):
            sandbox.exec("true")
        assert left(client, node) == []
        with client.create("debian", memory_mib=64) as again:
            assert again.exec("true").exit_code == 0
