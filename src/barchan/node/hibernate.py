"""One sandbox to disk and back: its memory file on the node's shelf, and what it has written as a layer of an image.

It is stored while it stands still and is kept until the journal says that all of it is on disk; it comes back before
the journal says that it runs. So a node that is killed on the way leaves it whole in one place, and what it had half
made in the other is removed by the next one.
"""

import asyncio
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from barchan.backends.base import Backend, Handle
from barchan.core.finished import finished
from barchan.core.lifecycle import Fact, next_phase
from barchan.errors import BackendError, BarchanError, BootFailed, ConnectionLost, NotFound
from barchan.image.template import Template
from barchan.model.image import ASLEEP_PREFIX
from barchan.model.node import SnapshotRequest
from barchan.model.snapshot_info import SNAPSHOT_PREFIX
from barchan.node import away, memories, snapshots
from barchan.node.journal import Row
from barchan.node.late_memory import unpacked
from barchan.node.live import Live
from barchan.node.network import Network
from barchan.node.rest import Stored, Used
from barchan.snapshot.pager.source import LATE_BYTES_MIN

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

FOLDER_PREFIX = "hibernating-"  # in a node's state directory: memory directories, while they are packed or restored
ID_PREFIX = "hib_"  # on the shelf


class _Storing:
    """One attempt to store a sandbox: what it makes, and how that goes again."""

    def __init__(self, sandboxes: "Sandboxes", live: Live, backend: Backend) -> None:
        self._sandboxes = sandboxes
        self._live = live
        self._backend = backend
        token = secrets.token_hex(8)
        self.snapshot_id = f"{ID_PREFIX}{token}"
        self.image = f"{image_prefix(sandboxes)}{live.sandbox_id}-{token}"
        self.memory = sandboxes.state_dir / f"{FOLDER_PREFIX}{token}"
        self._packing: asyncio.Future[Template] | None = None

    async def dump(self) -> None:
        """Files and processes as they are; what was made of them is in `memory` and in a cut."""
        await memories.dump(self._sandboxes, self._live, self.memory, self.snapshot_id)

    async def pack(self) -> Template | None:
        """Make a file and an image of that; None, and it goes on meanwhile, when somebody waits for the sandbox."""
        self._packing = asyncio.ensure_future(self._pack())
        wanted = asyncio.ensure_future(self._live.rest.wanted.wait())
        try:
            await asyncio.wait({self._packing, wanted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            wanted.cancel()
        return self._packing.result() if self._packing.done() else None

    async def _pack(self) -> Template:
        """Memory and files at once: one is packed in a thread, the other by a process."""
        live, sandboxes = self._live, self._sandboxes
        asked = SnapshotRequest(name=self.image, base_layers=len(live.template.layers) - live.rest.own_layers)
        base = live.spec.template if live.spec.template.startswith(SNAPSHOT_PREFIX) else None  # with memory, perhaps
        template, _ = await asyncio.gather(
            snapshots.snapshot(sandboxes, live, asked, self._pack_files, is_named=True),
            asyncio.to_thread(sandboxes.shelf.pack, self.snapshot_id, self.memory, base=base),
        )
        return template

    async def _pack_files(self, target: Path) -> None:
        await self._live.handle.pack_cut(self.snapshot_id, target)

    async def tidy(self) -> None:
        """What was only needed on the way; the cut last, for without a supervisor there is none to remove."""
        await asyncio.to_thread(shutil.rmtree, self.memory, ignore_errors=True)
        await self._backend.remove_cut(self.snapshot_id)

    async def give_up(self) -> None:
        """Leave nothing, once what is under way has come to its end."""
        if self._packing is not None:
            await asyncio.gather(self._packing, return_exceptions=True)
        await asyncio.to_thread(self._sandboxes.shelf.remove, self.snapshot_id)
        await remove_image(self._sandboxes, self.image)
        await self.tidy()


async def store(sandboxes: "Sandboxes", live: Live, check: Callable[[], None]) -> None:
    """Store a paused sandbox and free all it takes.

    Args:
        check: Raises when somebody waits for it: then it is left as it was.

    Raises:
        NotSnapshotable: It can't be stored for what it holds; it is as it was.
        CapacityError, BackendError: There is no room, or it failed; it is as it was.
        SandboxLost: It broke on the way.
    """
    backend = await sandboxes.backend(live.spec.backend)
    storing = _Storing(sandboxes, live, backend)
    frozen_s = asyncio.get_running_loop().time() - live.rest.frozen_at
    try:
        await storing.dump()
        check()
        template = await storing.pack()
        check()
        if template is None:
            raise BackendError("packing ended before its time")
    except BaseException:
        sandboxes.tasks.spawn(storing.give_up())
        raise
    stats = live.stats()
    stored = Stored(
        snapshot_id=storing.snapshot_id,
        template=template,
        own_layers=len(template.layers) - template.base_layers,  # some may have been merged
        frozen_s=frozen_s,
        memory_bytes=live.rest.memory_bytes,
        used=Used(cpu_s=stats.cpu_s, oom_kills=stats.oom_kills, memory_peak_bytes=stats.memory_peak_bytes),
        shell=live.defaults.shell,
    )
    if stored.memory_bytes >= LATE_BYTES_MIN:
        sandboxes.tasks.spawn(backend.pager.start())  # its way back will want it, and should not wait for its start
    await finished(_put_down(sandboxes, live, storing, stored))


async def _put_down(sandboxes: "Sandboxes", live: Live, storing: _Storing, stored: Stored) -> None:
    """From here on it is on disk, whatever happens to its processes."""
    try:
        await _hold(sandboxes, live, stored.template)
        check_lives(sandboxes, live)
        sandboxes.journal.hibernate(live.sandbox_id, stored)
    except BaseException:  # it is not noted, and so it is not there: it stays paused
        sandboxes.holds.release(live.sandbox_id)
        await sandboxes.holds.hold(live.sandbox_id, live.template)
        await storing.give_up()
        raise
    live.phase = next_phase(live.phase, Fact.MEMORY_STORED)
    live.rest.stored, live.rest.tier, live.rest.refused = stored, "hibernated", ""
    live.rest.freed_bytes += stored.memory_bytes
    sandboxes.leases.stand_still(live.spec.lease_id, live.sandbox_id, on_disk=True)
    sandboxes.tiers.stored += 1
    older, live.rest.images = live.rest.images, {storing.image}
    try:
        if live.network is not None:
            await live.network.close()
            live.network = None
        await live.handle.destroy()
    finally:
        await storing.tidy()
        for image in older:
            await remove_image(sandboxes, image)


async def restore(sandboxes: "Sandboxes", live: Live) -> None:
    """Bring a hibernated sandbox back, and let it run.

    Raises:
        SnapshotCorrupt, SnapshotIncompatible, BackendError, CapacityError, ...: It stays where it is.
    """
    stored = live.rest.stored
    assert stored is not None
    backend = await sandboxes.backend(live.spec.backend)
    memory = sandboxes.state_dir / f"{FOLDER_PREFIX}{secrets.token_hex(8)}"
    claimed = await away.claim(sandboxes, live)
    handle: Handle | None = None
    try:
        async with unpacked(backend, sandboxes.shelf, live.sandbox_id, stored.snapshot_id, memory) as found:
            check_lives(sandboxes, live)
            handle = await backend.restore(
                live.sandbox_id, live.spec, stored.template, memory, found.record, cut=None, pager=found.pager
            )
            try:
                await _take(sandboxes, live, handle)
            except BaseException:
                gone, handle = handle, None
                await finished(_part(live, gone))
                raise
        _count(sandboxes, live, stored)
    except BaseException as error:
        if handle is not None:
            await finished(_part(live, handle))
        await away.give_back(sandboxes, claimed)
        if isinstance(error, BootFailed):  # of its processes here; the sandbox is not lost
            raise BackendError(
                f"{live.sandbox_id} could not be woken, and is on disk as it was; ask again: {error}", **error.details
            ) from error
        raise
    await finished(_let_go(sandboxes, live, stored))


def check_lives(sandboxes: "Sandboxes", live: Live) -> None:
    """Raise for one that is being ended: it need not come back for that."""
    if live.ending is not None:
        sandboxes.get(live.sandbox_id)


async def _take(sandboxes: "Sandboxes", live: Live, handle: Handle) -> None:
    """Put the new processes in the place of those that went: whoever followed one follows it on."""
    if live.is_equipped:
        await live.processes.move(handle)
        live.handle = handle
    else:
        live.equip(handle, is_new=False)
        await handle.guest.watch_running()
        live.processes.found()
        stored = live.rest.stored
        live.defaults.shell = (stored.shell if stored is not None else "") or sandboxes.shells.known(live)
    sandboxes.watch(live)
    live.network = await Network.open(live.spec, handle, live.files, live.denied, is_new=False)


async def _part(live: Live, handle: Handle) -> None:
    """It came back, and can't go on: it lies on disk as before, and the next wake begins with nothing."""
    if live.is_equipped:
        live.handle.guest.guest_gone(ConnectionLost(f"{live.sandbox_id} did not come back from disk: ask again"))
        live.is_equipped = False
        await live.processes.close()
    if live.network is not None:
        await live.network.close()
        live.network = None
    await handle.destroy()


def _count(sandboxes: "Sandboxes", live: Live, stored: Stored) -> None:
    """Its processes are there: from here on they count, and what is on disk does not.

    Raises:
        BackendError: They have ended again already. SandboxExpired: It is being ended. CapacityError: See `Journal`.
    """
    check_lives(sandboxes, live)
    if live.handle.ended.done():
        raise BackendError(
            f"the init of {live.sandbox_id} ended as it came back; it is on disk as it was: ask again",
            sandbox_id=live.sandbox_id,
        )
    template = replace(live.template, layers=stored.template.layers, size_bytes=stored.template.size_bytes)
    kills = live.handle.stats().oom_kills  # a kernel of the guest's own came back with it, and goes on counting
    before = replace(stored.used, oom_kills=max(0, stored.used.oom_kills - kills))
    sandboxes.journal.came_back(live.sandbox_id, template, stored.own_layers, before)
    live.template, live.phase = template, "paused"
    live.rest.before = before
    live.rest.own_layers, live.rest.stored = stored.own_layers, None
    sandboxes.tiers.stored -= 1
    sandboxes.holds.woke(live.sandbox_id)


async def _let_go(sandboxes: "Sandboxes", live: Live, stored: Stored) -> None:
    try:
        await live.handle.thaw(stored.frozen_s)
        sandboxes.tiers.went_up(live, stored.frozen_s)
    except (BarchanError, OSError, TimeoutError) as error:  # how far it has gone on, nobody knows
        raise sandboxes.lose(live, f"init_died: it came back from disk, and could not go on: {error}") from error
    finally:  # nobody waits for that
        sandboxes.tasks.spawn(asyncio.to_thread(sandboxes.shelf.remove, stored.snapshot_id))


async def _hold(sandboxes: "Sandboxes", live: Live, template: Template) -> None:
    """Its layers stay, those it had before as well as the new ones."""
    sandboxes.holds.release(live.sandbox_id)
    await sandboxes.holds.hold(live.sandbox_id, template, is_stored=True)


async def remove(sandboxes: "Sandboxes", live: Live) -> None:
    """Of one that has ended: what it has on disk."""
    if live.rest.stored is not None:
        sandboxes.tiers.stored -= 1
        snapshot_id, live.rest.stored = live.rest.stored.snapshot_id, None
        await asyncio.to_thread(sandboxes.shelf.remove, snapshot_id)
    for image in live.rest.images:
        await remove_image(sandboxes, image)
    await away.retire(sandboxes, live)


async def lay_down(sandboxes: "Sandboxes", live: Live, stored: Stored, awake_s: float) -> None:
    """Have one among the node's sandboxes that lies on its disk, and has been awake for so long."""
    live.phase, live.rest.tier, live.rest.stored = "hibernated", "hibernated", stored
    live.rest.freed_bytes = stored.memory_bytes
    live.clock.stop()
    sandboxes.leases.stand_still(live.spec.lease_id, live.sandbox_id, on_disk=True)
    sandboxes.tiers.stored += 1
    sandboxes.arm(live, awake_s)
    sandboxes.live[live.sandbox_id] = live
    await sandboxes.holds.hold(live.sandbox_id, stored.template, is_stored=True)
    if live.spec.create_id:
        sandboxes.by_create[live.spec.create_id] = live
    live.booted.set_result(None)


async def remove_image(sandboxes: "Sandboxes", name: str) -> None:
    with suppress(NotFound):
        await snapshots.remove_image(sandboxes, name)


def image_prefix(sandboxes: "Sandboxes") -> str:
    """Of the images that hold what this node's sandboxes have written before they were hibernated."""
    return f"{ASLEEP_PREFIX}{sandboxes.node_id[5:]}-"


async def clean(sandboxes: "Sandboxes", rows: dict[str, Row]) -> dict[str, set[str]]:
    """Remove what a killed node has left half made, or has made and not yet used.

    Args:
        rows: Of the sandboxes that live, by their ids.

    Returns:
        The images of each sandbox that has some.
    """
    for path in sandboxes.state_dir.glob(f"{FOLDER_PREFIX}*"):
        await asyncio.to_thread(shutil.rmtree, path)
    stored = {row.stored.snapshot_id for row in rows.values() if row.stored is not None}
    for entry in await asyncio.to_thread(sandboxes.shelf.entries):
        if entry.snapshot_id.startswith(ID_PREFIX) and entry.snapshot_id not in stored:
            await asyncio.to_thread(sandboxes.shelf.remove, entry.snapshot_id)
    images: dict[str, set[str]] = {}
    prefix = image_prefix(sandboxes)
    for template in await asyncio.to_thread(sandboxes.images.templates):
        if template.name.startswith(prefix):
            row = rows.get(template.name.removeprefix(prefix).rpartition("-")[0])
            if row is not None and template.layers == (row.stored or row).template.layers:
                images.setdefault(row.sandbox_id, set()).add(template.name)
            else:
                await remove_image(sandboxes, template.name)
    return images
