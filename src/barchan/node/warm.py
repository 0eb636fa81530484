"""A node's warm pool: how many slots its backend keeps ready, and which create gets one."""

import asyncio
from typing import TYPE_CHECKING

from barchan.core.density import step
from barchan.core.warm_pool import Bounds, Demand, wanted
from barchan.errors import BarchanError
from barchan.image.template import Template
from barchan.model.pool import PoolInfo
from barchan.model.sandbox import SandboxSpec
from barchan.node.density import pressure

if TYPE_CHECKING:
    from barchan.backends.base import Backend
    from barchan.node.sandboxes import Sandboxes

LOOK_S = 0.5
BACKEND = "container"  # whose slots this keeps; those that belong to a template are their backend's own business


class WarmPool:
    """The slots of one node. Sandboxes never come back to it."""

    def __init__(self, sandboxes: "Sandboxes", bounds: Bounds) -> None:
        self.bounds = bounds
        self._sandboxes = sandboxes
        self._demand = Demand()
        self._kept = 0
        self._kept_by: Backend | None = None

    def take(self, spec: SandboxSpec, template: Template, *, with_files: bool = False) -> str | None:
        """The id of a slot for this sandbox, which is then nobody else's; None: it starts cold.

        Args:
            with_files: It starts from another one's files, which slots of a template can't.
        """
        if spec.backend == BACKEND:
            self._demand.seen(asyncio.get_running_loop().time())
        backend = self._sandboxes.running_backend(spec.backend)
        if backend is None or (with_files and not backend.capabilities.any_image):
            return None
        return backend.slots.take(spec, template)

    def unused(self, backend_name: str, sandbox_id: str, *, is_known: bool) -> None:
        """A create came to nothing: if it had a slot that it did not start, that is free again, or goes.

        Args:
            is_known: The id was told to somebody: it can't be another sandbox's.
        """
        backend = self._sandboxes.running_backend(backend_name)
        if backend is None or not backend.slots.is_lent(sandbox_id):
            return
        if is_known:
            self._sandboxes.tasks.spawn(self._let_go(backend, sandbox_id))
        else:
            backend.slots.put_back(sandbox_id)

    async def _let_go(self, backend: "Backend", sandbox_id: str) -> None:
        try:
            await backend.slots.let_go(sandbox_id)
        except BarchanError as error:
            _complain("removing a slot", error)

    async def run(self) -> None:
        """Keep as many as recent creates ask for and memory allows, for ever."""
        while True:
            try:
                await self._look()
            except (BarchanError, OSError) as error:  # a supervisor that is going: the next one is asked again
                self._kept_by = None
                _complain("filling the warm pool", error)
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        backend = self._sandboxes.running_backend(BACKEND)
        reserve_mib = self._sandboxes.admission.limits.memory_reserve_mib
        burst = self._demand.burst(asyncio.get_running_loop().time())
        count = wanted(self.bounds, burst, step(pressure(), reserve_mib))
        if backend is None or (backend is self._kept_by and count == self._kept):
            return
        await self._keep(backend, count)

    async def _keep(self, backend: "Backend", count: int) -> PoolInfo:
        counts = await backend.slots.keep(count, self._sandboxes.id_prefix)
        self._kept, self._kept_by = count, backend
        return PoolInfo(
            wanted=count,
            ready=counts.ready,
            filling=counts.filling,
            claimed_total=counts.claimed,
            cold_total=counts.cold,
            filled_total=counts.filled,
            died_total=counts.died,
            fill_ms=counts.fill_ms,
        )

    async def set(self, least: int) -> PoolInfo:
        """Keep at least so many from now on."""
        self.bounds = Bounds.around(least)
        self._demand = Demand()
        self._kept = least
        return await self.info()

    async def info(self) -> PoolInfo:
        """What there is now."""
        return await self._keep(await self._sandboxes.backend(BACKEND), self._kept)


def _complain(what: str, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": f"{what} failed", "exception": error})
