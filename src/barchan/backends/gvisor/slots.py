"""Guests that run before anybody asks for them: each of one template and shape, kept for creates that are alike."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from barchan.backends.base import SlotCounts
from barchan.backends.gvisor.handle import GvisorHandle
from barchan.errors import BarchanError
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec

Begin = Callable[[str, SandboxSpec, Template, str | None], Awaitable[GvisorHandle]]

READY_MAX: Final = 2  # of one shape
ASKED_MIN: Final = 2  # times, before a shape has slots
SHAPES_MAX: Final = 3  # of which there are some
IDLE_S: Final = 300.0  # for which a shape is remembered that nobody asks for
LOOK_S: Final = 0.1  # between two looks at whether a slot may be made now
AGAIN_S: Final = 5.0  # after one that could not be made, or had no room
MEMORY_LEFT_MIB: Final = 2048  # that the host must have beside a slot
ID_BYTES: Final = 6
_MEMINFO: Final = Path("/proc/meminfo")
_OF_OUTER: Final = ("memory_mib", "cpus", "cpu_class", "pids_max", "disk_mib", "network", "root", "hostname")

Key = tuple[object, ...]


class _Shape(Struct):
    """What a slot was made as, and those that are ready, the newest last."""

    spec: SandboxSpec
    template: Template
    asked_at: float
    asked: int = 0
    ready: list[GvisorHandle] = []


class GvisorSlots:
    """See `backends.base.Slots`. A shape that was asked for twice has slots from then on, until nobody asks any more.

    Args:
        begin: Makes a sandbox.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._shapes: dict[Key, _Shape] = {}
        self._lent: dict[str, GvisorHandle] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        self._prefix = ""
        self._making = 0
        self._filler: asyncio.Task[None] | None = None
        self._is_on = True
        self._filled = self._claimed = self._cold = self._died = 0
        self._fill_s = 0.0

    async def create(self, sandbox_id: str, spec: SandboxSpec, template: Template, cut: str | None) -> GvisorHandle:
        """A sandbox: the slot of that id, if it was lent and lives, or a new one."""
        handle = self._lent.pop(sandbox_id, None)
        self._prefix = sandbox_id[: sandbox_id.rindex("_") + 1]
        if handle is not None:
            if not handle.ended.done():
                self._claimed += 1
                self._wake()
                return handle
            self._died += 1
            await handle.destroy()
        self._cold += cut is None
        self._making += 1
        try:
            return await self._begin(sandbox_id, spec, template, cut)
        finally:
            self._making -= 1
            self._wake()

    async def keep(self, count: int, prefix: str) -> SlotCounts:
        """See `Slots.keep`: 0 drops all of them, until a count is asked for again."""
        self._is_on = count > 0
        if not self._is_on:
            await self.close()
        return SlotCounts(
            ready=sum(len(shape.ready) for shape in self._shapes.values()),
            filling=int(self._filler is not None and not self._filler.done()),
            claimed=self._claimed,
            cold=self._cold,
            filled=self._filled,
            died=self._died,
            fill_ms=self._fill_s * 1e3 / self._filled if self._filled else 0.0,
        )

    def take(self, spec: SandboxSpec, template: Template) -> str | None:
        """See `Slots.take`."""
        if spec.zygote is not None:
            return None
        key = _key(spec, template)
        shape = self._shapes.get(key)
        now = time.monotonic()
        if shape is None:
            shape = self._shapes[key] = _Shape(spec, template, now)
        shape.asked_at = now
        shape.asked += 1
        while shape.ready:
            handle = shape.ready.pop()
            if not handle.ended.done():
                self._lent[handle.sandbox_id] = handle
                return handle.sandbox_id
            self._died += 1
            self._drop(handle)
        return None

    def is_lent(self, sandbox_id: str) -> bool:
        """See `Slots.is_lent`."""
        return sandbox_id in self._lent

    def put_back(self, sandbox_id: str) -> None:
        """See `Slots.put_back`."""
        handle = self._lent.pop(sandbox_id)
        shape = self._shapes.get(_key(handle.spec, handle.template))
        if shape is None:
            self._drop(handle)
        else:
            shape.ready.append(handle)

    async def let_go(self, sandbox_id: str) -> None:
        """See `Slots.let_go`."""
        await self._lent.pop(sandbox_id).destroy()

    def _wake(self) -> None:
        if self._is_on and (self._filler is None or self._filler.done()):
            self._filler = asyncio.get_running_loop().create_task(self._fill())

    async def _fill(self) -> None:
        """Make what is wanted, one at a time while no create is under way, and drop what nobody asks for any more."""
        while True:
            self._forget()
            shape = self._wanted()
            if shape is None and not any(shape.ready for shape in self._shapes.values()):
                return
            if shape is None or self._making:
                await asyncio.sleep(LOOK_S)
            elif _available_mib() < shape.spec.memory_mib + MEMORY_LEFT_MIB or not await self._make(shape):
                await asyncio.sleep(AGAIN_S)

    def _forget(self) -> None:
        """The shapes beyond the most recent ones, and those that nobody has asked for since long."""
        newest = sorted(self._shapes, key=lambda key: self._shapes[key].asked_at, reverse=True)
        for index, key in enumerate(newest):
            if index >= SHAPES_MAX or time.monotonic() - self._shapes[key].asked_at > IDLE_S:
                for handle in self._shapes.pop(key).ready:
                    self._drop(handle)

    def _wanted(self) -> _Shape | None:
        for shape in self._shapes.values():
            if shape.asked >= ASKED_MIN and len(shape.ready) < READY_MAX:
                return shape
        return None

    async def _make(self, shape: _Shape) -> bool:
        began = time.monotonic()
        sandbox_id = self._prefix + secrets.token_hex(ID_BYTES)
        try:
            handle = await self._begin(sandbox_id, shape.spec, shape.template, None)
        except (BarchanError, OSError) as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a gVisor sandbox could not be made ahead of its create", "exception": error}
            )
            return False
        shape.ready.append(handle)
        self._filled += 1
        self._fill_s += time.monotonic() - began
        return True

    def _drop(self, handle: GvisorHandle) -> None:
        task = asyncio.get_running_loop().create_task(handle.destroy())
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def close(self) -> None:
        """Remove all that nobody has: the next node would know none of them. One that is lent is being made into a
        sandbox, or comes back.
        """
        if self._filler is not None:
            self._filler.cancel()
            await asyncio.wait({self._filler})
        handles = [handle for shape in self._shapes.values() for handle in shape.ready]
        self._shapes.clear()
        for handle in handles:
            self._drop(handle)
        await asyncio.gather(*self._dropping, return_exceptions=True)


def _key(spec: SandboxSpec, template: Template) -> Key:
    return (template.digest, *(getattr(spec, name) for name in _OF_OUTER))


def _available_mib() -> int:
    """Of the host's memory; some 50 us."""
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) >> 10
    return 0
