"""One live sandbox of a node, and what serves its requests."""

import asyncio
import time

from msgspec.structs import replace

from barchan.backends.base import Handle
from barchan.errors import BackendError, BarchanError, NotFound, SandboxExpired
from barchan.image.template import Template
from barchan.model.denials import Denials
from barchan.model.sandbox import Phase, SandboxInfo, SandboxSpec, SandboxStats
from barchan.node.clock import Clock, Timer
from barchan.node.denied import Denied
from barchan.node.files import Files
from barchan.node.network import Network
from barchan.node.processes import SHELL_NAMES, Defaults, Processes
from barchan.node.rest import Rest

SHELLS_MAX = 4096  # each snapshot is a template of its own


class Live:
    """One live sandbox: its handle and what serves its requests."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, template: Template, created_unix_s: float) -> None:
        self.sandbox_id = sandbox_id
        self.spec = spec
        self.template = template
        self.created_unix_s = created_unix_s
        self.phase: Phase = "booting"
        self.create_ms = 0.0
        self.booted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ending: asyncio.Task[None] | None = None
        self.clock = Clock()
        self.rest = Rest()
        self.last_used = asyncio.get_running_loop().time()
        self.requests = 0  # in flight
        self.attached = 0  # that only listen: nobody waits for what they hear
        self.maker: asyncio.Task[None] | None = None
        self.backend_reason = ""
        self.is_equipped = False
        self.is_set_up = False
        self.unavailable: BarchanError | None = None  # why it was stopped while it booted
        self.handle: Handle
        self.defaults: Defaults
        self.processes: Processes
        self.files: Files
        self.network: Network | None = None
        self.denied = Denied()
        self.files_epoch = 0  # the highest in which somebody changed its files
        self.expiry: Timer | None = None

    def let_go(self) -> None:
        """It has ended: a timer would keep all of it in memory for as long as it might have lived."""
        if self.expiry is not None:
            self.expiry.cancel()
        self.rest.woken.set()
        self.clock.tell()

    @property
    def is_up(self) -> bool:
        """It has processes on this host, running or stopped."""
        return self.phase in ("ready", "paused")

    @property
    def is_here(self) -> bool:
        """It can be asked something, if need be after a wake."""
        return self.is_up or self.phase == "hibernated"

    def equip(self, handle: Handle, *, is_new: bool) -> None:
        self.is_equipped = True
        self.handle = handle
        self.defaults = Defaults(self.spec, self.template, Network.env(self.spec, handle))
        self.processes = Processes(handle, self.defaults, self.clock, is_new=is_new)
        self.files = Files(handle, self.processes, self.defaults)

    def stats(self) -> SandboxStats:
        """The kernel's counters, with what it had used before it was on disk."""
        return self.rest.before.and_then(self.handle.stats())

    def denials(self) -> Denials:
        """What it was refused."""
        return self.denied.told(self.handle.guest.processes.values() if self.is_equipped else ())

    def failure(self, error: BaseException) -> BarchanError:
        """What a create that ended so is told."""
        if isinstance(error, asyncio.CancelledError):
            return SandboxExpired("the create was cancelled")
        if self.unavailable is not None:
            return self.unavailable
        return error if isinstance(error, BarchanError) else BackendError(f"creating failed: {error!r}")

    async def find_shell(self) -> str:
        """The best shell of the template, asked of its first sandbox; /bin/sh when it has none."""
        for shell in SHELL_NAMES:
            try:
                await self.files.stat(shell, "root")
            except NotFound:
                continue
            break
        return shell

    def info(self, node_id: str) -> SandboxInfo:
        return SandboxInfo(
            sandbox_id=self.sandbox_id,
            node_id=node_id,
            phase=self.phase,
            template=self.template.name,
            template_digest=self.template.digest,
            spec=self.spec,
            created_unix_s=self.created_unix_s,
            age_s=max(0.0, time.time() - self.created_unix_s),
            idle_s=asyncio.get_running_loop().time() - self.last_used,
            create_ms=self.create_ms,
            processes_running=self.handle.guest.running if self.is_here and self.is_equipped else 0,
            tier=self.rest.tier,
            memory_freed_bytes=self.rest.freed_bytes,
            stays_paused=self.rest.refused,
            awake_s=self.clock.awake_s,
            backend_reason=self.backend_reason,
        )


class Shells:
    """The best shell of each template, as its first sandbox found it; the oldest are forgotten."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def known(self, live: Live) -> str:
        """Of one that can't be asked now: as others of its template have it, or the one that all have."""
        return self._known.get(live.template.digest, SHELL_NAMES[-1])

    async def of(self, live: Live) -> str:
        digest = live.template.digest
        shell = self._known.pop(digest, None) or await live.find_shell()
        self._known[digest] = shell
        while len(self._known) > SHELLS_MAX:
            del self._known[next(iter(self._known))]
        return shell


def identity(spec: SandboxSpec) -> SandboxSpec:
    """What two creates of one id must have in common: all but who holds it."""
    return replace(spec, lease_id=None)
