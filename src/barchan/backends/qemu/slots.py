"""Machines that were cloned ahead of the creates they are for, each for one kind of sandbox."""

import asyncio
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from barchan.backends.base import SlotCounts
from barchan.backends.qemu.handle import MachineHandle
from barchan.errors import BarchanError
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec

KINDS_MAX = 3  # for which there are slots at a time: those asked for last
PER_KIND = max(2, os.cpu_count() or 1)
IDLE_S = 120.0  # after the last create of a kind, its slots go
LOOK_S = 5.0
MEMORY_LEFT_MIB = 2048  # that the host must have beside a slot


class Kind(NamedTuple):
    """All of a spec that a waiting machine, or its outer, was given; the rest it is told when it goes on."""

    digest: str
    layers: tuple[str, ...]
    memory_mib: int
    outer: tuple[object, ...]


def kind_of(spec: SandboxSpec, template: Template) -> Kind:
    outer = (spec.cpus, spec.cpu_class, spec.pids_max, spec.disk_mib, spec.network, spec.root)
    return Kind(template.digest, tuple(layer.digest for layer in template.layers), spec.memory_mib, outer)


class MachineSlots:
    """See `backends.base.Slots`. They are filled one after the other while no create is under way and memory is left.

    Args:
        fill: Makes one of a kind, under an id, which is frozen then.
        available_mib: What the host has of memory now.
    """

    def __init__(self, fill: Callable[[Kind, str], Awaitable[MachineHandle]], available_mib: Callable[[], int]) -> None:
        self._fill = fill
        self._available_mib = available_mib
        self._ready: OrderedDict[Kind, dict[str, MachineHandle]] = OrderedDict()
        self._used_at: dict[Kind, float] = {}
        self._refused: set[Kind] = set()  # of which none could be made; the next create of it asks again
        self._lent: dict[str, tuple[Kind, MachineHandle]] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        self._is_on = True
        self._prefix = ""
        self._filler: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._creates = 0
        self._is_filling = False
        self._filled = self._claimed = self._cold = self._died = 0
        self._fill_ms = 0.0

    # what a node asks

    async def keep(self, count: int, prefix: str) -> SlotCounts:
        self._is_on = count > 0
        if not self._is_on:
            self._used_at.clear()
            await self._drop_unwanted()
        return SlotCounts(
            ready=sum(map(len, self._ready.values())),
            filling=int(self._is_filling),
            claimed=self._claimed,
            cold=self._cold,
            filled=self._filled,
            died=self._died,
            fill_ms=self._fill_ms,
        )

    def take(self, spec: SandboxSpec, template: Template) -> str | None:
        kind = kind_of(spec, template)
        found = self._ready.get(kind)
        if not found:
            self._cold += 1
            return None
        sandbox_id, handle = found.popitem()
        self._lent[sandbox_id] = (kind, handle)
        return sandbox_id

    def is_lent(self, sandbox_id: str) -> bool:
        return sandbox_id in self._lent

    def put_back(self, sandbox_id: str) -> None:
        kind, handle = self._lent.pop(sandbox_id)
        if kind in self._used_at:
            self._ready.setdefault(kind, {})[sandbox_id] = handle
        else:
            self._drop(handle)

    async def let_go(self, sandbox_id: str) -> None:
        _, handle = self._lent.pop(sandbox_id)
        await handle.destroy()

    # what the backend asks

    async def claim(self, sandbox_id: str) -> MachineHandle | None:
        """The slot that was taken for this sandbox, if it still waits."""
        lent = self._lent.pop(sandbox_id, None)
        if lent is None:
            return None
        _, handle = lent
        if handle.is_there:
            self._claimed += 1
            return handle
        self._died += 1
        await handle.destroy()
        return None

    def used(self, kind: Kind, sandbox_id: str) -> None:
        """A sandbox of that kind was made: others may follow."""
        if not self._is_on:
            return
        self._prefix = sandbox_id.rpartition("_")[0] + "_"
        self._refused.discard(kind)
        self._used_at[kind] = time.monotonic()
        self._ready.setdefault(kind, {})
        self._ready.move_to_end(kind)
        self._wanted.set()
        if self._filler is None or self._filler.done():
            self._filler = asyncio.get_running_loop().create_task(self._run())

    def begin(self) -> None:
        """A create is under way: filling waits."""
        self._creates += 1

    def end(self) -> None:
        self._creates -= 1
        self._wanted.set()

    @property
    def kinds(self) -> frozenset[Kind]:
        """Those of which a slot may be made."""
        return frozenset(self._used_at)

    @property
    def is_creating(self) -> bool:
        """A create is under way, or a slot is being filled."""
        return self._creates > 0 or self._is_filling

    async def close(self) -> None:
        """Fill no more. Those that are there stay, unknown to the next node, which removes them."""
        if self._filler is not None:
            self._filler.cancel()
            await asyncio.gather(self._filler, return_exceptions=True)
        for found in self._ready.values():
            for handle in found.values():
                handle.let_go()
        self._ready.clear()
        await self._dropped()

    async def _run(self) -> None:
        while self._used_at:
            self._wanted.clear()
            now = time.monotonic()
            wanted = sorted(self._used_at, key=self._used_at.__getitem__, reverse=True)
            for index, kind in enumerate(wanted):
                if index >= KINDS_MAX or now - self._used_at[kind] > IDLE_S:
                    del self._used_at[kind]
            await self._drop_unwanted()
            lacking = next((kind for kind in wanted if self._lacks(kind)), None)
            if lacking is not None and self._creates == 0 and self._has_room(lacking):
                await self._fill_one(lacking)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wanted.wait()

    def _lacks(self, kind: Kind) -> bool:
        is_wanted = kind in self._used_at and kind not in self._refused
        return is_wanted and len(self._ready.get(kind, ())) < PER_KIND

    def _has_room(self, kind: Kind) -> bool:
        return self._available_mib() >= kind.memory_mib + MEMORY_LEFT_MIB

    async def _fill_one(self, kind: Kind) -> None:
        sandbox_id = self._prefix + secrets.token_hex(6)
        began = time.monotonic()
        self._is_filling = True
        try:
            handle = await self._fill(kind, sandbox_id)
        except (BarchanError, OSError) as error:
            self._refused.add(kind)
            asyncio.get_running_loop().call_exception_handler(
                {"message": "starting a machine ahead failed", "exception": error}
            )
            return
        finally:
            self._is_filling = False
        self._filled += 1
        self._fill_ms = (time.monotonic() - began) * 1e3
        if kind in self._used_at:
            self._ready.setdefault(kind, {})[sandbox_id] = handle
        else:
            self._drop(handle)

    async def _drop_unwanted(self) -> None:
        """Those of kinds that nobody has asked for lately."""
        self._refused &= self._used_at.keys()
        for kind in [kind for kind in self._ready if kind not in self._used_at]:
            for handle in self._ready.pop(kind).values():
                self._drop(handle)
        await self._dropped()

    async def _dropped(self) -> None:
        """Return when those that are going have gone, whoever waits for that no more."""
        if self._dropping:
            await asyncio.wait(self._dropping)

    def _drop(self, handle: MachineHandle) -> None:
        task = asyncio.get_running_loop().create_task(_destroyed(handle))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)


async def _destroyed(handle: MachineHandle) -> None:
    try:
        await handle.destroy()
    except (BarchanError, OSError) as error:  # of one; the others have nothing to do with it
        asyncio.get_running_loop().call_exception_handler(
            {"message": "removing a machine that was started ahead failed", "exception": error}
        )
