"""Hibernated sandboxes in a blob store: sent there, taken from there by another node, and by exactly one.

Which node has one is said in the store (`snapshot.generations`): a node must take the next generation before it wakes a
sandbox that it has published, and lets go of one that another node has taken.
"""

import asyncio
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import BarchanError, BlobUnavailable, Conflict, NotFound, SandboxExpired, TransportError
from barchan.image.blobs import BlobStore
from barchan.image.template import Template
from barchan.node import hibernate
from barchan.node.live import Live
from barchan.node.rest import Stored
from barchan.snapshot import generations, remote
from barchan.snapshot.generations import Hibernated

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

MOVED = "moved: another node has taken it"
RETIRE_WAIT_S = 2.0  # of an end, for the store; one that takes longer is told meanwhile


def store_of(sandboxes: "Sandboxes") -> BlobStore:
    """The node's blob store.

    Raises:
        Conflict: It was started without.
    """
    if sandboxes.templates.remote is None:
        raise Conflict("this node has no blob store (try: barchan up --store URL)")
    return sandboxes.templates.remote.blobs


def unknown(sandboxes: "Sandboxes", sandbox_id: str) -> NotFound:
    """What whoever asks for a sandbox that never was here is told: it may lie in the store."""
    adopt = "client.adopt(id) or `barchan resume --adopt ID`, if another node has sent it to the blob store"
    hint = f" (try: {adopt})" if sandboxes.templates.remote is not None else ""
    return NotFound(f"no sandbox {sandbox_id} on this node{hint}", sandbox_id=sandbox_id)


async def push(sandboxes: "Sandboxes", live: Live) -> None:
    """Send a hibernated sandbox to the store, from where any node may take it; it stays here as well.

    Raises:
        Conflict: It is not hibernated, somebody waits for it, or the node has no store.
        BlobUnavailable: The store is slow or dead. CapacityError, Denied, InvalidSpec: It takes nothing.
    """
    store = store_of(sandboxes)
    async with live.rest.turn:
        stored = live.rest.stored
        if stored is None:
            raise Conflict("it is not hibernated")
        sending = asyncio.ensure_future(_send(sandboxes, live, stored, store))
        wanted = asyncio.ensure_future(live.rest.wanted.wait())
        try:
            await asyncio.wait({sending, wanted}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise Conflict("it was not sent: a request came for it")
        finally:
            wanted.cancel()
            sending.cancel()
            await asyncio.wait({sending})
        try:
            sending.result()
        except TransportError as error:  # which a client would take for its own way to this node
            raise BlobUnavailable(f"the sandbox can't be sent to {store.url} now: {error}") from error


async def _send(sandboxes: "Sandboxes", live: Live, stored: Stored, store: BlobStore) -> None:
    pushed = await remote.push(
        sandboxes.images, stored.template.name, sandboxes.shelf, stored.snapshot_id, store, _quiet
    )
    live.rest.is_published = True
    sandboxes.journal.published(live.sandbox_id)  # first: whoever wakes it asks the store from now on
    await generations.publish(
        store,
        Hibernated(
            sandbox_id=live.sandbox_id,
            node_id=sandboxes.node_id,
            template=pushed.template,
            memory=pushed.memory,
            own_layers=stored.own_layers,
            spec=live.spec,
            frozen_s=stored.frozen_s,
            memory_bytes=stored.memory_bytes,
            ttl_left_s=None if live.expiry is None else max(0.001, live.expiry.left_s),
            shell=stored.shell,
        ),
    )


class Claim(Struct, frozen=True):
    """What a node has just taken, and how it was there before."""

    made: Hibernated
    seen: Hibernated


async def claim(sandboxes: "Sandboxes", live: Live) -> Claim | None:
    """Before a published sandbox is woken here; None: no other node could have it even before.

    Raises:
        SandboxExpired: Another node has taken it, or has stored what it did since; what is here of it goes.
        Conflict: This node has no store. BlobUnavailable: The store can't be asked.
    """
    if not live.rest.is_published:
        return None
    store = store_of(sandboxes)
    try:
        newest = await generations.current(store, live.sandbox_id)
        if newest is None:  # it was never published after all
            return None
        generations.check_own(newest, live.sandbox_id, sandboxes.node_id)
        if newest.state == "claimed":  # and what the store has is older than what is here
            return None
        return Claim(await generations.claim(store, live.sandbox_id, sandboxes.node_id, seen=newest), newest)
    except Conflict as error:
        _let_go(sandboxes, live)
        raise SandboxExpired(str(error), **error.details, sandbox_id=live.sandbox_id, cause=MOVED) from error
    except TransportError as error:
        raise BlobUnavailable(f"nobody can say whether another node has this sandbox: {error}") from error


def _let_go(sandboxes: "Sandboxes", live: Live) -> None:
    """It is another node's: what is here of it goes, and the store needs not be told."""
    live.rest.is_published = False
    sandboxes.expire(live, MOVED)


async def give_back(sandboxes: "Sandboxes", claimed: Claim | None) -> None:
    """It could not be woken: let others try, if the store can be told."""
    if claimed is not None:
        with suppress(BarchanError):
            await generations.give_back(store_of(sandboxes), claimed.made, claimed.seen)


async def retire(sandboxes: "Sandboxes", live: Live) -> None:
    """A published sandbox has ended; a store that can't be told keeps a few bytes that say otherwise."""
    if live.rest.is_published:
        telling = sandboxes.tasks.spawn(_retire(sandboxes, live))
        await asyncio.wait({telling}, timeout=RETIRE_WAIT_S)


async def _retire(sandboxes: "Sandboxes", live: Live) -> None:
    with suppress(BarchanError):
        await generations.retire(store_of(sandboxes), live.sandbox_id, sandboxes.node_id)


async def adopt(sandboxes: "Sandboxes", sandbox_id: str, lease_id: str | None) -> Live:
    """Take a sandbox from the store, hibernated; one that is here already is given as it is.

    Raises:
        NotFound: The store has no such sandbox. Conflict: Another node has it, it has ended, or there is no store.
        SandboxExpired, SandboxLost: It has ended here.
        CapacityError, QuotaExceeded: It does not fit here. BlobUnavailable: The store is slow or dead.
    """
    async with sandboxes.arrivals.setdefault(sandbox_id, asyncio.Lock()):  # whoever asks again gets the same one
        try:
            if (live := sandboxes.live.get(sandbox_id)) is not None:
                if live.ending is None and not await _has_moved(sandboxes, live):
                    return live
                if live.ending is not None:
                    await asyncio.wait({live.ending})
            store = store_of(sandboxes)
            found = await generations.current(store, sandbox_id)
            if found is None:
                raise NotFound(f"no sandbox {sandbox_id} in {store.url}", sandbox_id=sandbox_id)
            _check_free(sandboxes, found)
            return await _adopt(sandboxes, store, found, lease_id)
        except TransportError as error:
            raise BlobUnavailable(f"the sandbox can't be had from the blob store now: {error}") from error


async def _has_moved(sandboxes: "Sandboxes", live: Live) -> bool:
    """Whether what lies here is old, for another node has taken it; then it goes."""
    if live.rest.stored is None or not live.rest.is_published:
        return False
    newest = await generations.current(store_of(sandboxes), live.sandbox_id)
    try:
        generations.check_own(newest, live.sandbox_id, sandboxes.node_id)
    except Conflict:
        _let_go(sandboxes, live)
        return True
    return False


def _check_free(sandboxes: "Sandboxes", found: Hibernated) -> None:
    """Raise unless this node may take it: also what it has claimed before, and then was killed."""
    is_own = found.node_id == sandboxes.node_id
    if found.spec is None or (found.state == "claimed" and not is_own):
        raise Conflict(f"sandbox {found.sandbox_id} has ended, or node {found.node_id} has it awake")
    row = sandboxes.journal.find(found.sandbox_id)
    if row is None or row.ended_unix_s is None or row.end_cause == MOVED or not is_own:
        return
    if row.phase == "stopped" or found.state == "claimed":  # the store was not told that it ended, or has older work
        raise row.error()


async def _adopt(sandboxes: "Sandboxes", store: BlobStore, found: Hibernated, lease_id: str | None) -> Live:
    assert found.spec is not None
    token = secrets.token_hex(8)
    snapshot_id = f"{hibernate.ID_PREFIX}{token}"
    image = f"{hibernate.image_prefix(sandboxes)}{found.sandbox_id}-{token}"
    spec = replace(found.spec, lease_id=lease_id, detach=lease_id is None, ttl_s=found.ttl_left_s)
    claimed: Claim | None = None
    if lease_id is not None:
        sandboxes.leases.admit(lease_id, found.sandbox_id, spec.memory_mib)
    try:
        template = await remote.pull(
            *(sandboxes.images, found.template, sandboxes.shelf, snapshot_id, found.memory, store, _quiet),
            local_name=image,
        )
        claimed = Claim(
            await generations.claim(store, found.sandbox_id, sandboxes.node_id, seen=found),
            found,
        )
        live = Live(found.sandbox_id, spec, _own(template, found), time.time())
        stored = Stored(
            snapshot_id=snapshot_id,
            template=template,
            own_layers=found.own_layers,
            frozen_s=found.frozen_s,
            memory_bytes=found.memory_bytes,
            shell=found.shell,
        )
        sandboxes.journal.take(live.sandbox_id, spec, live.template, stored)
    except BaseException:
        sandboxes.leases.leave(lease_id, found.sandbox_id)
        await give_back(sandboxes, claimed)
        await asyncio.to_thread(sandboxes.shelf.remove, snapshot_id)
        await hibernate.remove_image(sandboxes, image)
        raise
    live.rest.images, live.rest.is_published = {image}, True
    await hibernate.lay_down(sandboxes, live, stored, awake_s=0.0)
    return live


def _own(template: Template, found: Hibernated) -> Template:
    """What it was made of, named as its spec does."""
    assert found.spec is not None
    return replace(template, name=found.spec.template, layers=template.layers[found.own_layers :])


def _quiet(_what: str, _done: int, _total: int) -> None:
    return
