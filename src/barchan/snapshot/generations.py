"""Which node has a hibernated sandbox: said in a blob store under the sandbox's id, generation by generation.

    hibernated/ID/GENERATION.json    12 digits; the highest one counts

A generation is stored only if there is none of its number, which every store can do and exactly one of several nodes
succeeds in. So whoever wants to resume a sandbox must make the next one; a node that comes back and finds a higher
one than its own drops what it has. The last one of a sandbox that has ended stays, so that this is known for ever.
"""

import re
import time
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from barchan.errors import BlobCorrupt, Conflict, NotFound
from barchan.image.blobs import BlobStore
from barchan.model.sandbox import SandboxSpec

FORMAT = 1
GENERATION_MAX = 10**12 - 1
_BYTES_MAX = 4 << 20
_READS = 4  # of the newest one, while others move on
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_KEY = re.compile(r"/(\d{12})\.json$")
_Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]

State: TypeAlias = Literal["stored", "claimed", "ended"]


class Hibernated(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation of a sandbox.

    Attributes:
        state: `stored`: whoever makes the next generation may resume it. `claimed`: `node_id` has resumed it, or is
            about to. `ended`: it is no more.
        node_id: Who has it, or stored it last.
        template: Digest of its image in the store, the topmost `own_layers` of which it has written itself.
        memory: Digest of its packed memory there.
        spec: As it was created; None when it has ended.
        frozen_s: For how long its guest had stood still, by the guest's own clock, when it was stored.
        memory_bytes: What it took before.
        ttl_left_s: How long it has still to live; None: for ever.
        shell: What its shell commands are run by; empty: not known.
        at_unix_s: When this generation was made; only to be shown.
    """

    sandbox_id: _Id
    generation: Annotated[int, Meta(ge=0, le=GENERATION_MAX)] = 0
    state: State = "stored"
    node_id: Annotated[str, Meta(min_length=1, max_length=128)]
    template: _Digest
    memory: _Digest
    own_layers: Annotated[int, Meta(ge=0)] = 0
    spec: SandboxSpec | None = None
    frozen_s: float = 0.0
    memory_bytes: Annotated[int, Meta(ge=0)] = 0
    ttl_left_s: float | None = None
    shell: str = ""
    at_unix_s: float = 0.0
    format: int = FORMAT


async def publish(store: BlobStore, sandbox: Hibernated) -> Hibernated:
    """Say that a sandbox of this node (`sandbox.node_id`) lies in the store, to be resumed by any node.

    Its image and memory must be there already.

    Returns:
        The generation that was made.

    Raises:
        Conflict: Another node has it, or it has ended: what this node has of it is old.
        InvalidSpec: The store can only be read.
        BlobCorrupt: What the store says can't be read.
        CapacityError, Denied, TransportError: As `BlobStore.put`.
    """
    newest = await current(store, sandbox.sandbox_id)
    check_own(newest, sandbox.sandbox_id, sandbox.node_id)
    return await _make(store, newest, replace(sandbox, state="stored"))


async def claim(store: BlobStore, sandbox_id: str, node_id: str, *, seen: Hibernated | None = None) -> Hibernated:
    """Take a sandbox for this node, before it is resumed. A node that has it gets the same answer again.

    Args:
        seen: What this node would resume: a newer one is not taken.

    Raises:
        NotFound: No node has ever published it.
        Conflict: Another node has it, or was faster, or it has ended.
        InvalidSpec, BlobCorrupt, CapacityError, Denied, TransportError: As `publish`.
    """
    newest = await current(store, sandbox_id)
    if newest is None:
        raise NotFound(f"no sandbox {sandbox_id} in {store.url}", sandbox=sandbox_id)
    if newest.state != "stored":
        check_own(newest, sandbox_id, node_id)
    if seen is not None and newest != seen:
        raise _lost(newest)
    if newest.state != "stored":
        return newest
    return await _make(store, newest, replace(newest, state="claimed", node_id=node_id))


async def give_back(store: BlobStore, claimed: Hibernated, seen: Hibernated) -> None:
    """What this node claimed, and could not resume, is there for any node again, just as it was before.

    Raises:
        As `publish`.
    """
    newest = await current(store, claimed.sandbox_id)
    if newest != claimed:
        raise _lost(claimed)
    await _make(store, newest, replace(seen, state="stored"))


async def retire(store: BlobStore, sandbox_id: str, node_id: str) -> None:
    """Say that a sandbox of this node has ended; what the store knew of it besides is removed. Safe to repeat.

    Raises:
        NotFound: No node has ever published it.
        Conflict: Another node has it.
        InvalidSpec, BlobCorrupt, CapacityError, Denied, TransportError: As `publish`.
    """
    newest = await current(store, sandbox_id)
    if newest is None:
        raise NotFound(f"no sandbox {sandbox_id} in {store.url}", sandbox=sandbox_id)
    if newest.state != "ended":
        check_own(newest, sandbox_id, node_id)
        newest = await _make(store, newest, replace(newest, state="ended", spec=None))
    await _prune(store, sandbox_id, newest.generation)


async def current(store: BlobStore, sandbox_id: str) -> Hibernated | None:
    """The newest generation of a sandbox; None: no node has ever published it.

    Raises:
        BlobCorrupt: It can't be read. NotFound: That can't be an id.
        Denied, TransportError: As `BlobStore.get`.
    """
    for _ in range(_READS):
        found = await _generations(store, sandbox_id)
        if not found:
            return None
        key = _key(sandbox_id, found[-1])
        try:
            data = await store.get(key, _BYTES_MAX)
        except NotFound:  # a newer one was made, and this one removed, since the listing
            continue
        return _decoded(store, key, data, sandbox_id, found[-1])
    raise Conflict(f"sandbox {sandbox_id} goes from node to node faster than {store.url} can tell (try: again)")


def check_own(newest: Hibernated | None, sandbox_id: str, node_id: str) -> None:
    """Raise `Conflict` if another node has a sandbox or stored it last, or if it has ended."""
    if newest is None:
        return
    if newest.state == "ended":
        raise Conflict(f"sandbox {sandbox_id} has ended", sandbox=sandbox_id, generation=newest.generation)
    if newest.node_id != node_id:
        raise Conflict(
            f"sandbox {sandbox_id} is with node {newest.node_id} (try: ask that node)",
            sandbox=sandbox_id,
            node=newest.node_id,
            generation=newest.generation,
        )


async def _make(store: BlobStore, newest: Hibernated | None, wanted: Hibernated) -> Hibernated:
    """The generation after the newest. Raises `Conflict` if another node made it."""
    generation = 1 if newest is None else newest.generation + 1
    if newest is not None:  # before, so that nothing can fail once the new one is there
        await _prune(store, wanted.sandbox_id, newest.generation)
    made = replace(wanted, generation=generation, at_unix_s=round(time.time(), 3))
    data = msgspec.json.encode(made)
    key = _key(made.sandbox_id, generation)
    if not await store.put_new(key, data):
        try:
            is_mine = await store.get(key, _BYTES_MAX) == data  # the answer to a first try was lost
        except NotFound:
            is_mine = False
        if not is_mine:
            raise _lost(made)
    # Whoever looked long ago may have made one again that was removed since: it is the highest that counts.
    if (await _generations(store, made.sandbox_id))[-1] != generation:
        raise _lost(made)
    return made


def _lost(wanted: Hibernated) -> Conflict:
    return Conflict(
        f"another node was faster to take sandbox {wanted.sandbox_id} (try: ask where it is now)",
        sandbox=wanted.sandbox_id,
        generation=wanted.generation,
    )


async def _prune(store: BlobStore, sandbox_id: str, generation: int) -> None:
    """Remove generations before that one."""
    for old in await _generations(store, sandbox_id):
        if old < generation:
            await store.delete(_key(sandbox_id, old))


async def _generations(store: BlobStore, sandbox_id: str) -> list[int]:
    if not _ID.fullmatch(sandbox_id):
        raise NotFound(f"{sandbox_id!r} is no id of a sandbox")
    keys = await store.keys(f"hibernated/{sandbox_id}/")
    return sorted(int(found[1]) for key in keys if (found := _KEY.search(key)))


def _decoded(store: BlobStore, key: str, data: bytes, sandbox_id: str, generation: int) -> Hibernated:
    try:
        found = msgspec.json.decode(data, type=Hibernated)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BlobCorrupt(
            f"{key} in {store.url} can't be read: {error} (try: a node of the release that wrote it)"
        ) from error
    if (found.format, found.sandbox_id, found.generation) != (FORMAT, sandbox_id, generation):
        raise BlobCorrupt(f"{key} in {store.url} is of another sandbox, generation or format")
    if found.spec is None and found.state != "ended":
        raise BlobCorrupt(f"{key} in {store.url} does not say what the sandbox was asked to be")
    return found


def _key(sandbox_id: str, generation: int) -> str:
    return f"hibernated/{sandbox_id}/{generation:012d}.json"
