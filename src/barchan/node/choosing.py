"""The backend of a create that leaves it to the node, and what images need of theirs; `core.choosing` decides."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from barchan import backends
from barchan.backends.base import Backend, Handle
from barchan.core.choosing import AUTO, Offer, Starts, chosen, none_fits, ranked, unfit
from barchan.errors import BarchanError, InvalidSpec, RequirementMissing
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec

if TYPE_CHECKING:
    from barchan.node.live import Live
    from barchan.node.sandboxes import Sandboxes


def settled(spec: SandboxSpec, before: SandboxSpec) -> SandboxSpec:
    """A repeated create, as it was settled the first time."""
    return replace(spec, backend=before.backend) if spec.backend == AUTO else spec


class Choosing:
    """Of one node; it remembers how long starts have taken."""

    def __init__(self, sandboxes: "Sandboxes") -> None:
        self._sandboxes = sandboxes
        self._starts = Starts()
        self._idle: dict[str, Backend] = {}  # loaded to ask what they can do, and not started

    async def start_plain(self, backend: Backend, live: "Live") -> Handle:
        """The plain start: nothing written, no processes. How long it takes is remembered."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        handle = await backend.create(live.sandbox_id, live.spec, live.template)
        self._starts.seen(live.spec.backend, live.template.digest, loop.time() - began)
        return handle

    async def settle(self, spec: SandboxSpec, template: Template) -> tuple[SandboxSpec, str]:
        """What a sandbox will be, and why; the reason is empty for one whose backend was named.

        Raises:
            InvalidSpec: No backend is what the spec and its images ask for, or not the one that was named.
            RequirementMissing: The host lacks what those need that would be.
        """
        if spec.backend != AUTO:
            self._check(spec, template)
            return spec, ""
        stored = self._sandboxes.tree.backend_of(spec)
        if stored is not None:
            self._check_stored(spec, template, stored)
            return replace(spec, backend=stored), f"the snapshot's processes were stored by {stored}"
        unfitting: dict[str, str] = {}
        missing: dict[str, str] = {}
        for offer in ranked(self._offers(template, missing)):
            if why := unfit(offer, spec, template.kind, template.needs):
                unfitting[offer.name] = why
                continue
            try:
                await self._sandboxes.backend(offer.name)
            except RequirementMissing as error:
                missing[offer.name] = str(error)
                continue
            except Exception as error:  # of the others one may run; this one's reason goes into the choice's
                missing[offer.name] = f"it did not start: {_words(error)}"
                continue
            if why := unfit(self._offer(offer.name, template), spec, template.kind, template.needs):
                missing[offer.name] = f"{why} on this host"
                continue
            choice = chosen(offer, {**unfitting, **missing})
            return replace(spec, backend=choice.backend), choice.reason
        raise none_fits(unfitting, missing)

    def _check(self, spec: SandboxSpec, template: Template) -> None:
        if spec.start_within_s is not None:
            raise InvalidSpec(f'start_within_s goes with backend="auto", not with backend={spec.backend!r}')
        if not (spec.needs or template.needs):
            return
        if why := unfit(self._offer(spec.backend, template), spec, template.kind, template.needs):
            asked = ", ".join(sorted({*spec.needs, *template.needs}))
            raise InvalidSpec(
                f"the {spec.backend} backend can't be it for image {template.name!r}, which needs {asked}: {why} "
                '(try: backend="auto")'
            )

    def _check_stored(self, spec: SandboxSpec, template: Template, stored: str) -> None:
        """What goes on from memory boots nothing: how long a start takes does not count."""
        wished = replace(spec, start_within_s=None)
        if why := unfit(self._offer(stored, template), wished, template.kind, template.needs):
            raise InvalidSpec(
                f"the processes of {spec.template!r} were stored by the {stored} backend and go on only in it, which "
                f"can't be what is asked for: {why} (try: a snapshot of files, or fewer wishes)"
            )

    def _offers(self, template: Template, missing: dict[str, str]) -> Iterator[Offer]:
        """Of all backends that can be loaded; why one can't be goes into `missing`."""
        for name in backends.names():
            try:
                yield self._offer(name, template)
            except Exception as error:  # it may be a stranger's, whose package is broken
                missing[name] = f"it can't be loaded: {_words(error)}"

    def _offer(self, name: str, template: Template) -> Offer:
        running = self._sandboxes.running_backend(name)
        backend = running or self._idle.get(name)
        if backend is None:
            backend = self._idle[name] = backends.load(name, self._sandboxes)
        can = backend.capabilities
        if not running and can.memory_by_host:
            can = replace(can, memory_snapshot=True)  # it may turn out so
        start_s, is_seen = self._starts.expected(name, can.isolation, template.digest)
        return Offer(
            name=name,
            isolation=can.isolation,
            has=frozenset(
                need for need in ("own_kernel", "memory_snapshot", "fork", "screen", "zygote") if getattr(can, need)
            ),
            kinds=can.kinds,
            memory_mib_min=can.memory_mib_min,
            networks=can.networks,
            roots=can.roots,
            start_s=start_s,
            is_seen=is_seen,
        )


def _words(error: Exception) -> str:
    return f"{error}" if isinstance(error, BarchanError) else repr(error)
