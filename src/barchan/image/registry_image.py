"""An image in a registry: read through mirrors, or written."""

import asyncio
import io
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import TimeoutError as NotYet
from contextlib import aclosing
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO, NamedTuple, TypeVar

from barchan.errors import (
    BackendError,
    BarchanError,
    CapacityError,
    Denied,
    NotFound,
    ProtocolError,
    TransportError,
)
from barchan.image.intake import Stopped
from barchan.image.oci import MANIFEST, Descriptor, Found, find_image
from barchan.image.registry import Registry

LOOK_S = 0.2  # how often a read that waits looks whether it is still wanted
Result = TypeVar("Result")
# What a mirror may do that another registry may not.
ELSEWHERE = (TransportError, CapacityError, ProtocolError, BackendError, NotFound, Denied)


class RegistryImage(NamedTuple):
    """`HOST[:PORT]/REPOSITORY:TAG` or `@DIGEST`; `reference` is the tag or digest."""

    host: str
    repository: str
    reference: str

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}{'@' if ':' in self.reference else ':'}{self.reference}"


class RegistrySource:
    """An image of a registry; its mirrors are asked first, and each that fails is left alone from then on.

    Args:
        registries: Mirrors, and last the registry itself.
    """

    def __init__(self, image: RegistryImage, registries: Sequence[Registry]) -> None:
        self._image = image
        self._registries = list(registries)
        self._layers: tuple[Descriptor, ...] = ()
        self._loop = asyncio.get_running_loop()

    async def image(self) -> Found:
        root, media_type = await self._first(
            lambda registry: registry.manifest(self._image.repository, self._image.reference)
        )
        found = await find_image(root, media_type, self._document, str(self._image))
        self._layers = found.manifest.layers
        return found

    async def _document(self, blob: Descriptor) -> bytes:
        blob.check()
        if "manifest" in blob.media_type or "index" in blob.media_type:
            data, _ = await self._first(lambda registry: registry.manifest(self._image.repository, blob.digest))
            return data
        return await self._first(lambda registry: registry.document(self._image.repository, blob))

    async def _first(self, ask: Callable[[Registry], Awaitable[Result]]) -> Result:
        """The answer of the first registry that has one; the last one's failure is the failure."""
        for registry in tuple(self._registries[:-1]):
            try:
                return await ask(registry)
            except ELSEWHERE as error:
                self._leave(registry, error)
        return await ask(self._registries[-1])

    def _leave(self, mirror: Registry, error: BarchanError) -> None:
        if not isinstance(error, NotFound) and mirror in self._registries:
            self._registries.remove(mirror)

    def open(self, position: int, stop: Event) -> BinaryIO:
        return io.BufferedReader(_Download(self.stream(self._layers[position]), self._loop, stop))

    async def stream(self, blob: Descriptor) -> AsyncGenerator[bytes, None]:
        """The bytes of a blob; where a mirror fails, the next registry goes on."""
        given = 0
        for registry in tuple(self._registries):
            try:
                async with aclosing(registry.blob(self._image.repository, blob)) as chunks:
                    skip = given
                    async for chunk in chunks:
                        wanted, skip = chunk[skip:], max(0, skip - len(chunk))
                        given += len(wanted)
                        if wanted:
                            yield wanted
                return
            except ELSEWHERE as error:
                if registry is self._registries[-1]:
                    raise
                self._leave(registry, error)


class _Download(io.RawIOBase):
    """The bytes of a blob, read in a thread while the event loop fetches them, a piece at a time."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], loop: asyncio.AbstractEventLoop, stop: Event) -> None:
        self._chunks, self._loop, self._stop = chunks, loop, stop
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            self._left = memoryview(self._next())
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def _next(self) -> bytes:
        async def step() -> bytes:
            return await anext(self._chunks, b"")

        waiting = asyncio.run_coroutine_threadsafe(step(), self._loop)
        while True:
            try:
                return waiting.result(LOOK_S)
            except NotYet:
                if waiting.done():  # the stream itself ran out of time
                    raise
                if self._stop.is_set():
                    waiting.cancel()  # which ends the stream, too
                    raise Stopped from None

    def close(self) -> None:
        if not self.closed and not self._stop.is_set():
            asyncio.run_coroutine_threadsafe(self._chunks.aclose(), self._loop).result()
        super().close()


class RegistrySink:
    """A repository that an image is written to."""

    def __init__(self, image: RegistryImage, registry: Registry) -> None:
        self._image, self._registry = image, registry

    async def has(self, blob: Descriptor) -> bool:
        return await self._registry.has_blob(self._image.repository, blob.digest)

    async def put(self, path: Path, blob: Descriptor) -> None:
        await self._registry.upload(self._image.repository, path, blob)

    async def finish(self, manifest: bytes) -> None:
        await self._registry.put_manifest(self._image.repository, self._image.reference, manifest, MANIFEST)
