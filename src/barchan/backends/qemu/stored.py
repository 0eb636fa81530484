"""Memory directories that machines come from: those of templates, kept for the next, and those of single restores."""

import asyncio
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from barchan.backends.hosted.outer import HostLayer
from barchan.backends.qemu.links import Links
from barchan.backends.qemu.machine import DISK, MEMORY, RAM_PATH, STATE, STATE_PATH
from barchan.backends.qemu.shape import Shape
from barchan.core.finished import finished
from barchan.errors import BarchanError
from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.memory_file import RECORD

TEMPLATES_BYTES_MAX = 4 << 30  # of templates' memory on disk; of the least used ones it is removed beyond that
TEMPLATES_MAX = 32
_ONCE, _TEMPLATE = "memory-", "template-"
_PART = ".part"
Drop = Callable[[str], Awaitable[bool]]


class Stored:
    """Memory directories of one backend as layers of outers. Those of templates are caches: one goes when its image
    has, or when there are too many.

    Args:
        root: A directory of its own.
        drop: Makes the supervisor let go of a layer; False: an outer uses it.
    """

    def __init__(self, root: Path, links: Links, drop: Drop) -> None:
        self._root = root
        self._links = links
        self._drop = drop
        self._turns = WeakValueDictionary[str, asyncio.Lock]()
        self._takers: Counter[str] = Counter()
        self._refused: set[str] = set()  # layers of sandboxes that are gone, which the supervisor has not let go yet

    def turn(self, key: str) -> asyncio.Lock:
        """Of whoever makes a template's memory, or removes it."""
        return self._turns.setdefault(key, asyncio.Lock())

    @contextmanager
    def taking(self, key: str) -> Iterator[None]:
        """Inside, a template's memory stays, if it is there: a machine is being made of it."""
        self._takers[key] += 1
        try:
            yield
        finally:
            self._takers[key] -= 1
            if not self._takers[key]:
                del self._takers[key]

    def directory(self, key: str) -> Path:
        """A template's memory directory, whether or not it is there."""
        return self._root / key

    def part(self, key: str) -> Path:
        """A path for a memory directory that is to become a template's; not yet made."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._root / f"{key}.{os.getpid()}-{time.monotonic_ns()}{_PART}"

    def keep(self, part: Path, key: str) -> None:
        """It is whole: from now on it is the template's, and the newest."""
        os.utime(part)
        part.rename(self._root / key)

    async def template(self, key: str, shape: Shape) -> HostLayer | None:
        """The layer of a template's memory; None: it was not made yet."""
        directory = self.directory(key)
        if not directory.exists():
            return None
        await asyncio.to_thread(os.utime, directory)
        return await asyncio.to_thread(self._layer, _TEMPLATE + key, directory, shape)

    async def once(self, sandbox_id: str, memory: Path, shape: Shape) -> HostLayer:
        """The layer of a memory directory for one sandbox, which keeps it until `left`.

        It has a name that no other has: a sandbox may come back from another memory while what it was before is going.
        """
        return await asyncio.to_thread(self._layer, f"{_once(sandbox_id)}-{secrets.token_hex(4)}", memory, shape)

    def _layer(self, name: str, memory: Path, shape: Shape) -> HostLayer:
        files = {RAM_PATH: memory / MEMORY, STATE_PATH: memory / STATE}
        if (memory / DISK).exists():
            files[shape.disk] = memory / DISK
        return self._links.make(name, files)

    async def left(self, sandbox_id: str) -> None:
        """A sandbox is gone: what only it had used goes, too, at the latest by `retry`."""
        for name in await asyncio.to_thread(self._links.names):
            if _owner(name) == _once(sandbox_id):
                await self._remove_once(name)

    async def retry(self) -> None:
        """Remove what could not be when its sandbox left."""
        for name in list(self._refused):
            await self._remove_once(name)

    async def _remove_once(self, name: str) -> None:
        self._refused.add(name)
        try:
            is_free = await self._drop(self._links.layer(name).name)
        except BarchanError:
            return  # asked again by and by; the sandbox itself is gone
        if is_free:
            await finished(asyncio.to_thread(self._links.remove, name))
            self._refused.discard(name)

    async def clean(self, alive: set[str]) -> None:
        """Before anything is made: remove what nobody uses, of sandboxes that are gone and of makers that died."""
        for path in await asyncio.to_thread(lambda: list(self._root.glob(f"*{_PART}"))):
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        await asyncio.to_thread(self._links.clean)
        owners = set(map(_once, alive))
        for name in await asyncio.to_thread(self._links.names):
            is_left = name.startswith(_TEMPLATE) and not self.directory(name.removeprefix(_TEMPLATE)).exists()
            if is_left or (name.startswith(_ONCE) and _owner(name) not in owners):
                await self._remove_once(name)

    async def drop_unneeded(self, is_needed: Callable[[MemoryRecord], bool]) -> list[str]:
        """Remove templates' memory that no new machine can come from; returns their keys.

        Args:
            is_needed: Whether the image that a machine was stored with, and what ran it, are there still.
        """
        records = await asyncio.to_thread(self._records)
        return await self._remove([key for key, record in records.items() if record is None or not is_needed(record)])

    def _records(self) -> dict[str, MemoryRecord | None]:
        """Of all templates' memory, by key; None: it can't be read, and so be of no use."""
        found: dict[str, MemoryRecord | None] = {}
        for path in self._root.iterdir() if self._root.exists() else ():
            if path.suffix != _PART:
                try:
                    found[path.name] = msgspec.json.decode((path / RECORD).read_bytes(), type=MemoryRecord)
                except (OSError, msgspec.MsgspecError):
                    found[path.name] = None
        return found

    async def shrink(self) -> list[str]:
        """Remove templates' memory that is beyond the bounds and that no machine uses; returns their keys."""
        return await self._remove(await asyncio.to_thread(self._beyond))

    async def _remove(self, keys: Iterable[str]) -> list[str]:
        """Those that nobody uses or is about to; returns their keys."""
        removed = []
        for key in keys:
            if not self._takers[key] and not self.turn(key).locked():
                async with self.turn(key):
                    if await self._remove_template(key):
                        removed.append(key)
        return removed

    async def _remove_template(self, key: str) -> bool:
        name = _TEMPLATE + key
        if not await self._drop(self._links.layer(name).name) or self._takers[key]:
            return False
        part = self.part(key)
        self.directory(key).rename(part)  # at once: who comes now finds none, and waits for the turn to make it
        await finished(asyncio.to_thread(self._links.remove, name))
        await finished(asyncio.to_thread(shutil.rmtree, part, ignore_errors=True))
        return True

    def _beyond(self) -> list[str]:
        """Keys of those that are too many or too large, the least used first; the one used last is never among them."""
        found = []
        for path in self._root.iterdir() if self._root.exists() else ():
            if path.suffix != _PART:
                found.append((path.stat().st_mtime, path.name, _on_disk(path)))
        found.sort(reverse=True)
        total, beyond = 0, []
        for index, (_, key, size) in enumerate(found):
            total += size
            if index and (total > TEMPLATES_BYTES_MAX or index >= TEMPLATES_MAX):
                beyond.append(key)
        return beyond[::-1]


def _once(sandbox_id: str) -> str:
    """What the names of a sandbox's own layers begin with."""
    return f"{_ONCE}{sandbox_id.replace('_', '-')}"


def _owner(name: str) -> str:
    return name.rpartition("-")[0]


def _on_disk(directory: Path) -> int:
    """Bytes that its files take, without their holes."""
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())
