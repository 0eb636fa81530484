"""The function backend: containers with a warm interpreter, and workers that run one call after the other."""

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from barchan.backends.base import Capabilities, Handle, Host
from barchan.backends.container.outer_ids import outer_id
from barchan.backends.container.zygote import CALLS_PREFIX
from barchan.backends.function.worker import Worker
from barchan.backends.hosted.backend import HostedBackend
from barchan.errors import RequirementMissing
from barchan.image.template import Template, need_root
from barchan.model.calls import CallSpec
from barchan.model.node import Requirement
from barchan.model.sandbox import SandboxSpec, Zygote
from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.pager.link import PagerLink

NOBODY = "65534:65534"  # who runs a call where the image's user is root, as whom none runs
KEEPERS = 1  # processes of a worker that are no call's


def new_worker_id() -> str:
    """No user knows it; a node that finds one of an earlier node's removes it."""
    return CALLS_PREFIX + secrets.token_hex(8)


class FunctionBackend(HostedBackend):
    """See `backends.base.Backend`. Its sandboxes are containers that always have a warm interpreter."""

    name = "function"
    capabilities = Capabilities(
        isolation="worker", fork=True, zygote=True, page_out=True, calls=True, networks=frozenset({"none", "allow"})
    )

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._running: set[Worker] = set()

    def probe(self) -> Sequence[Requirement]:
        return ()  # no more than containers

    async def create(self, sandbox_id: str, spec: SandboxSpec, template: Template, *, cut: str | None = None) -> Handle:
        need_root(template, self.name)
        return await self.outers.container.create(outer_id(sandbox_id, self.name), _of(spec), template, cut=cut)

    async def adopt(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> Handle:
        return await self.outers.container.adopt(outer_id(sandbox_id, self.name), _of(spec), template)

    async def restore(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        template: Template,
        memory: Path,
        record: MemoryRecord,
        *,
        cut: str | None,
        pager: PagerLink | None = None,
    ) -> Handle:
        raise RequirementMissing("the function backend stores no memory, and starts from none")

    async def worker(self, worker_id: str, spec: CallSpec, template: Template) -> Worker:
        """A sandbox for calls, with what they need imported.

        Raises:
            InvalidSpec: The interpreter can't be had: the message says why.
            CapacityError: There is no room for it. BootFailed, BackendError: It did not come up; nothing is left.
        """
        need_root(template, self.name)
        container = self.outers.container
        user = template.user or "root"
        sandbox = SandboxSpec(
            template=template.name,
            memory_mib=spec.memory_mib,
            pids_max=spec.pids_max + KEEPERS,
            disk_mib=spec.disk_mib,
            user=NOBODY if user.partition(":")[0] in ("root", "0") else user,
            hostname="call",
            zygote=Zygote(imports=spec.imports, python=spec.python),
        )
        handle = await container.create(worker_id, sandbox, template)
        try:
            return Worker(handle, container.zygotes.take_line(worker_id), self._running)
        except BaseException:
            await asyncio.shield(handle.destroy())
            raise


def _of(spec: SandboxSpec) -> SandboxSpec:
    return replace(spec, backend="container", zygote=spec.zygote or Zygote())
