"""Which layers stay mounted, with stand-ins for the supervisor and the reader."""

import asyncio
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from barchan.backends.container.layers import Layers
from barchan.backends.container.supervisor import Answer
from barchan.errors import BackendError, RequirementMissing
from barchan.image.store import ImageStore
from barchan.image.template import Layer, LayerKind
from barchan.wire.supervisor import Message

A, B, C = "a" * 64, "b" * 64, "c" * 64


class Host:
    """Supervisor, reader and image store at once; says what it was asked for."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.busy: set[str] = set()
        self.failing: set[str] = set()
        self.is_on_disk = True
        self.images = {A, B, C}
        self.known: set[str] = set()
        self.served: set[str] = set()

    async def ask(self, op: str, *, fds: Sequence[int] = (), timeout_s: float = 0, **keys: str | int) -> Answer:
        digest = str(keys["digest"])
        if op == "unlayer" and digest in self.busy:
            raise BackendError("busy", errno=errno.EBUSY)
        if not self.is_on_disk:
            raise BackendError("Block device required", errno=errno.ENOTBLK)
        if digest in self.failing:
            raise BackendError("it fails")
        self.done.append(f"{op} {keys.get('type', '')} {digest[0]}")
        return Answer(Message("ok", ()), [])

    async def mount(self, digest: str, path: Path) -> int:
        self.known.add(digest)
        return os.open("/dev/null", os.O_RDONLY)

    async def drop(self, digest: str, *, keeps_data: bool) -> None:
        if not keeps_data:
            self.known.discard(digest)
        self.done.append(f"drop {'keep' if keeps_data else 'remove'} {digest[0]}")

    def has_layer(self, digest: str) -> bool:
        return digest in self.images

    def layer_path(self, layer: Layer) -> Path:
        return Path(f"/{layer.digest}.{layer.kind}")


@pytest.fixture
def host() -> Host:
    return Host()


def make(host: Host, idle_s: float = 0.0) -> Layers:
    return Layers(cast(ImageStore, host), cast(Any, host), host.ask, idle_s)


async def use(layers: Layers, *kinds: tuple[str, LayerKind]) -> frozenset[str]:
    async with layers.mounted([Layer(digest, kind) for digest, kind in kinds]) as fresh:
        return fresh


async def test_a_lazy_layer_that_nobody_uses_rests(host: Host) -> None:
    """One that a sandbox uses does not, nor one that a create needs; a whole one stays, for it costs nothing."""
    layers = make(host)
    assert await use(layers, (A, "lazy"), (B, "lazy"), (C, "erofs")) == {A, B, C}
    assert await use(layers, (A, "lazy")) == frozenset()
    host.busy, host.done = {B}, []
    await layers.unmount()
    assert host.done == ["unlayer  a", "drop keep a"]
    host.busy, host.done = set(), []
    async with layers.mounted([Layer(B, "lazy")]):
        await layers.unmount()
        assert host.done == []
    await make(host, idle_s=3600).unmount()
    assert host.done == []
    assert await use(layers, (A, "lazy")) == {A}


async def test_one_that_fails_keeps_no_other_from_going(host: Host) -> None:
    """It is told at the end, and tried again the next time."""
    layers = make(host)
    await use(layers, (A, "erofs"), (B, "lazy"), (C, "erofs"))
    host.images, host.failing, host.done = set(), {A}, []
    with pytest.raises(BackendError, match="it fails"):
        await layers.unmount()
    assert sorted(host.done) == ["drop remove b", "unlayer  b", "unlayer  c"]
    host.failing, host.done = set(), []
    await layers.unmount()
    assert host.done == ["unlayer  a"]


async def test_a_removed_image_s_layer_goes_with_its_last_sandbox(host: Host) -> None:
    """Until then it is unwanted."""
    layers = make(host, idle_s=3600)
    await use(layers, (A, "erofs"))
    host.images, host.busy, host.done = set(), {A}, []
    await layers.unmount()
    assert layers.unwanted == {A}
    host.busy = set()
    await layers.unmount(layers.unwanted)
    assert layers.unwanted == set() and host.done == ["unlayer  a"]


async def test_a_layer_that_is_whole_now_takes_the_lazy_one_s_place(host: Host) -> None:
    """Once no sandbox reads that; and all who wait for a mount that fails hear why."""
    layers = make(host, idle_s=3600)
    await use(layers, (A, "lazy"))
    host.busy, host.done = {A}, []
    assert await use(layers, (A, "erofs")) == frozenset()
    host.busy = set()
    assert await use(layers, (A, "erofs")) == {A}
    assert host.done == ["unlayer  a", "drop remove a", "layer erofs a"]
    host.failing = {B}
    for _ in range(2):
        with pytest.raises(BackendError, match="it fails"):
            await use(layers, (B, "erofs"))
    host.failing = set()
    assert await use(layers, (B, "erofs")) == {B}


async def test_a_file_system_whose_files_cannot_be_mounted_is_named(host: Host) -> None:
    """A state directory in memory, mostly: what to do is said, not what the kernel calls it."""
    layers = Layers(cast(ImageStore, host), cast(Any, host), host.ask)
    host.is_on_disk = False
    with pytest.raises(RequirementMissing, match=r"tmpfs.*on ext4, xfs or btrfs"):
        async with layers.mounted([Layer(A, "erofs")]):
            pass


async def test_a_host_directory_that_a_create_comes_for_stays(host: Host) -> None:
    """Also one that comes while it is being let go of."""
    layers = make(host)
    layer = layers.add_host("memory", Path("/srv/memory"))
    await use(layers, (layer.digest, "dir"))
    unlayer = host.ask

    async def ask(op: str, **keys: Any) -> Answer:
        answer = await unlayer(op, **keys)
        if op == "unlayer":
            creates.append(asyncio.ensure_future(use(layers, (layer.digest, "dir"))))
            await asyncio.sleep(0)
        return answer

    creates: list[asyncio.Future[frozenset[str]]] = []
    layers._ask = ask
    assert not await layers.drop_host("memory")
    assert await creates[0] == {layer.digest}
    layers._ask = unlayer
    assert await layers.drop_host("memory")
