"""Machines that were cloned ahead of the creates they are for, each for one kind of sandbox."""

import asyncio
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress

from barchan.backends.base import SlotCounts
from barchan.backends.qemu.handle import MachineHandle
from barchan.core.finished import finished
from barchan.errors import BarchanError
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec

KINDS_MAX = 3  # for which there are slots at a time: those asked for last
PER_KIND = max(2, os.cpu_count() or 1)
IDLE_S = 120.0  # after the last create of a kind, its slots go
LOOK_S = 5.0
Kind = tuple[object, ...]


def kind_of(spec: SandboxSpec, template: Template) -> Kind:
    """All of a spec that a waiting machine, or its outer, was given; the rest it is told when it goes on."""
    outer = (spec.memory_mib, spec.cpus, spec.cpu_class, spec.pids_max, spec.disk_mib, spec.network, spec.root)
    return (template.digest, tuple(layer.digest for layer in template.layers), *outer)


class MachineSlots:
    """See `backends.base.Slots`. They are filled one after the other while no create is under way.

    Args:
        fill: Makes one of a kind, under an id, which is frozen then.
    """

    def __init__(self, fill: Callable[[Kind, str], Awaitable[MachineHandle]]) -> None:
        self._fill = fill
        self._ready: OrderedDict[Kind, dict[str, MachineHandle]] = OrderedDict()
        self._used_at: dict[Kind, float] = {}
        self._lent: dict[str, tuple[Kind, MachineHandle]] = {}
        self._prefix = ""
        self._filler: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._creates = 0
        self._is_filling = False
        self._filled = self._claimed = self._cold = self._died = 0
        self._fill_ms = 0.0

    # what a node asks

    async def keep(self, count: int, prefix: str) -> SlotCounts:
        if count == 0:
            await self._drop(list(self._ready))
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
        self._ready.setdefault(kind, {})[sandbox_id] = handle

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
        self._prefix = sandbox_id.rpartition("_")[0] + "_"
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

    async def forget(self, kind: Kind) -> None:
        """What they wait for is no more."""
        self._used_at.pop(kind, None)
        await self._drop([kind])

    async def close(self) -> None:
        """Fill no more. Those that are there stay, unknown to the next node, which removes them."""
        if self._filler is not None:
            self._filler.cancel()
            await asyncio.gather(self._filler, return_exceptions=True)
        for found in self._ready.values():
            for handle in found.values():
                handle.let_go()
        self._ready.clear()

    async def _run(self) -> None:
        while self._used_at:
            self._wanted.clear()
            now = time.monotonic()
            wanted = sorted(self._used_at, key=self._used_at.__getitem__, reverse=True)
            old = [kind for kind in wanted[KINDS_MAX:] or () if self._ready.get(kind)]
            idle = [kind for kind in wanted if now - self._used_at[kind] > IDLE_S]
            for kind in {*idle, *wanted[KINDS_MAX:]}:
                del self._used_at[kind]
            await self._drop({*old, *idle})
            lacking = next((kind for kind in wanted if self._lacks(kind)), None)
            if lacking is not None and self._creates == 0:
                await self._fill_one(lacking)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wanted.wait()

    def _lacks(self, kind: Kind) -> bool:
        return kind in self._used_at and len(self._ready.get(kind, ())) < PER_KIND

    async def _fill_one(self, kind: Kind) -> None:
        sandbox_id = self._prefix + secrets.token_hex(6)
        began = time.monotonic()
        self._is_filling = True
        try:
            handle = await self._fill(kind, sandbox_id)
        except (BarchanError, OSError) as error:
            self._used_at.pop(kind, None)  # the next create of this kind asks again
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
            await handle.destroy()

    async def _drop(self, kinds: "list[Kind] | set[Kind]") -> None:
        for kind in kinds:
            for handle in self._ready.pop(kind, {}).values():
                await finished(handle.destroy())
