"""What backends have in common whose guests live inside containers."""

from collections.abc import Iterable, Sequence
from typing import cast

from barchan.backends.base import Capabilities, Handle, Host, MemoryPager, SlotCounts, Slots, Unavailability
from barchan.backends.container.backend import ContainerBackend
from barchan.backends.hosted.outer import Outers
from barchan.errors import NotFound, RequirementMissing
from barchan.image.template import Template
from barchan.model.node import Requirement
from barchan.model.sandbox import SandboxSpec
from barchan.snapshot.pager.link import PagerLink


class NoSlots:
    """See `backends.base.Slots`: there are never any."""

    async def keep(self, count: int, prefix: str) -> SlotCounts:
        return SlotCounts(ready=0, filling=0, claimed=0, cold=0, filled=0, died=0, fill_ms=0.0)

    def take(self, spec: SandboxSpec, template: Template) -> str | None:
        return None

    def is_lent(self, sandbox_id: str) -> bool:
        return False

    def put_back(self, sandbox_id: str) -> None:
        raise NotFound(f"{sandbox_id} was not lent")

    async def let_go(self, sandbox_id: str) -> None:
        raise NotFound(f"{sandbox_id} was not lent")


class NoPager:
    """See `backends.base.MemoryPager`: all memory comes before the guest runs."""

    async def start(self) -> None:
        pass

    async def serve(self, sandbox_id: str, snapshot_id: str) -> PagerLink:
        raise RequirementMissing("this backend brings no memory on demand")

    def link(self, sandbox_id: str) -> PagerLink | None:
        return None


class HostedBackend:
    """See `backends.base.Backend`. A backend's own adds `probe`, `create`, `restore` and `adopt`.

    The container backend of the node holds the outers, tells when an image's bytes can't be had, and does what a node
    asks of all backends at once (layers, memory in use, the end) for this one, too.
    """

    name: str
    capabilities: Capabilities

    def __init__(self, host: Host) -> None:
        self.host = host
        self.on_unavailable: Unavailability = lambda ids, cause: None
        self.slots: Slots = NoSlots()
        self.pager: MemoryPager = NoPager()
        self.outers: Outers

    def probe(self) -> Sequence[Requirement]:
        raise NotImplementedError

    async def start(self) -> None:
        """See `Backend.start`. A backend's own does this first."""
        await self.find_outers()
        missing = [item for item in self.probe() if not item.ok]
        if missing:
            lines = "; ".join(f"{item.name}: {item.found} ({item.remedy})" for item in missing)
            raise RequirementMissing(f"this host can't run {self.name} sandboxes yet: {lines}")

    async def find_outers(self) -> None:
        """Know the containers that hold its guests."""
        self.outers = Outers(self.name, cast(ContainerBackend, await self.host.backend("container")))

    async def create(self, sandbox_id: str, spec: SandboxSpec, template: Template, *, cut: str | None = None) -> Handle:
        raise NotImplementedError

    async def adopt(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> Handle:
        raise NotImplementedError

    async def remove_cut(self, name: str) -> None:
        await self.outers.container.remove_cut(name)

    def adopted(self) -> None:
        pass

    async def found(self) -> list[str]:
        return await self.outers.found()

    async def discard(self, sandbox_id: str) -> None:
        await self.outers.discard(sandbox_id)

    async def unmount(self, digests: Iterable[str] | None = None) -> None:
        pass

    def memory_use(self) -> tuple[int, int]:
        return 0, 0

    async def lost(self) -> None:
        await self.outers.container.lost()

    async def close(self) -> None:
        pass

    async def shutdown(self) -> None:
        pass
