"""Stored memory of machines, and machines that wait: what stays, what goes, and what fills."""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barchan.backends.qemu import stored as stores
from barchan.backends.qemu.links import Links
from barchan.backends.qemu.shape import Shape
from barchan.backends.qemu.slots import MEMORY_LEFT_MIB, PER_KIND, Kind, MachineSlots, kind_of
from barchan.backends.qemu.stored import Stored
from barchan.errors import BackendError
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec
from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.memory_file import RECORD

ID = "sb_0a1b2c"
SPEC = SandboxSpec(template="t", memory_mib=16, disk_mib=1, network="none")
TEMPLATE = Template(
    name="t", digest="d" * 64, layers=(), size_bytes=0, created_unix_s=0.0, user="root", workdir="/", env={}, source=""
)
SHAPE = Shape(
    layers=(),
    hardware=(),
    boot=(),
    boot_layers=(),
    memory_mib=16,
    disk="/disk",
    stores_disk=True,
    image=(),
    engine={},
    outer=SPEC,
)


# memory that is stored


@pytest.fixture
def memory(tmp_path: Path) -> Callable[[bytes], Path]:
    def make(content: bytes) -> Path:
        path = tmp_path / content.decode()
        path.mkdir()
        for name in ("ram", "state"):
            (path / name).write_bytes(content)
        return path

    return make


class Kept:
    """Stored memory whose layers nobody uses, but for those in `used`."""

    def __init__(self, root: Path) -> None:
        self.used: set[str] = set()
        self.links = Links("microvm", root / "layers")
        self.stored = Stored(root / "templates", self.links, self.drop)

    async def drop(self, name: str) -> bool:
        return not any(used in name for used in self.used)


async def test_a_sandbox_comes_back_from_the_memory_that_was_asked_for(
    tmp_path: Path, memory: Callable[[bytes], Path]
) -> None:
    """Also while what it was before is still in use; that goes later."""
    kept = Kept(tmp_path)
    kept.used = {"memory-"}
    await kept.stored.once(ID, memory(b"old"), SHAPE)
    await kept.stored.left(ID)
    layer = await kept.stored.once(ID, memory(b"new"), SHAPE)
    assert (layer.path / "memory/ram").read_bytes() == b"new"
    await kept.stored.left("sb_0a1b")
    assert len(kept.links.names()) == 2
    kept.used = {layer.name}
    await kept.stored.retry()
    assert kept.links.names() == [layer.path.name]


async def test_the_newest_memory_and_what_is_taken_up_stay(
    tmp_path: Path, memory: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they take; the rest goes, but for what is being made."""
    monkeypatch.setattr(stores, "TEMPLATES_BYTES_MAX", 0)
    kept = Kept(tmp_path)
    for number, key in enumerate(("a", "b", "c", "d", "e")):
        part = kept.stored.part(key)
        memory(key.encode()).rename(part)
        kept.stored.keep(part, key)
        os.utime(kept.stored.directory(key), (number, number))
    kept.used = {"template-d"}
    with kept.stored.taking("b"):
        async with kept.stored.turn("c"):
            assert await kept.stored.shrink() == ["a"]
    assert await kept.stored.template("a", SHAPE) is None
    assert await kept.stored.shrink() == ["b", "c"]
    assert sorted(os.listdir(tmp_path / "templates")) == ["d", "e"]


async def test_what_no_new_machine_can_come_from_goes(tmp_path: Path, memory: Callable[[bytes], Path]) -> None:
    """Memory of images that are gone, or that can't be read, and layers of what a killed node had half removed."""
    kept = Kept(tmp_path)
    kept.used = {"template-used"}
    for key in ("there", "gone", "used", "damaged"):
        part = kept.stored.part(key)
        memory(key.encode()).rename(part)
        record = MemoryRecord(
            kernel="",
            machine="",
            cpu_features=(),
            hostname="",
            network="none",
            layers=(key,),
            processes=0,
            resident_bytes=0,
        )
        (part / RECORD).write_bytes(msgspec.json.encode(record) if key != "damaged" else b"{")
        kept.stored.keep(part, key)
        await kept.stored.template(key, SHAPE)
    assert sorted(await kept.stored.drop_unneeded(lambda record: record.layers == ("there",))) == ["damaged", "gone"]
    assert kept.links.names() == ["template-there", "template-used"]
    kept.used = set()
    shutil.rmtree(kept.stored.directory("used"))
    await kept.stored.clean(set())
    assert kept.links.names() == ["template-there"]


# slots


class Slot:
    is_there = True

    def __init__(self, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.is_gone = False
        self.error: Exception | None = None

    async def destroy(self) -> None:
        if self.error is not None:
            raise self.error
        self.is_gone = True

    def let_go(self) -> None:
        pass


class Filled:
    """Slots of a host that has so much memory left."""

    def __init__(self, available_mib: int = 1 << 20) -> None:
        self.made: list[Slot] = []
        self.available_mib = available_mib
        self.slots = MachineSlots(self._fill, lambda: self.available_mib)

    async def _fill(self, kind: Kind, sandbox_id: str) -> Any:
        self.made.append(Slot(sandbox_id))
        return self.made[-1]

    async def full(self) -> None:
        self.slots.used(kind_of(SPEC, TEMPLATE), ID)
        while len(self.made) < PER_KIND or (await self.slots.keep(1, "")).filling:
            await asyncio.sleep(0)

    def ready(self) -> list[Slot]:
        return [slot for slot in self.made if not slot.is_gone]


async def test_slots_are_filled_while_memory_is_left() -> None:
    """The host has room beside them; later they come after all."""
    filled = Filled(SPEC.memory_mib + MEMORY_LEFT_MIB - 1)
    filled.slots.used(kind_of(SPEC, TEMPLATE), ID)
    for _ in range(20):
        await asyncio.sleep(0)
    assert filled.made == []
    filled.available_mib += 1
    await filled.full()
    await filled.slots.close()


async def test_slots_that_nobody_wants_go_and_stay_gone() -> None:
    """One that is given back as well, and the others whatever becomes of one."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    filled = Filled()
    await filled.full()
    sandbox_id = filled.slots.take(SPEC, TEMPLATE)
    assert sandbox_id is not None
    failing = next(slot for slot in filled.made if slot.sandbox_id != sandbox_id)
    failing.error = BackendError("it can't be reached")
    assert filled.slots.kinds == {kind_of(SPEC, TEMPLATE)}
    assert ((await filled.slots.keep(0, "")).ready, filled.slots.kinds) == (0, frozenset())
    filled.slots.put_back(sandbox_id)
    filled.slots.used(kind_of(SPEC, TEMPLATE), ID)
    for _ in range(20):
        await asyncio.sleep(0)
    assert filled.ready() == [failing]
    assert len(filled.made) == PER_KIND
    await filled.slots.close()
