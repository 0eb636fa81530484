"""The sandboxes of one rollout: made with patience, ended always, their time accounted for."""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, cast

from barchan.errors import BarchanError, CapacityError, NotFound, SandboxExpired, SandboxLost
from barchan.model.verdict import Evidence
from barchan.rollout.integrity.denied import signs_of_denials
from barchan.rollout.ports import Client, Sandbox
from barchan.rollout.record import Resources
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Environment
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.options import CreateOptions

# Only against leaks: far beyond what a task's limits and a slow model can add up to. The client's lease ends a sandbox
# sooner.
SANDBOX_TTL_S = 24 * 3600.0
Role = Literal["agent", "grader", "control"]


@dataclass(kw_only=True)
class SandboxesState:
    """What is known of a rollout's sandboxes: values only.

    Attributes:
        create_s: The last successful create of each role.
        queue_s: All waiting for room.
        ids: All that were made, by role, in their order.
        notes: What went wrong in tidying up.
        snapshots: Names of those of the agent's that may be there, the last one last.
        resources: What the agent's could use.
        agent_template: What the agent's was made of.
    """

    create_s: dict[Role, float] = field(default_factory=dict)
    queue_s: float = 0.0
    ids: dict[Role, list[str]] = field(default_factory=lambda: {"agent": [], "grader": [], "control": []})
    notes: tuple[Evidence, ...] = ()
    snapshots: list[str] = field(default_factory=list)
    resources: Resources | None = None
    agent_template: str = ""


class Sandboxes:
    """Makes and ends them.

    Args:
        create_prefix: Repeating a create with the same prefix, in the same order, finds the same sandboxes.
    """

    def __init__(
        self, client: Client, settings: RunSettings, rollout_id: str, *, create_prefix: str = "", state: SandboxesState
    ) -> None:
        self.state = state
        self._client = client
        self._settings = settings
        self._rollout_id = rollout_id
        self._create_prefix = create_prefix or rollout_id
        self._graders = ""  # what tells their create ids from those that another process has made

    @property
    def rollout_id(self) -> str:
        return self._rollout_id

    @property
    def snapshot_every(self) -> int:
        """Turns from one snapshot of the agent's sandbox to the next; 0: there are none."""
        return self._settings.snapshot_every

    async def template(self, environment: Environment) -> str:
        """The image that an environment's sandboxes start from; made first, where a recipe's is not there yet."""
        if environment.recipe is None:
            return self._settings.template
        from barchan.sdk.build import build  # with its packing, which runs without recipes don't need

        return await build(cast(AsyncClient, self._client), environment.recipe)

    async def create(
        self, role: Role, environment: Environment, *, template: str | None = None, layers: tuple[str, ...] = ()
    ) -> Sandbox:
        """A new sandbox; while the node has no room, ask again when it says, up to the bound.

        Args:
            template: In place of the environment's own image.
            layers: Images whose own layers lie above it.
        """
        state = self.state
        suffix = "" if role == "agent" else self._graders
        create_id = f"{self._create_prefix}-{role}{suffix}-{len(state.ids[role])}"
        template = template or await self.template(environment)
        sandbox = await self._ask(role, environment, create_id, template, layers)
        state.ids[role].append(sandbox.id)
        if role == "agent":
            state.agent_template = template
        return sandbox

    async def again(self, sandbox_id: str, environment: Environment) -> Sandbox:
        """An agent's sandbox that another process has made. It is asked for as it was then, and so comes under this
        client's lease, should nobody hold the one that it was made under any more.

        Raises:
            SandboxExpired, SandboxLost: It has ended.
        """
        create_id = f"{self._create_prefix}-agent-{self.state.ids['agent'].index(sandbox_id)}"
        found = await self._ask("agent", environment, create_id, self.state.agent_template, ())
        if found.id != sandbox_id:  # it ended so long ago that the node does not know it any more
            await self.end(found, "agent")
            raise SandboxExpired(f"sandbox {sandbox_id} has ended", sandbox_id=sandbox_id)
        return found

    def begin_grading_anew(self) -> None:
        """Whatever sandboxes another process has made to grade in, none of them is used again."""
        self._graders = f"-{secrets.token_hex(4)}"

    async def _ask(
        self, role: Role, environment: Environment, create_id: str, template: str, layers: tuple[str, ...]
    ) -> Sandbox:
        state = self.state
        resources = _resources(environment, self._settings)
        options = self._options(role, environment, create_id, resources)
        if role == "agent":
            state.resources = resources
        if layers:
            options["layers"] = layers
        while True:
            started = time.monotonic()
            try:
                sandbox = await self._client.create(template, **options)
            except CapacityError as refusal:
                pause_s = refusal.retry_after_s * random.uniform(1.0, 1.5)  # so that not all come back at once
                state.queue_s += time.monotonic() - started + pause_s
                if state.queue_s > self._settings.capacity_wait_s:
                    raise
                await asyncio.sleep(pause_s)
            else:
                state.create_s[role] = time.monotonic() - started
                return sandbox

    def _options(self, role: Role, environment: Environment, create_id: str, resources: Resources) -> CreateOptions:
        settings = self._settings
        options: CreateOptions = {
            "backend": settings.backend,
            "memory_mib": resources.memory_limit_mib,
            "pids_max": resources.pids_max,
            "ttl_s": SANDBOX_TTL_S,
            "labels": {"run": settings.run_id, "rollout": self._rollout_id, "role": role},
            "create_id": create_id,
            "network": environment.network,
        }
        if environment.network == "allow":
            options["allow"] = environment.allow_hosts
        if environment.env:
            options["env"] = environment.env
        if environment.cpus is not None:
            options["cpus"] = environment.cpus
        if environment.disk_mib is not None:
            options["disk_mib"] = environment.disk_mib
        if environment.user is not None:
            options["user"] = environment.user
        if environment.root != "plain":
            options["root"] = environment.root
        if environment.workdir is not None:
            options["workdir"] = environment.workdir
        if settings.lease_id is not None:
            options["lease_id"] = settings.lease_id
        return options

    async def end(self, sandbox: Sandbox, role: Role) -> None:
        """End a sandbox, whether or not this is cancelled. A failure is noted, and changes no verdict: the lease and
        the ttl end what is left of it.
        """
        await asyncio.shield(self._kill(sandbox, role))

    async def _kill(self, sandbox: Sandbox, role: Role) -> None:
        try:
            if role == "agent":
                self.state.notes += signs_of_denials(await sandbox.denials())
        except (NotFound, SandboxExpired, SandboxLost):
            return  # it is gone already, and what it was refused with it
        except BarchanError as error:
            self.note("what the agent's sandbox was refused is not known", error)
        try:
            await sandbox.kill()
        except BarchanError as error:
            self.note(f"kill of the {role}'s sandbox failed", error)

    async def end_all(self, role: Role | None = None) -> None:
        """End whatever there is of the rollout on the node, whoever made it. As with `end`, a failure is noted.

        Args:
            role: Only those of this one.
        """
        labels = {"run": self._settings.run_id, "rollout": self._rollout_id}
        try:
            await self._client.kill(labels={**labels, "role": role} if role is not None else labels)
        except BarchanError as error:
            self.note("ending what is left of the rollout failed", error)

    async def has_image(self, name: str) -> bool:
        """Whether the node has an image of that name."""
        try:
            await self._client.image(name)
        except NotFound:
            return False
        return True

    async def remove_image(self, name: str) -> None:
        """Remove an image that held an artifact. As with `end`, a failure is noted."""
        try:
            await asyncio.shield(asyncio.ensure_future(self._client.remove_image(name)))
        except NotFound:
            return  # it was never finished
        except BarchanError as error:
            self.note(f"removing the image {name} failed", error)

    def note(self, fact: str, error: BarchanError) -> None:
        """Keep a failure of tidying up for the verdict's evidence."""
        message = f"{type(error).__name__}: {error}"[:400]
        self.state.notes += (Evidence(source="cleanup", fact=fact, value=message),)

    @asynccontextmanager
    async def opened(
        self, role: Role, environment: Environment, *, template: str | None = None, layers: tuple[str, ...] = ()
    ) -> AsyncIterator[Sandbox]:
        """A sandbox, ended on leaving."""
        sandbox = await self.create(role, environment, template=template, layers=layers)
        try:
            yield sandbox
        finally:
            await self.end(sandbox, role)


def _resources(environment: Environment, settings: RunSettings) -> Resources:
    declared_mib = environment.memory_mib or settings.memory_mib
    return Resources(
        memory_mib=declared_mib,
        memory_limit_mib=max(declared_mib, environment.memory_limit_mib or 0),
        pids_max=environment.pids_max or settings.pids_max,
        cpus=environment.cpus,
        disk_mib=environment.disk_mib,
    )
