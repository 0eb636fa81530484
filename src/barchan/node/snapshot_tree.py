"""The snapshots of a node as a tree: what each came of, what it holds, and sandboxes made of it.

A snapshot is an image and, for kind `memory`, a file on the node's shelf. It lasts as long as its image: when that was
removed or gave way to another of its name, the snapshot is forgotten as soon as anybody looks. Removing one harms none
that came of it: layers and memory files are kept for as long as anything names them.
"""

import asyncio
import re
import secrets
import shutil
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from barchan.backends.base import Backend, Handle
from barchan.core.finished import finished
from barchan.errors import InvalidSpec, NotFound
from barchan.image.store import image_info
from barchan.image.template import Template
from barchan.model.image import BUILT_PREFIX
from barchan.model.node import ImageInfo, SnapshotRequest
from barchan.model.sandbox import SandboxSpec
from barchan.model.snapshot_info import SNAPSHOT_PREFIX, SnapshotInfo
from barchan.node import snapshots
from barchan.node.kept_memory import KeptMemory
from barchan.node.late_memory import unpacked
from barchan.node.live import Live
from barchan.node.memories import Taken, check_backend, check_files, from_memory, held, take
from barchan.node.snapshot_journal import SnapshotJournal, SnapshotRow

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes, Start

_ID = re.compile(rf"{SNAPSHOT_PREFIX}[0-9a-f]{{16}}")


class SnapshotTree:
    """Keeps, finds and removes the snapshots of one node.

    `folder` is for memory directories, each there for as long as a snapshot or a start of one takes.
    """

    def __init__(self, sandboxes: "Sandboxes", journal: Path, folder: Path) -> None:
        self._sandboxes = sandboxes
        self._journal = SnapshotJournal(journal)
        self._folder = folder
        self.kept = KeptMemory(folder)
        self._turns = weakref.WeakValueDictionary[str, asyncio.Lock]()

    def close(self) -> None:
        self._journal.close()

    async def start(self) -> None:
        """Remove what a killed node was making, and what is on the shelf for no snapshot."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        for row in self._journal.begun():
            if not row.is_named and self._sandboxes.images.find(row.image) is not None:
                await snapshots.remove_image(self._sandboxes, row.image)
            self._journal.remove(row)
        known = {row.snapshot_id for row in await self._whole()}
        shelf = self._sandboxes.shelf
        for entry in await asyncio.to_thread(shelf.entries):
            if entry.snapshot_id.startswith(SNAPSHOT_PREFIX) and entry.snapshot_id not in known:
                await asyncio.to_thread(shelf.remove, entry.snapshot_id)

    # finding

    def _template(self, row: SnapshotRow) -> Template | None:
        """Its image, if that is there still."""
        template = self._sandboxes.images.find(row.image)
        return template if template is not None and template.digest == row.digest else None

    async def _whole(self) -> list[SnapshotRow]:
        """All that are there still; the others are forgotten, and what they have on the shelf is removed."""
        rows = self._journal.whole()
        templates = await asyncio.to_thread(lambda: [self._template(row) for row in rows])  # a file each
        there = []
        for row, template in zip(rows, templates, strict=True):
            if template is not None or self._template(row) is not None:
                there.append(row)
            else:
                self._forget(row)
        return there

    def _forget(self, row: SnapshotRow) -> None:
        self._journal.remove(row)
        if row.kind == "memory":
            self._sandboxes.tasks.spawn(self._remove_memory(row))

    async def _remove_memory(self, row: SnapshotRow) -> None:
        await asyncio.to_thread(self._sandboxes.shelf.remove, row.snapshot_id)
        await asyncio.to_thread(self.kept.drop, row.snapshot_id)

    def row(self, snapshot_id: str) -> SnapshotRow:
        """One that is there.

        Raises:
            NotFound: There is none of this id.
        """
        row = self._journal.find(snapshot_id)
        if row is None or self._template(row) is None:
            raise NotFound(f"no snapshot {snapshot_id} on this node", snapshot_id=snapshot_id)
        return row

    async def listed(self, metadata: dict[str, str]) -> list[SnapshotInfo]:
        """Those that have all of `metadata`, the oldest first, without what builds keep for themselves."""
        rows = [
            row
            for row in await self._whole()
            if metadata.items() <= row.metadata.items() and not row.image.startswith(BUILT_PREFIX)
        ]
        return await self._infos(sorted(rows, key=lambda row: row.created_unix_s))

    async def info(self, snapshot_id: str) -> SnapshotInfo:
        infos = await self._infos([self.row(snapshot_id)])
        if not infos:
            raise NotFound(f"no snapshot {snapshot_id} on this node", snapshot_id=snapshot_id)
        return infos[0]

    async def _infos(self, rows: list[SnapshotRow]) -> list[SnapshotInfo]:
        images = {image.name: image for image in await asyncio.to_thread(self._sandboxes.images.list)}
        return [
            _info(row, image, image.size_bytes - image.shared_bytes, image.shared_bytes)
            for row in rows
            if (image := images.get(row.image)) is not None and image.digest == row.digest
        ]

    async def template_for(self, spec: SandboxSpec) -> Template:
        """What a sandbox is made of, whose template may be the id of a snapshot.

        Raises:
            InvalidSpec: It is one with memory, and processes can't become what is asked. NotFound: It was removed.
        """
        if _ID.fullmatch(spec.template) and self._sandboxes.images.find(spec.template) is None:
            row = self.row(spec.template)
            if row.kind == "memory" and (spec.network, spec.root, spec.layers) != (row.spec.network, row.spec.root, ()):
                raise InvalidSpec(
                    f"the processes of snapshot {row.snapshot_id} were stored with network={row.spec.network!r}, "
                    f"root={row.spec.root!r} and no layers above: ask for the same, or start from its image {row.image}"
                )
            spec = replace(spec, template=row.image)
        return await self._sandboxes.templates.template_for(spec)

    def backend_of(self, spec: SandboxSpec) -> str | None:
        """The backend that stored the processes which a sandbox goes on with; None: it starts with none."""
        row = self._journal.find(spec.template) if spec.template.startswith(SNAPSHOT_PREFIX) else None
        return None if row is None or row.kind == "fs" else row.spec.backend

    def start_of(self, spec: SandboxSpec) -> "Start | None":
        """How a sandbox starts that goes on from a snapshot's memory; None: as every other."""
        row = self._journal.find(spec.template) if spec.template.startswith(SNAPSHOT_PREFIX) else None
        if row is None or row.kind == "fs":
            return None

        async def start(backend: Backend, live: Live) -> Handle:
            check_backend(backend, live.spec.backend)
            with self.kept.using(row.snapshot_id) as kept:
                if kept is not None:
                    taken = Taken(directory=kept.directory, record=kept.record, frozen_s=row.frozen_s)
                    return await from_memory(taken, None)(backend, live)
            handle: Handle | None = None
            try:
                async with (
                    self._workspace() as directory,
                    unpacked(backend, self._sandboxes.shelf, live.sandbox_id, row.snapshot_id, directory) as found,
                ):
                    taken = Taken(directory=directory, record=found.record, frozen_s=row.frozen_s)
                    handle = await from_memory(taken, None, found.pager)(backend, live)
                    await self._keep_memory(backend, row, taken)
                    if self._journal.find(row.snapshot_id) is None:  # it was removed meanwhile
                        await finished(asyncio.to_thread(self.kept.drop, row.snapshot_id))
            except BaseException:  # nobody else knows yet that it runs
                if handle is not None:
                    await finished(handle.destroy())
                raise
            return handle

        return start

    async def _keep_memory(self, backend: Backend, row: SnapshotRow, taken: Taken) -> None:
        """Let the next restore find what this one used, or what the snapshot was made of, if that can be."""
        if not backend.capabilities.shares_memory:
            return
        try:
            await finished(asyncio.to_thread(self.kept.keep, row.snapshot_id, taken.directory, taken.record))
        except OSError as error:  # the next one is unpacked again
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"the memory of {row.snapshot_id} is not kept", "exception": error}
            )

    @asynccontextmanager
    async def _workspace(self) -> AsyncIterator[Path]:
        """A path for a memory directory, not yet made."""
        await asyncio.to_thread(self._folder.mkdir, 0o700, exist_ok=True)
        directory = self._folder / secrets.token_hex(8)
        try:
            yield directory
        finally:
            await finished(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))

    # making and removing

    def turn(self, snapshot_id: str) -> asyncio.Lock:
        """Of whoever brings a snapshot of that id here."""
        return self._turns.setdefault(snapshot_id, asyncio.Lock())

    async def keep(self, live: Live, asked: SnapshotRequest) -> SnapshotInfo:
        """Make a snapshot of a sandbox; one whose image has that name gives way with it.

        Raises:
            As `snapshots.snapshot`.
        """
        row = SnapshotRow(
            snapshot_id=f"{SNAPSHOT_PREFIX}{secrets.token_hex(8)}",
            kind=asked.kind,
            image=asked.name or snapshots.fresh_name(),
            digest=None,
            parent=self._parent(live),
            is_named=asked.name is not None,
            sandbox_id=live.sandbox_id,
            spec=live.spec,
            metadata=asked.metadata,
            created_unix_s=time.time(),
        )
        self._journal.write(row)
        asked = replace(asked, name=row.image)
        try:
            if asked.kind == "memory":
                template, row = await self._with_memory(live, asked, row)
            else:
                template = await self._files(live, asked, row, live.handle.pack)
        except BaseException:
            self._forget(row)
            raise
        for older in self._journal.of_image(row.image):
            self._forget(older)
        row = replace(row, digest=template.digest)
        self._journal.write(row)
        own_bytes = self._sandboxes.images.layer_bytes(template.layers[0])
        return _info(row, image_info(template), own_bytes, template.size_bytes - own_bytes)

    async def receive(self, row: SnapshotRow, bring: Callable[[], Awaitable[Template]]) -> SnapshotInfo:
        """Have a snapshot of another node here, too; one whose image has that name gives way with it.

        Args:
            row: As that node has it.
            bring: Makes its image, under its name, and what of it lies on the shelf; if that fails, neither is left.
        """
        is_known = row.parent != "" and self._journal.find(row.parent) is not None
        row = replace(row, digest=None, parent=row.parent if is_known else "")
        self._journal.write(row)
        try:
            template = await bring()
        except BaseException:
            self._journal.remove(row)
            raise
        for older in self._journal.of_image(row.image):
            self._forget(older)
        self._journal.write(replace(row, digest=template.digest))
        return await self.info(row.snapshot_id)

    async def _files(
        self, live: Live, asked: SnapshotRequest, row: SnapshotRow, pack: Callable[[Path], Awaitable[None]]
    ) -> Template:
        check_files(await self._sandboxes.backend(live.spec.backend), live.spec.backend)
        return await snapshots.snapshot(self._sandboxes, live, asked, pack, is_named=row.is_named)

    async def _with_memory(self, live: Live, asked: SnapshotRequest, row: SnapshotRow) -> tuple[Template, SnapshotRow]:
        """Memory and files of one moment."""
        backend = await self._sandboxes.backend(live.spec.backend)
        check_backend(backend, live.spec.backend)
        cut = row.snapshot_id
        async with self._workspace() as directory:
            try:
                async with held(self._sandboxes, live):
                    taken = await take(self._sandboxes, live, directory, cut)
                pack = partial(self._sandboxes.shelf.pack, row.snapshot_id, directory, base=self._base(row))
                packed = await finished(asyncio.to_thread(pack))
                template = await self._files(live, asked, row, partial(live.handle.pack_cut, cut))
                await self._keep_memory(backend, row, taken)
            finally:
                await asyncio.shield(backend.remove_cut(cut))
        return template, replace(
            row,
            memory_bytes=packed.file_bytes,
            resident_bytes=taken.record.resident_bytes,
            frozen_s=taken.frozen_s,
        )

    def _base(self, row: SnapshotRow) -> str | None:
        """A snapshot that has most pages of this one already: the sandbox's last one, or what the sandbox came of."""
        parent = self._journal.find(row.parent)
        past = [*self._journal.of_sandbox(row.sandbox_id), *([parent] if parent is not None else [])]
        return next((known.snapshot_id for known in past if known.kind == "memory"), None)

    async def remove(self, snapshot_id: str) -> SnapshotInfo:
        """Forget a snapshot with its image; what came of it stays, and comes of its parent then."""
        row = self.row(snapshot_id)
        info = await self.info(snapshot_id)
        await snapshots.remove_image(self._sandboxes, row.image)
        self._journal.remove(row)
        if row.kind == "memory":
            await finished(self._remove_memory(row))
        return info

    def _parent(self, live: Live) -> str:
        """The snapshot that a sandbox was made of, or that its parent was which it was forked from."""
        if self._journal.find(live.spec.template) is not None:
            return live.spec.template
        for row in self._journal.of_image(live.template.name):
            template = self._template(row)
            if template is not None and live.template.layers[-len(template.layers) :] == template.layers:
                return row.snapshot_id
        return ""


def _info(row: SnapshotRow, image: ImageInfo, own_bytes: int, shared_bytes: int) -> SnapshotInfo:
    return SnapshotInfo(
        snapshot_id=row.snapshot_id,
        kind=row.kind,
        image=image,
        parent=row.parent,
        sandbox_id=row.sandbox_id,
        spec=row.spec,
        metadata=row.metadata,
        created_unix_s=row.created_unix_s,
        own_bytes=own_bytes + row.memory_bytes,
        shared_bytes=shared_bytes,
        memory_bytes=row.memory_bytes,
        resident_bytes=row.resident_bytes,
    )
