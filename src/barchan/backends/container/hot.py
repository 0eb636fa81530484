"""What the first sandbox of a template reads first: noted once, kept in its store, fetched early from then on."""

import asyncio
from collections.abc import Container
from contextlib import suppress

from barchan.backends.container.lazy import LazyReader
from barchan.errors import BarchanError
from barchan.image.store import ImageStore
from barchan.image.template import Layer, Template

RECORD_S = 20.0
STOP_S = 5.0
PREFETCH_CHUNKS_MAX = 4096  # of one layer: they go in one packet
TEMPLATES_MAX = 4096  # that are remembered as seen


class FirstReads:
    """For lazily kept layers only. It works beside the create that it is told of, and delays nothing.

    Args:
        record_s: How long reads are noted, from the first create of a template that nobody has noted before.
    """

    def __init__(self, reader: LazyReader, images: ImageStore, record_s: float = RECORD_S) -> None:
        self._reader = reader
        self._images = images
        self._record_s = record_s
        self._seen: dict[str, None] = {}
        self._recorded: set[str] = set()  # layers whose reads are noted now
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, template: Template, fresh: Container[str]) -> None:
        """A sandbox of this template is about to start; its layers are mounted, and those of `fresh` only now: of
        others the kernel may have in memory what the sandbox reads, so that the reader would not hear of it. A template
        that was seen before is begun again where one of them had rested: its data may have gone, and its pins have.
        """
        layers = [layer for layer in template.layers if layer.kind == "lazy"]
        rested = any(layer.digest in fresh for layer in layers)
        if not layers or (template.digest in self._seen and not rested):
            return
        self._seen[template.digest] = None
        if len(self._seen) > TEMPLATES_MAX:
            del self._seen[next(iter(self._seen))]
        task = asyncio.get_running_loop().create_task(
            self._run(template.digest, layers, [layer.digest for layer in layers if layer.digest in fresh])
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is being noted."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, template: str, layers: list[Layer], fresh: list[str]) -> None:
        noted = [digest for digest in fresh if digest not in self._recorded]
        self._recorded.update(noted)
        try:
            await self._fetch_and_note(template, layers, noted)
        except (BarchanError, OSError) as error:  # it is a hint: sandboxes start without, only slower
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"the first reads of template {template[:12]} are not known", "exception": error}
            )
        finally:
            for digest in noted:  # of those that were told it stops for good
                with suppress(BarchanError, TimeoutError):
                    async with asyncio.timeout(STOP_S):
                        await self._reader.stop_record(digest)
            self._recorded.difference_update(noted)

    async def _fetch_and_note(self, template: str, layers: list[Layer], noted: list[str]) -> None:
        from barchan.image.blobs import BlobStore
        from barchan.image.hot import cut_hot, merge_hot, read_hot, write_hot
        from barchan.image.stored import read_lazy

        # Before it is known whether that is needed: the sandbox reads already.
        for digest in noted:
            await self._reader.start_record(digest)
        described = await asyncio.to_thread(read_lazy, self._images.layer_path(layers[0]))
        store = BlobStore.open(described.url)
        record = await read_hot(store, template)
        wanted: dict[str, list[int]] = {}
        for digest, chunks in cut_hot(record, await asyncio.to_thread(self._chunk_bytes, layers)):
            wanted.setdefault(digest, []).extend(chunks)
        for layer in layers:
            if layer.digest in wanted:
                await self._reader.prefetch(layer.digest, wanted[layer.digest][:PREFETCH_CHUNKS_MAX])
        unknown = [digest for digest in noted if digest not in wanted]
        if not unknown or store.is_read_only:
            return
        await asyncio.sleep(self._record_s)
        found = [(digest, tuple(await self._reader.stop_record(digest))) for digest in unknown]
        more = tuple((digest, chunks) for digest, chunks in found if chunks)
        if more:  # beside what others have noted meanwhile
            stored = await read_hot(store, template)
            await write_hot(store, template, merge_hot(stored, more, chunk_bytes=described.index.chunk_bytes))

    def _chunk_bytes(self, layers: list[Layer]) -> dict[str, int]:
        from barchan.image.stored import read_lazy

        return {layer.digest: read_lazy(self._images.layer_path(layer)).index.chunk_bytes for layer in layers}
