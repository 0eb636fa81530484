"""Images that this node does not have, by name from its blob store: once for all who ask for one at the same time."""

import asyncio
from dataclasses import dataclass, field

from barchan.errors import BarchanError, BlobUnavailable, Denied, NotFound, TransportError
from barchan.image.blobs import BlobStore
from barchan.image.remote import fetch
from barchan.image.store import ImageStore
from barchan.image.template import Template

OPERATION_TIMEOUT_S = 30.0  # of one request to the store, with its repetitions: a create waits for a handful
FETCHES_AT_ONCE = 8


@dataclass(slots=True)
class _Asked:
    """One name that somebody waits for."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    failure: BarchanError | None = None


class StoreImages:
    """The images of one blob store, made templates of this node whose layers are read on demand.

    Args:
        url: As `BlobStore.open` takes it.

    Raises:
        InvalidSpec, RequirementMissing: As `BlobStore.open`.
    """

    def __init__(self, images: ImageStore, url: str) -> None:
        self.url = url
        self._images = images
        self.blobs = BlobStore.open(url, timeout_s=OPERATION_TIMEOUT_S)
        self._asked: dict[str, _Asked] = {}
        self._fetches = asyncio.Semaphore(FETCHES_AT_ONCE)

    async def fetch(self, name: str) -> Template:
        """An image that is not here, by its name or whole digest. Who asks meanwhile gets the same answer.

        Raises:
            NotFound: It is not in the store either.
            BlobUnavailable: The store is slow or dead, or refuses this node.
            BlobCorrupt: What the store has is damaged.
        """
        asked = self._asked.setdefault(name, _Asked())
        asked.waiting += 1
        try:
            async with asked.lock:
                if asked.failure is not None:
                    raise asked.failure
                try:
                    return await asyncio.to_thread(self._images.resolve, name)
                except NotFound:
                    pass  # whoever held the lock before has not brought it
                try:
                    return await self._fetch(name)
                except BarchanError as error:
                    asked.failure = error
                    raise
        finally:
            asked.waiting -= 1
            if not asked.waiting:
                del self._asked[name]

    async def _fetch(self, name: str) -> Template:
        try:
            async with self._fetches:
                try:
                    return await fetch(self._images, name, self.blobs)
                except NotFound as error:
                    if "layer" not in error.details:
                        raise
                # A layer that was here was removed in the middle: now it is seen that it has to come.
                return await fetch(self._images, name, self.blobs)
        except NotFound as error:
            if "layer" in error.details:
                raise BlobUnavailable(f"image {name!r} is not here, and can't be had now: {error}") from error
            raise NotFound(f"no image {name!r} here, nor in {self.url}", template=name) from error
        except (TransportError, Denied) as error:  # which a client would take for its own way to this node
            raise BlobUnavailable(f"image {name!r} is not here, and can't be had now: {error}") from error
