"""Memory of live sandboxes, taken while they stand still, and sandboxes that go on from it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from barchan.backends.base import Backend, Handle
from barchan.core.finished import finished
from barchan.errors import CapacityError, InvalidSpec, RequirementMissing
from barchan.model.snapshot import MemoryRecord
from barchan.node.density import pressure
from barchan.node.live import Live
from barchan.node.processes import APPLET_PREFIX
from barchan.snapshot.pager.link import PagerLink
from barchan.wire.guest import Scope

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes, Start


FOLDER = "memory"  # in a node's state directory: memory directories, each for as long as it takes


class Taken(Struct, frozen=True, kw_only=True):
    """A memory directory; `frozen_s`: how long its guest had stood still when it was stored."""

    directory: Path
    record: MemoryRecord
    frozen_s: float


@asynccontextmanager
async def held(sandboxes: "Sandboxes", live: Live) -> AsyncIterator[None]:
    """Inside, the sandbox is up, and nobody moves it to another tier."""
    while True:
        await sandboxes.tiers.awake(live)
        async with live.rest.turn:
            if live.is_up:
                yield
                return


async def take(sandboxes: "Sandboxes", live: Live, directory: Path, cut: str) -> Taken:
    """Store a held sandbox's memory in the new `directory`, and its files of the same moment as the cut `cut`.

    Raises:
        NotSnapshotable: It holds what can't be stored. CapacityError: No room, or it does not stop.

    Cancellation: As every failure: the sandbox goes on, and neither is left.
    """
    async with live.handle.guest.starts.none():
        return await _take(sandboxes, live, directory, cut)


async def _take(sandboxes: "Sandboxes", live: Live, directory: Path, cut: str) -> Taken:
    began = time.monotonic()
    was_paused = live.phase == "paused"
    if not was_paused:
        sandboxes.journal.still(live.sandbox_id)
        try:
            await live.handle.freeze()
        except BaseException:
            sandboxes.journal.wake(live.sandbox_id)
            raise
        live.clock.stop()
    try:
        record = await dump(sandboxes, live, directory, cut)
        await finished(asyncio.to_thread(make_readable, directory))
        return Taken(directory=directory, record=record, frozen_s=time.monotonic() - began)
    finally:
        if not was_paused:
            await asyncio.shield(live.handle.thaw(time.monotonic() - began))
            live.clock.go_on()
            sandboxes.journal.wake(live.sandbox_id)


async def dump(sandboxes: "Sandboxes", live: Live, directory: Path, cut: str) -> MemoryRecord:
    """`Handle.dump` of a sandbox that goes on; what that takes of the host's memory counts as asked for meanwhile.

    Raises:
        CapacityError: The host does not have it.
    """
    storing_mib = (await sandboxes.backend(live.spec.backend)).capabilities.storing_mib
    if storing_mib and (available_mib := pressure().memory_available_mib) < storing_mib:
        raise CapacityError(
            f"the memory of {live.sandbox_id} can't be stored now: that may take {storing_mib} MiB more of the host's, "
            f"and {available_mib} are available",
            retry_after_ms=2000,
        )
    live.rest.storing_mib = storing_mib
    try:
        return await live.handle.dump(directory, keep=True, cut=cut)
    finally:
        live.rest.storing_mib = 0


async def _end_file_operations(handle: Handle) -> None:
    """Of requests to another sandbox, that were under way when its memory was stored: nobody waits for these."""
    for process in list(handle.guest.processes.values()):
        if process.process_id.startswith(APPLET_PREFIX) and process.exit is None:
            await handle.guest.signal(process, signal.SIGKILL, Scope.ALL)


def make_readable(directory: Path) -> None:
    """CRIU reads a memory directory as the sandbox's root, which also runs the program in it. It blocks.

    The folder above must be ours alone.
    """
    for parent, _, names in os.walk(directory):
        os.chmod(parent, 0o755)
        for name in names:
            os.chmod(os.path.join(parent, name), 0o755)


def check_files(backend: Backend, name: str) -> None:
    """Raise `InvalidSpec` unless it keeps what its sandboxes write."""
    if not backend.capabilities.fork:
        raise InvalidSpec(f"the {name} backend does not keep the files of its sandboxes: use another backend for that")


def check_backend(backend: Backend, name: str) -> None:
    """Raise `RequirementMissing` where it stores memory on other hosts only, and `InvalidSpec` where on none."""
    can = backend.capabilities
    if not can.memory_snapshot and not can.memory_by_host:
        raise InvalidSpec(
            f"the {name} backend never stores the memory of its sandboxes: take one that does, or their files "
            "(kind='fs')"
        )
    if not can.memory_snapshot:
        raise RequirementMissing(f"the {name} backend can't store memory on this host (try: barchan doctor)")


def from_memory(taken: Taken, cut: str | None, pager: PagerLink | None = None) -> "Start":
    """A start that goes on from a memory directory, with the files of a cut; `pager` brings what is not in it."""

    async def start(backend: Backend, live: Live) -> Handle:
        began = time.monotonic()
        handle = await backend.restore(
            live.sandbox_id, live.spec, live.template, taken.directory, taken.record, cut=cut, pager=pager
        )
        try:
            await handle.guest.watch_running()
            await handle.thaw(taken.frozen_s + time.monotonic() - began)
            await _end_file_operations(handle)
        except BaseException:
            await asyncio.shield(handle.destroy())
            raise
        return handle

    return start
