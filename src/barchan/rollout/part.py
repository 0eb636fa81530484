"""One process's part in a run: the lease it holds, the client that creates under it, the run's folder, what is live."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from barchan.errors import LocalProtocolError
from barchan.model.node import LeaseRequest
from barchan.rollout.attempt import Job
from barchan.rollout.breaker import Trip
from barchan.rollout.environments import recipes_of
from barchan.rollout.quarantine import Quarantine
from barchan.rollout.record import RolloutRecord
from barchan.rollout.settings import RunSettings
from barchan.rollout.shared import SharedFolder
from barchan.rollout.task import ArtifactSpec, Task
from barchan.rollout.tools import Toolbox
from barchan.rollout.watch import Watch
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.endpoint import Endpoint
from barchan.sdk.lease import Lease
from barchan.sdk.transport import Transport

if TYPE_CHECKING:
    from barchan.rollout.live import AsyncRollout


class RunTerms(Struct, frozen=True, kw_only=True):
    """What a run was asked to be; all that another process needs to take part in it.

    Attributes:
        lease: With its id, once it is held.
        out: The folder for logs and results.
        attach: The run must be there; what is not over is taken over.
    """

    endpoint: Endpoint
    lease: LeaseRequest
    settings: RunSettings
    out: str | None = None
    attach: bool = False


class Part:
    """What a run's groups and rollouts in this process share.

    Attributes:
        is_owner: The lease was opened here, and is ended here.
        folder: None before the part is open, and where the run has none.
        live: Rollouts that are not over, by their ids.
        stopped: Why no further group is begun: voids of this process have piled up.
        quarantine: Tasks at which no further attempt begins, in any process that has the folder.
    """

    def __init__(self, transport: Transport, terms: RunTerms, *, is_owner: bool) -> None:
        self.terms = terms
        self.settings = terms.settings
        self.is_owner = is_owner
        self.lease = Lease(transport, terms.lease)
        self.client = AsyncClient(terms.endpoint, transport=transport, lease=self.lease)
        self.folder: SharedFolder | None = None
        self.live: dict[str, AsyncRollout] = {}
        self.quarantine = Quarantine()
        self.watch = Watch(self.settings.breaker, self.settings.template)
        self.stopped: Trip | None = None
        self._is_open = self._was_left = False
        self._opening = asyncio.Lock()
        self._toolboxes: dict[tuple[tuple[str, ...], ArtifactSpec], Toolbox] = {}

    @property
    def has_folder(self) -> bool:
        return self.terms.out is not None

    async def open(self) -> str:
        """Hold the lease and open the folder; returns the lease's id."""
        lease_id = await self.lease.ensure()
        try:
            async with self._opening:
                if self.terms.out is not None and self.folder is None:
                    run_id = self.settings.run_id
                    self.folder = await asyncio.to_thread(_open_folder, Path(self.terms.out), run_id, self.terms.attach)
                    self.quarantine = await asyncio.to_thread(Quarantine, self.folder.path)
        except BaseException:
            await self.leave()
            raise
        self._is_open, self._was_left = True, False
        return lease_id

    async def leave(self, *, is_kept: bool = False) -> None:
        """End the lease, and with it its sandboxes, where it was opened; elsewhere, or `is_kept`, let it go."""
        self._is_open, self._was_left = False, True
        self.quarantine.close()
        await (self.lease.end() if self.is_owner and not is_kept else self.lease.let_go())

    async def ensure_open(self) -> None:
        """Refuse to work for a run that was not entered, or was left. One out of a pickle need not be entered.

        Raises:
            LocalProtocolError: It was not, or was.
        """
        if not self._is_open and not self.is_owner and not self._was_left:
            await self.open()
        if not self._is_open:
            name = self.settings.run_id
            raise LocalProtocolError(f"run {name!r} is not open: enter it, `async with client.run(...) as run`")

    async def build(self, task: Task) -> None:
        """Make what the task's sandboxes start from, where the node does not have it."""
        recipes = recipes_of(task)
        if recipes:
            from barchan.sdk.build import build  # with its packing, which runs without recipes don't need

            for recipe in recipes:
                await build(self.client, recipe)

    def toolbox(self, task: Task) -> Toolbox:
        """The task's tools, made once for all who have the same."""
        known = task.tools, task.artifact
        if known not in self._toolboxes:
            self._toolboxes[known] = Toolbox(task)
        return self._toolboxes[known]

    def job(self, rollout_id: str, task: Task, place: tuple[int, int, int]) -> Job:
        """One attempt of this run.

        Args:
            place: `group_index`, `index`, `attempt`.
        """
        group_index, index, attempt = place
        prefix = f"{rollout_id}-{self.folder.salt}" if self.folder is not None else ""
        return Job(rollout_id, task, index, group_index, attempt, prefix)

    def check_goes_on(self) -> None:
        """Refuse to begin more.

        Raises:
            RunStopped: Voids have piled up.
        """
        if self.stopped is not None:
            raise self.stopped.error

    async def look(self, row: RolloutRecord, task: Task) -> None:
        """A rollout of this process is over: whether voids pile up.

        Raises:
            BackendError: The folder can't be written.
        """
        trip = self.watch.ended(row, task)
        if trip is not None and trip.task_id is not None:
            await self.quarantine.hold_off(trip.task_id, trip.message)
        elif trip is not None:
            self.stopped = self.stopped or trip

    def note_begun(self, rollout: "AsyncRollout") -> None:
        self.live[rollout.rollout_id] = rollout
        self.watch.began(rollout.rollout_id, rollout.task)

    def note_over(self, rollout: "AsyncRollout") -> None:
        self.watch.forget(rollout.rollout_id)
        if self.live.get(rollout.rollout_id) is rollout:
            del self.live[rollout.rollout_id]


def _open_folder(path: Path, run_id: str, must_exist: bool) -> SharedFolder:
    from importlib import metadata  # slow to import, and a run without a folder doesn't want it

    return SharedFolder(path, run_id, metadata.version("barchan"), must_exist=must_exist)
