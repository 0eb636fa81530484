"""Holds creates back to what the host can start at once; the decision itself is `core.admission`."""

import asyncio
import heapq
import itertools
import os
import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from barchan.core.admission import Limits, Load, decide
from barchan.core.egress import parse_allow
from barchan.errors import CapacityError, InvalidSpec
from barchan.model.sandbox import SandboxSpec
from barchan.node.density import pressure

LAYER_IMAGES_MAX = 128  # each is checked against each
REFUSED_FRESH_S = 0.01
WARM_MIN = 16  # as many as a group of rollouts mostly has: all of a fork's children find one
FRESH_S = 0.25  # reading the host costs 200 us; a quarter second is fresh enough for a reserve


def default_limits() -> Limits:
    """Bounds fit for this host: 4 starts per processor, and as many live sandboxes as fit at 4 MiB each."""
    cpus = os.cpu_count() or 1
    return Limits(
        starting_max=4 * cpus,
        queued_max=4096,
        running_max=min(30_000, max(16, pressure().memory_available_mib // 4)),
        warm=max(WARM_MIN, 4 * cpus),
    )


def check_spec(spec: SandboxSpec, memory_mib: int, cpus: int) -> None:
    """Raise `InvalidSpec` for a sandbox that no node could run, or none with so much memory and so many processors."""
    if spec.lease_id is None and not spec.detach:
        raise InvalidSpec("a sandbox belongs to a lease (lease_id), or is detached (detach=true) and ends by its ttl_s")
    if spec.detach and spec.ttl_s is None and spec.idle_timeout_s is None:
        raise InvalidSpec("a detached sandbox needs ttl_s or idle_timeout_s, or nothing would ever end it")
    parse_allow(spec.allow_hosts)
    if spec.memory_mib > memory_mib or spec.cpus > cpus:
        raise InvalidSpec(
            f"memory_mib={spec.memory_mib}, cpus={spec.cpus:g} can never fit this node: "
            f"it has {memory_mib} MiB and {cpus} processors"
        )
    if (spec.network == "allow") != bool(spec.allow_hosts):
        raise InvalidSpec('allow_hosts goes with network="allow", and network="allow" needs at least one host')
    if spec.workdir and (not spec.workdir.startswith("/") or "\0" in spec.workdir):
        raise InvalidSpec(f"workdir={spec.workdir[:200]!r} is no absolute path: begin it with /, as /home/agent")
    if len(spec.layers) > LAYER_IMAGES_MAX:
        raise InvalidSpec(f"layers names {len(spec.layers)} images, more than {LAYER_IMAGES_MAX}")


class Admission:
    """Counts starts; `slot()` is held while one sandbox is being made.

    Waiting starts get their turns by priority, and within one in the order they came. Nothing else: as long as starts
    of a higher priority wait, those of lower ones do too, however long that is.
    """

    def __init__(self, limits: Limits, state_dir: Path, requested_mib: Callable[[], int]) -> None:
        self.limits = limits
        self._requested_mib = requested_mib
        self._started_mib = 0  # since that was asked
        self._queued_mib = 0
        self.starting = 0
        self._state_dir = state_dir
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap; the number tells equals apart
        self._numbers = itertools.count()
        self._recent_ms: deque[float] = deque([5.0], maxlen=64)
        self._host = (pressure(), 0, 0)
        self._host_read_at = -1.0

    @property
    def queued(self) -> int:
        return len(self._queue)

    def load(self, running: int, memory_mib: int = 0, fresh_s: float = FRESH_S) -> Load:
        now = asyncio.get_running_loop().time()
        if now - self._host_read_at > fresh_s:
            self._host = (pressure(), shutil.disk_usage(self._state_dir).free >> 20, self._requested_mib())
            self._host_read_at, self._started_mib = now, 0
        return Load(
            starting=self.starting,
            queued=self.queued,
            running=running,
            pressure=self._host[0],
            disk_available_mib=self._host[1],
            requested_mib=self._host[2] + self._started_mib + self._queued_mib + memory_mib,
            start_ms_p50=sorted(self._recent_ms)[len(self._recent_ms) // 2],
        )

    @asynccontextmanager
    async def slot(self, running: int, priority: int = 0, memory_mib: int = 0) -> AsyncIterator[None]:
        """Wait for a turn to start a sandbox.

        Raises:
            CapacityError: There is no room, not even to wait.
        """
        try:
            decision = decide(self.limits, self.load(running, memory_mib))
        except CapacityError:  # room may have come since the last look
            decision = decide(self.limits, self.load(running, memory_mib, REFUSED_FRESH_S))
        if decision == "queue":
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting = (-priority, next(self._numbers), turn)
            heapq.heappush(self._queue, waiting)
            self._queued_mib += memory_mib
            try:
                await turn  # whoever leaves hands its place over, so `starting` stays as it is
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                elif waiting in self._queue:  # whoever left just now has passed over a turn that nobody waits for
                    self._queue.remove(waiting)
                    heapq.heapify(self._queue)
                raise
            finally:
                self._queued_mib -= memory_mib
        else:
            self.starting += 1
        self._started_mib += memory_mib
        began = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self._recent_ms.append((asyncio.get_running_loop().time() - began) * 1e3)
            self._pass_on()

    def _pass_on(self) -> None:
        while self._queue:
            *_, turn = heapq.heappop(self._queue)
            if not turn.done():
                turn.set_result(None)
                return
        self.starting -= 1
