"""Forks: sandboxes that start as a live one is at one moment, all of them from one cut."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from barchan.backends.base import Backend, Handle
from barchan.errors import BackendError, BarchanError, Conflict, InvalidSpec, NodeLost
from barchan.model.fork import Forked, ForkRequest
from barchan.model.sandbox import SandboxSpec
from barchan.node.live import Live, identity
from barchan.node.memories import check_backend, check_files, from_memory, held, take

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes, Start

HOSTNAME_MAX = 63
GIVEN_UP_MAX = 1024
SUFFIX = 6  # of a child's id, in its host name
_FIXED = ("template", "layers", "backend", "create_id")
_FIXED_WITH_MEMORY = ("network", "root")
Child = Live | BarchanError


class Forks:
    """The forks of one node. A child is a sandbox like any other: it has no tie to its parent once it is made.

    `folder` is for memory directories, each there for as long as a fork takes.
    """

    def __init__(self, sandboxes: "Sandboxes", folder: Path) -> None:
        self._sandboxes = sandboxes
        self._folder = folder
        self._running: dict[str, asyncio.Future[list[Child]]] = {}
        self._given_up: dict[str, None] = {}  # ids; the oldest are forgotten

    async def fork(self, live: Live, asked: ForkRequest) -> list[Child]:
        """Begin the children; the `booted` of each tells how that went. One that could not begin is its error.

        Repeating a `fork_id` gives the same children.

        Raises:
            InvalidSpec: No node could run such children. CapacityError: The cut could not be made.
            Conflict: The id was used for another fork, or that one was given up.

        Cancellation: The children are made all the same: whoever asked ends them, by `end`.
        """
        if asked.fork_id in self._given_up:
            raise Conflict("this fork was given up before it began")
        running = self._running.get(asked.fork_id)
        if running is None:
            specs = [self._spec(live, asked, index) for index in range(asked.n)]
            known = self._known(specs)
            if known is not None:
                return known
            running = self._running[asked.fork_id] = asyncio.get_running_loop().create_future()
            self._sandboxes.tasks.spawn(self._carry_out(live, asked, specs, running))
        return await asyncio.shield(running)

    async def end(self, fork_id: str) -> int:
        """End every child of a fork, of one under way and of one that comes later, too; returns how many there were."""
        self._given_up[fork_id] = None
        while len(self._given_up) > GIVEN_UP_MAX:
            del self._given_up[next(iter(self._given_up))]
        if (running := self._running.get(fork_id)) is not None:
            await asyncio.wait([running])
        made = self._sandboxes.by_create.items()
        children = [live for create_id, live in made if create_id.rpartition("-")[0] == fork_id]
        await asyncio.gather(*(self._sandboxes.end(live, "killed") for live in children))
        return len(children)

    def _known(self, specs: Sequence[SandboxSpec]) -> list[Child] | None:
        """The children that an earlier request of this id has made; None: there was none."""
        found = [self._find(spec.create_id or "") for spec in specs]
        if not any(found):
            return None
        for child, spec in zip(found, specs, strict=True):
            if isinstance(child, Live):
                asked = replace(self._sandboxes.leases.labelled(spec, spec.lease_id), hostname=child.spec.hostname)
                if identity(child.spec) != identity(asked):
                    raise Conflict("the fork id was used for another fork", create_id=spec.create_id or "")
        lost = NodeLost("the node ended in the middle of this fork, before this child was made (try: fork again)")
        return [child or lost for child in found]

    def _find(self, create_id: str) -> Child | None:
        child = self._sandboxes.by_create.get(create_id)
        if child is not None:
            return child
        row = self._sandboxes.journal.find_create(create_id)
        return None if row is None else row.error()

    async def _carry_out(
        self, live: Live, asked: ForkRequest, specs: Sequence[SandboxSpec], told: "asyncio.Future[list[Child]]"
    ) -> None:
        try:
            told.set_result(await self._fork(live, asked, specs))
        except (BarchanError, OSError) as error:
            told.set_exception(error if isinstance(error, BarchanError) else BackendError(f"forking failed: {error}"))
            told.exception()  # whoever asked may have gone
        finally:
            told.cancel()
            del self._running[asked.fork_id]

    async def _fork(self, live: Live, asked: ForkRequest, specs: Sequence[SandboxSpec]) -> list[Child]:
        backend = await self._sandboxes.backend(live.spec.backend)
        check_files(backend, live.spec.backend)
        if asked.kind == "memory":
            check_backend(backend, live.spec.backend)
        cut = f"fork-{secrets.token_hex(8)}"
        try:
            async with held(self._sandboxes, live):
                start = await self._taken(live, asked, cut)
            children = [self._begin(live, spec, start, can_be_warm=asked.kind == "fs") for spec in specs]
        except BaseException:
            await asyncio.shield(self._clean(backend, cut))
            raise
        self._sandboxes.tasks.spawn(self._settle(backend, cut, children))
        return children

    async def _taken(self, live: Live, asked: ForkRequest, cut: str) -> "Start":
        if asked.kind == "fs":
            await live.handle.cut(cut, asked.n)
            return from_cut(cut)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return from_memory(await take(self._sandboxes, live, self._folder / cut, cut), cut)

    def _begin(self, live: Live, spec: SandboxSpec, start: "Start", *, can_be_warm: bool) -> Child:
        """One child; what keeps it from starting is its own error, not the fork's."""
        slot = self._sandboxes.warm.take(spec, live.template, with_files=True) if can_be_warm else None
        sandbox_id = slot or self._sandboxes.new_id()
        spec = replace(spec, hostname=child_hostname(spec.hostname, sandbox_id))
        try:
            child = self._sandboxes.begin(spec, live.template, start, sandbox_id)
        except BarchanError as error:
            return error
        child.rest.own_layers = live.rest.own_layers  # before it is journalled: what its parent wrote is no base's
        return child

    async def _settle(self, backend: Backend, cut: str, children: Sequence[Child]) -> None:
        """Let go of what the children start from when each has its copy, or never will."""
        try:
            if starting := [child.booted for child in children if isinstance(child, Live)]:
                await asyncio.wait(starting)
        finally:
            await asyncio.shield(self._clean(backend, cut))

    async def _clean(self, backend: Backend, cut: str) -> None:
        await backend.remove_cut(cut)
        await asyncio.to_thread(shutil.rmtree, self._folder / cut, ignore_errors=True)

    def _spec(self, live: Live, asked: ForkRequest, index: int) -> SandboxSpec:
        """What child `index` is asked to be."""
        fixed = (*_FIXED, *_FIXED_WITH_MEMORY) if asked.kind == "memory" else _FIXED
        if wrong := sorted(set(asked.changes) & set(fixed)):
            raise InvalidSpec(f"a fork can't change {', '.join(wrong)}: its children start as their parent is")
        fields: dict[str, Any] = msgspec.to_builtins(live.spec) | {"setup": None} | asked.changes
        for name in ("labels", "env"):
            own, added = getattr(live.spec, name), asked.changes.get(name, {})
            fields[name] = own | added if isinstance(added, dict) else added
        try:
            spec = msgspec.convert(fields | {"create_id": f"{asked.fork_id}-{index}"}, SandboxSpec)
        except msgspec.ValidationError as error:
            raise InvalidSpec(f"no sandbox can be forked so: {error}") from error
        self._sandboxes.check(spec)
        return spec


def from_cut(cut: str) -> "Start":
    """A start with the files of a cut, and no processes."""

    async def start(backend: Backend, live: Live) -> Handle:
        return await backend.create(live.sandbox_id, live.spec, live.template, cut=cut)

    return start


def child_hostname(parent: str, sandbox_id: str) -> str:
    """The parent's, as far as there is room, and the end of the child's id."""
    return f"{parent[: HOSTNAME_MAX - SUFFIX - 1]}-{sandbox_id[-SUFFIX:]}"


async def results(children: Sequence[Child], node_id: str) -> AsyncGenerator[Forked, None]:
    """What became of each, as it is known."""

    async def one(index: int, child: Child) -> Forked:
        try:
            if isinstance(child, BarchanError):
                raise child
            await asyncio.shield(child.booted)
        except BarchanError as error:
            return Forked(index=index, code=error.code, message=str(error), details=error.details)
        return Forked(index=index, sandbox=child.info(node_id))

    tasks = [asyncio.ensure_future(one(index, child)) for index, child in enumerate(children)]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
