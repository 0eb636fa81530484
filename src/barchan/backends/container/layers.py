"""The layers that the supervisor has mounted: each once for all sandboxes, from its first use until nobody wants it."""

import asyncio
import errno
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from barchan.backends.container.lazy import LazyReader
from barchan.backends.container.supervisor import Answer
from barchan.errors import BackendError, BarchanError, RequirementMissing
from barchan.image.store import ImageStore
from barchan.image.template import Layer

HOST_PREFIX = "host-"  # of the names of directories of this host
IDLE_S = 600.0  # that a lazily kept layer stays mounted, and its metadata in the cache, while nobody uses it


class Ask(Protocol):
    """A request to the supervisor."""

    def __call__(
        self, op: str, *, fds: Sequence[int] = ..., timeout_s: float = ..., **keys: str | int
    ) -> Awaitable[Answer]: ...


class _Mount:
    def __init__(self, made: asyncio.Future[None], *, is_lazy: bool) -> None:
        self.made = made
        self.is_lazy = is_lazy
        self.used = asyncio.get_running_loop().time()


class Layers:
    """Mounts layers on first use.

    Args:
        idle_s: After how many unused seconds a lazily kept layer is unmounted.
    """

    def __init__(self, images: ImageStore, lazy: LazyReader, ask: Ask, idle_s: float = IDLE_S) -> None:
        self._images = images
        self._lazy = lazy
        self._ask = ask
        self._idle_s = idle_s
        self._mounts: dict[str, _Mount] = {}
        self._going: dict[str, asyncio.Task[bool]] = {}
        self._starting: Counter[str] = Counter()  # creates under way that need them
        self._host: dict[str, Path] = {}  # directories of this host, by the name that stands for a digest
        self.unwanted: set[str] = set()  # without an image, while a sandbox uses them

    def adopt(self, digests: Iterable[str]) -> None:
        """Take over what the supervisor has mounted already."""
        served = self._lazy.served
        for digest in digests:
            made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            made.set_result(None)
            self._mounts[digest] = _Mount(made, is_lazy=digest in served)

    def add_host(self, name: str, path: Path) -> Layer:
        """A directory of this host, as a layer of outers. It must not change."""
        digest = f"{HOST_PREFIX}{name}"
        self._host[digest] = path
        return Layer(digest, "dir")

    async def drop_host(self, name: str) -> bool:
        """Let go of one; False: a container uses it, or is about to."""
        digest = f"{HOST_PREFIX}{name}"
        if self._starting[digest] or (digest in self._mounts and not await self._free(digest)):
            return False
        if self._starting[digest] or digest in self._mounts:
            return False  # a create has come for it meanwhile
        self._host.pop(digest, None)
        return True

    async def _free(self, digest: str) -> bool:
        return await self._let_go(digest, is_lazy=False, keeps_data=False)

    def any_lazy(self, digests: Iterable[str]) -> bool:
        """Whether one of them is read on demand."""
        return any(mount is not None and mount.is_lazy for mount in map(self._mounts.get, digests))

    @asynccontextmanager
    async def mounted(self, layers: Sequence[Layer]) -> AsyncIterator[frozenset[str]]:
        """All of them are mounted, and stay so inside; a sandbox made inside keeps them for as long as it lives.

        Gives those that were not mounted before.

        Raises:
            BlobUnavailable, BackendError: One can't be mounted; all who wait for it are told the same.
        """
        digests = Counter(layer.digest for layer in layers)
        self._starting.update(digests)
        try:
            yield frozenset([layer.digest for layer in layers if await self._have(layer)])
        finally:
            self._starting -= digests

    async def _have(self, layer: Layer) -> bool:
        """Mount a layer unless it is; whoever needs it meanwhile waits for the same mount. True: it is a new one."""
        digest = layer.digest
        mount = self._mounts.get(digest)
        if mount is not None and mount.is_lazy and layer.kind != "lazy" and self._starting[digest] == 1:
            await self._let_go(
                digest, is_lazy=True, keeps_data=False
            )  # it was fetched whole since, and nobody reads the other
        going = self._going.get(digest)
        if going is not None:
            await asyncio.wait({going})
        mount = self._mounts.get(digest)
        is_new = mount is None
        if mount is None:
            task = asyncio.get_running_loop().create_task(self._mount(layer))
            mount = self._mounts[digest] = _Mount(task, is_lazy=layer.kind == "lazy")
            task.add_done_callback(lambda made: self._forget_failed(digest, made))
        mount.used = asyncio.get_running_loop().time()
        await asyncio.shield(mount.made)
        return is_new

    def _forget_failed(self, digest: str, made: "asyncio.Task[None]") -> None:
        if made.cancelled() or made.exception() is not None:
            del self._mounts[digest]

    async def _mount(self, layer: Layer) -> None:
        digest = layer.digest
        path = self._host.get(digest) or self._images.layer_path(layer)
        if layer.kind != "lazy":
            try:
                (await self._ask("layer", digest=digest, type=layer.kind, path=os.fspath(path))).close()
            except BackendError as error:
                if error.details.get("errno") != errno.ENOTBLK:
                    raise
                raise RequirementMissing(
                    f"no kernel mounts files of the file system that {path.parent} is on, as tmpfs and overlayfs: "
                    "have the state directory on a disk (try: BARCHAN_STATE_DIR or --state-dir, on ext4, xfs or btrfs)"
                ) from error
            return
        mount_fd = await self._lazy.mount(digest, path)
        try:
            (await self._ask("layer", fds=[mount_fd], digest=digest, type="mount")).close()
        finally:
            await asyncio.to_thread(os.close, mount_fd)  # the last of a mount may wait for its reader

    async def unmount(self, digests: Iterable[str] | None = None) -> None:
        """See `Backend.unmount`; asked for all, lazily kept ones that are idle are let go of, too."""
        asked = None if digests is None else set(digests)
        wanted = set(self._mounts) if asked is None else asked
        known, gone = await asyncio.to_thread(self._look, wanted, asked is None)
        failures = []
        for digest in wanted | gone:
            if digest not in gone:
                self.unwanted.discard(digest)
                if asked is not None or not self._is_idle(digest):
                    continue
            try:
                is_free = not self._starting[digest]
                let_go = is_free and await self._let_go(digest, is_lazy=digest in known, keeps_data=digest not in gone)
            except BarchanError as error:  # the next pass tries again; the others have nothing to do with it
                failures.append(error)
                continue
            if digest in gone and not let_go:
                self.unwanted.add(digest)
            else:
                self.unwanted.discard(digest)
        if failures:
            raise failures[0]

    def _look(self, digests: set[str], is_all: bool) -> tuple[set[str], set[str]]:
        """Of which layers the reader keeps something, and which have no image. It looks at many files."""
        known = self._lazy.known
        return known, {
            digest
            for digest in (digests | known if is_all else digests)
            if not digest.startswith(HOST_PREFIX) and not self._images.has_layer(digest)
        }

    def _is_idle(self, digest: str) -> bool:
        mount = self._mounts.get(digest)
        idle_s = 0.0 if mount is None else asyncio.get_running_loop().time() - mount.used
        return mount is not None and mount.is_lazy and idle_s > self._idle_s

    async def _let_go(self, digest: str, *, is_lazy: bool, keeps_data: bool) -> bool:
        """Unmount a layer; False: a sandbox uses it. Nobody mounts it meanwhile."""
        going = self._going.get(digest)
        if going is None:
            going = self._going[digest] = asyncio.get_running_loop().create_task(
                self._unlayer(digest, is_lazy, keeps_data)
            )
            going.add_done_callback(lambda _: self._going.pop(digest))
        return await asyncio.shield(going)

    async def _unlayer(self, digest: str, is_lazy: bool, keeps_data: bool) -> bool:
        mount = self._mounts.get(digest)
        if mount is not None:
            await asyncio.wait({mount.made})
        try:
            (await self._ask("unlayer", digest=digest)).close()
        except BackendError as error:
            if error.details.get("errno") != errno.EBUSY:
                raise
            if mount is not None:
                mount.used = asyncio.get_running_loop().time()
            return False
        self._mounts.pop(digest, None)
        if is_lazy:
            await self._lazy.drop(digest, keeps_data=keeps_data)
        return True

    async def close(self) -> None:
        """Give up mounts that are being made."""
        tasks = [mount.made for mount in self._mounts.values() if not mount.made.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
