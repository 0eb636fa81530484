"""The sandboxes of one rollout: made with patience, ended always, their time accounted for."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from barchan.errors import BarchanError, CapacityError
from barchan.model.verdict import Evidence
from barchan.rollout.ports import Client, Sandbox
from barchan.rollout.settings import RunSettings

# Only against leaks: far beyond what a task's limits and a slow model can add up to. The client's lease ends a sandbox
# sooner.
SANDBOX_TTL_S = 24 * 3600.0
RETRY_MS_DEFAULT = 100
Role = Literal["agent", "grader"]


class Sandboxes:
    """Makes and ends them. `create_s` is the last successful create of each role, `queue_s` all waiting for room."""

    def __init__(self, client: Client, settings: RunSettings, rollout_id: str) -> None:
        self._client = client
        self._settings = settings
        self._rollout_id = rollout_id
        self.create_s: dict[Role, float] = {}
        self.queue_s = 0.0
        self.ids: dict[Role, list[str]] = {"agent": [], "grader": []}
        self.notes: tuple[Evidence, ...] = ()

    async def create(self, role: Role) -> Sandbox:
        """A new sandbox; while the node has no room, ask again when it says, up to the bound."""
        settings = self._settings
        create_id = f"{self._rollout_id}-{role}-{len(self.ids[role])}"
        while True:
            started = time.monotonic()
            try:
                sandbox = await self._client.create(
                    settings.template,
                    memory_mib=settings.memory_mib,
                    pids_max=settings.pids_max,
                    ttl_s=SANDBOX_TTL_S,
                    labels={"run": settings.run_id, "rollout": self._rollout_id, "role": role},
                    create_id=create_id,
                )
            except CapacityError as refusal:
                retry_s = int(refusal.details.get("retry_after_ms", RETRY_MS_DEFAULT)) / 1e3
                pause_s = retry_s * random.uniform(1.0, 1.5)  # so that the refused do not all come back at once
                self.queue_s += time.monotonic() - started + pause_s
                if self.queue_s > settings.capacity_wait_s:
                    raise
                await asyncio.sleep(pause_s)
            else:
                self.create_s[role] = time.monotonic() - started
                self.ids[role].append(sandbox.id)
                return sandbox

    async def end(self, sandbox: Sandbox, role: Role) -> None:
        """End a sandbox, whether or not this is cancelled. A failure is noted, and changes no verdict: the lease and
        the ttl end what is left of it.
        """
        await asyncio.shield(self._kill(sandbox, role))

    async def _kill(self, sandbox: Sandbox, role: Role) -> None:
        try:
            await sandbox.kill()
        except BarchanError as error:
            self.note(f"kill of the {role}'s sandbox failed", error)

    def note(self, fact: str, error: BarchanError) -> None:
        """Keep a failure of tidying up for the verdict's evidence."""
        message = f"{type(error).__name__}: {error}"[:400]
        self.notes += (Evidence(source="cleanup", fact=fact, value=message),)

    @asynccontextmanager
    async def opened(self, role: Role) -> AsyncIterator[Sandbox]:
        sandbox = await self.create(role)
        try:
            yield sandbox
        finally:
            await self.end(sandbox, role)
