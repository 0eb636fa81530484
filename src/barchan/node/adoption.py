"""A node's start: the sandboxes of the one before are found again, awake, stopped or on disk."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from barchan.backends.base import Backend
from barchan.backends.container.backend import ContainerBackend
from barchan.backends.container.outer_ids import backend_of
from barchan.errors import BarchanError, CapacityError, NotFound
from barchan.image.store import ImageStore
from barchan.node import hibernate, kept_machines
from barchan.node.journal import Row
from barchan.node.live import Live

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

FIRST = "container"
ADOPT_S = 180.0  # for one sandbox, while all the others are adopted, too


async def adopt_all(sandboxes: "Sandboxes") -> None:
    """What can't be found is lost, what nobody knows is removed."""
    rows = {row.sandbox_id: row for row in sandboxes.journal.live()}
    for row in rows.values():
        sandboxes.leases.adopt(
            row.spec.lease_id, row.sandbox_id, row.spec.memory_mib, row.awake_s, is_awake=row.since_unix_s is None
        )
    await asyncio.to_thread(_sweep, sandboxes.images)
    images = await hibernate.clean(sandboxes, rows)
    # Containers at once, so that what the host lacks is said by the node's start, not by a create.
    wanted = {row.spec.backend for row in rows.values()} | await _held_by_containers(sandboxes)
    adopted: list[Backend] = []
    for name in [FIRST, *sorted(wanted - {FIRST})]:
        ours = [row for row in rows.values() if row.spec.backend == name]
        try:
            backend = await sandboxes.backend(name)
        except (BarchanError, OSError) as error:
            if name == FIRST:
                raise
            await _give_up(sandboxes, name, ours, error)
            continue
        found = set(await backend.found())
        up = {row.sandbox_id for row in ours if row.stored is None}
        await asyncio.gather(
            *(_adopt(sandboxes, backend, row) for row in ours if row.sandbox_id in found & up),
            *(_find_stored(sandboxes, row) for row in ours if row.stored is not None),
            *(_discard(backend, sandbox_id) for sandbox_id in found - up),
        )
        adopted.append(backend)
    sandboxes.tasks.spawn(kept_machines.tidy(sandboxes))
    for backend in adopted:  # a container's zygote may be needed by another backend's sandbox
        backend.adopted()
    for sandbox_id, names in images.items():
        if sandbox_id in sandboxes.live:
            sandboxes.live[sandbox_id].rest.images = names
    for live in list(sandboxes.live.values()):
        if live.spec.lease_id is not None and live.spec.lease_id not in sandboxes.leases:
            sandboxes.expire(live, "lease_ended")  # which the node before had no time, or room, to do
    for row in rows.values():
        if row.sandbox_id not in sandboxes.live:
            sandboxes.journal.end(row.sandbox_id, "lost", "node_lost")
            sandboxes.leases.leave(row.spec.lease_id, row.sandbox_id)
            for image in images.get(row.sandbox_id, ()):
                await hibernate.remove_image(sandboxes, image)


async def _containers(sandboxes: "Sandboxes") -> ContainerBackend:
    return cast(ContainerBackend, await sandboxes.backend(FIRST))


async def _held_by_containers(sandboxes: "Sandboxes") -> set[str]:
    """Names of the backends whose guests live in containers that were found."""
    return {backend_of(found) for found in await (await _containers(sandboxes)).found_all()} - {""}


async def _give_up(sandboxes: "Sandboxes", name: str, rows: Sequence[Row], error: Exception) -> None:
    """A backend can't run here any more: what it had running is lost, what it has on disk waits for its return."""
    for row in rows:
        if row.stored is not None:
            await _find_stored(sandboxes, row)
        else:
            sandboxes.journal.end(row.sandbox_id, "lost", f"node_lost: {error}")
    containers = await _containers(sandboxes)
    for found in await containers.found_all():
        if backend_of(found) == name:
            await _discard(containers, found)


def _sweep(images: ImageStore) -> None:
    """Remove what a killed node was building: whoever builds next would, but that may be never."""
    if images.root.exists():
        with suppress(CapacityError), images.workspace():
            pass


async def _adopt(sandboxes: "Sandboxes", backend: Backend, row: Row) -> None:
    """Take one sandbox over. One that can't be served any more is lost; the others are not."""
    live = Live(row.sandbox_id, row.spec, row.template, row.created_unix_s)
    live.rest.own_layers, live.rest.is_published = row.own_layers, row.is_published
    live.rest.before = row.before
    frozen_s = 0.0 if row.since_unix_s is None else max(0.0, time.time() - row.since_unix_s)
    try:
        async with asyncio.timeout(ADOPT_S):
            live.equip(await backend.adopt(row.sandbox_id, row.spec, row.template), is_new=False)
            await live.handle.thaw(frozen_s)  # the node before may have died in the middle of a pause
            await sandboxes.finish_boot(live, row.awake_s)
            await live.handle.guest.watch_running()
            live.processes.found()
    except Exception as error:  # what one of them makes us stumble over must not keep the node from starting
        why = f"{error}" if isinstance(error, BarchanError | OSError) and f"{error}" else repr(error)
        sandboxes.journal.end(row.sandbox_id, "lost", f"node_lost: {why}")
        if live.is_equipped:
            await sandboxes.remove_quietly(live)
        else:
            await _discard(backend, row.sandbox_id)
        return
    live.create_ms = row.create_ms
    sandboxes.live[live.sandbox_id] = live
    await sandboxes.holds.hold(live.sandbox_id, live.template)
    if row.spec.create_id:
        sandboxes.by_create[row.spec.create_id] = live
    live.booted.set_result(None)
    if row.since_unix_s is not None:
        sandboxes.journal.wake(row.sandbox_id)
    if row.phase == "paused":
        await sandboxes.tiers.change(live, "paused", is_asked=row.is_asked)


async def _discard(backend: Backend, sandbox_id: str) -> None:
    """Return when nothing is left of one that was found, even if that was going already."""
    with suppress(NotFound):
        await backend.discard(sandbox_id)


async def _find_stored(sandboxes: "Sandboxes", row: Row) -> None:
    """One on disk: nothing of it is needed before somebody asks for it."""
    assert row.stored is not None
    live = Live(row.sandbox_id, row.spec, row.template, row.created_unix_s)
    live.create_ms = row.create_ms
    live.rest.is_asked, live.rest.own_layers = row.is_asked, row.own_layers
    live.rest.is_published = row.is_published
    await hibernate.lay_down(sandboxes, live, row.stored, row.awake_s)
