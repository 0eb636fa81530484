"""Memory directories that machines come from: those of templates, kept for the next, and those of single restores."""

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from barchan.backends.hosted.outer import HostLayer
from barchan.backends.qemu.links import Links
from barchan.backends.qemu.machine import DISK, MEMORY, RAM_PATH, STATE, STATE_PATH
from barchan.backends.qemu.shape import Shape
from barchan.core.finished import finished

TEMPLATES_BYTES_MAX = 4 << 30  # of templates' memory on disk; of the least used ones it is removed beyond that
TEMPLATES_MAX = 32
Drop = Callable[[str], Awaitable[bool]]


class Stored:
    """Memory directories of one backend as layers of outers.

    Args:
        root: A directory of its own.
        drop: Makes the supervisor let go of a layer; False: an outer uses it.
    """

    def __init__(self, root: Path, links: Links, drop: Drop) -> None:
        self._root = root
        self._links = links
        self._drop = drop
        self._making: dict[str, asyncio.Lock] = {}

    def turn(self, key: str) -> asyncio.Lock:
        """Of whoever makes a template's memory."""
        return self._making.setdefault(key, asyncio.Lock())

    def directory(self, key: str) -> Path:
        """A template's memory directory, whether or not it is there."""
        return self._root / key

    def part(self, key: str) -> Path:
        """A path for a memory directory that is to become a template's; not yet made."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._root / f"{key}.{os.getpid()}-{time.monotonic_ns()}.part"

    def keep(self, part: Path, key: str) -> None:
        """It is whole: from now on it is the template's."""
        part.rename(self._root / key)

    async def template(self, key: str, shape: Shape) -> HostLayer | None:
        """The layer of a template's memory; None: it was not made yet."""
        directory = self.directory(key)
        if not directory.exists():
            return None
        await asyncio.to_thread(os.utime, directory)
        return await asyncio.to_thread(self._layer, f"template-{key}", directory, shape)

    async def once(self, sandbox_id: str, memory: Path, shape: Shape) -> HostLayer:
        """The layer of a memory directory for one sandbox, which keeps it until `left`."""
        return await asyncio.to_thread(self._layer, _once(sandbox_id), memory, shape)

    def _layer(self, name: str, memory: Path, shape: Shape) -> HostLayer:
        files = {RAM_PATH: memory / MEMORY, STATE_PATH: memory / STATE}
        if (memory / DISK).exists():
            files[shape.disk] = memory / DISK
        return self._links.make(name, files)

    async def left(self, sandbox_id: str) -> None:
        """A sandbox is gone: what only it had used goes, too."""
        name = _once(sandbox_id)
        if self._links.layer(name).path.exists() and await self._drop(self._links.layer(name).name):
            await finished(asyncio.to_thread(self._links.remove, name))

    async def clean(self, alive: set[str]) -> None:
        """After a node's start: remove what nobody uses, of sandboxes that are gone and of makers that died."""
        for path in await asyncio.to_thread(lambda: list(self._root.glob("*.part"))):
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        for name in await asyncio.to_thread(self._links.names):
            if name.startswith("memory-") and name not in map(_once, alive):
                await self.left(name.removeprefix("memory-"))

    async def shrink(self) -> list[str]:
        """Remove templates' memory that is beyond the bounds and that no machine uses; returns their keys."""
        removed = []
        for key in await asyncio.to_thread(self._beyond):
            name = f"template-{key}"
            if await self._drop(self._links.layer(name).name):
                await finished(asyncio.to_thread(self._links.remove, name))
                await finished(asyncio.to_thread(shutil.rmtree, self._root / key, ignore_errors=True))
                removed.append(key)
        return removed

    def _beyond(self) -> list[str]:
        """Keys of those that are too many or too large, the least used first."""
        found = []
        for path in self._root.iterdir() if self._root.exists() else ():
            if path.suffix != ".part":
                found.append((path.stat().st_mtime, path.name, _on_disk(path)))
        found.sort(reverse=True)
        total, kept = 0, []
        for index, (_, key, size) in enumerate(found):
            total += size
            if total > TEMPLATES_BYTES_MAX or index >= TEMPLATES_MAX:
                kept.append(key)
        return kept[::-1]


def _once(sandbox_id: str) -> str:
    return f"memory-{sandbox_id.replace('_', '-')}"


def _on_disk(directory: Path) -> int:
    """Bytes that its files take, without their holes."""
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())
