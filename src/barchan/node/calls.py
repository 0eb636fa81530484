"""A node's calls: workers for each kind of call, made when they are needed, and the queues before them."""

import asyncio
import os
from collections.abc import Hashable
from typing import TYPE_CHECKING, cast

import msgspec

from barchan.backends.function.backend import FunctionBackend, new_worker_id
from barchan.backends.function.worker import Call, Worker
from barchan.core.fair_queue import FairQueue
from barchan.errors import BackendError, BarchanError, CapacityError, InvalidSpec
from barchan.image.template import Template
from barchan.model.calls import CallsInfo, CallSpec

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

WORKERS_PER_CPU = 2
WORKERS_MIN = 4
MEMORY_SHARE = 0.5  # of the host's, that the limits of all workers may add up to
QUEUED_MAX = 1000
RETRY_AFTER_MS = 200
IDLE_S = 60.0
SWEEP_S = 5.0
CLOSE_LOOK_S = 0.02
TURN_S = 0.1  # that a worker has for its kind while others wait, and they wait before
RESOLVED_S = 1.0  # for which the image of a name is taken to be the same
NAMES_MAX = 1000


class _Waiting:
    """A call in its queue."""

    __slots__ = ("call", "since")

    def __init__(self, call: Call, since: float) -> None:
        self.call = call
        self.since = since


class _Kind:
    """Calls that the same workers serve."""

    def __init__(self, spec: CallSpec, template: Template) -> None:
        self.spec = spec
        self.template = template
        self.workers: dict[Worker, str] = {}  # with their ids
        self.idle: dict[Worker, float] = {}  # since when, the longest first
        self.starting = 0
        self.queue: FairQueue[_Waiting] = FairQueue()
        self.oldest = 0.0  # since when something has waited, while there are no workers

    @property
    def size(self) -> int:
        return len(self.workers) + self.starting

    @property
    def is_starved(self) -> bool:
        return bool(self.queue) and not self.size


class Calls:
    """All workers of one node. `submit` and `cancel` never wait."""

    def __init__(self, sandboxes: "Sandboxes") -> None:
        self._sandboxes = sandboxes
        self._names: dict[bytes, tuple[_Kind, float]] = {}  # by the spec as it came, and when it was resolved
        self._kinds: dict[tuple[CallSpec, str], _Kind] = {}
        self._decoder = msgspec.msgpack.Decoder(CallSpec)
        self._sweeping: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self.connections: set[asyncio.Transport] = set()  # over which calls come
        self._is_closed = False
        self.workers_max = max(WORKERS_MIN, WORKERS_PER_CPU * (os.cpu_count() or 1))
        self._memory_mib_max = int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) >> 20
        self._calls_total = self._refused_total = self._broken_total = 0

    def info(self) -> CallsInfo:
        kinds = self._kinds.values()
        workers, idle = sum(len(kind.workers) for kind in kinds), sum(len(kind.idle) for kind in kinds)
        return CallsInfo(
            workers=workers,
            workers_max=self.workers_max,
            starting=sum(kind.starting for kind in kinds),
            idle=idle,
            running=sum(worker.is_running for kind in kinds for worker in kind.workers),
            queued=sum(len(kind.queue) for kind in kinds),
            queued_max=QUEUED_MAX,
            calls_total=self._calls_total,
            refused_total=self._refused_total,
            broken_total=self._broken_total,
        )

    @property
    def is_busy(self) -> bool:
        """Somebody waits for a call."""
        return any(
            kind.queue or kind.starting or any(worker.is_running for worker in kind.workers)
            for kind in self._kinds.values()
        )

    # from those who call

    def submit(self, owner: Hashable, spec: bytes, call: Call) -> None:
        """Run a call as soon as there is a worker for it; `call.done` is told how it went, or why it did not.

        Args:
            owner: Whose turn it takes.
            spec: A `CallSpec`, as MessagePack.
        """
        if self._is_closed:
            return call.done(BackendError("the node is ending"))
        now = asyncio.get_running_loop().time()
        self._calls_total += 1
        self._sandboxes.last_used = now
        known = self._names.get(spec)
        if known is not None and now - known[1] < RESOLVED_S:
            self._enter(known[0], owner, call, now)
        else:
            self._sandboxes.tasks.spawn(self._find_kind(owner, spec, call))

    def cancel(self, owner: Hashable, call: Call) -> None:
        """Nobody waits for it any more: it is ended, or does not begin. It may be told of its end all the same."""
        for kind in self._kinds.values():
            for worker in kind.workers:
                worker.cancel(call)
            for waiting in kind.queue.of(owner):
                if waiting.call is call:
                    kind.queue.drop(owner, waiting)

    async def _find_kind(self, owner: Hashable, spec: bytes, call: Call) -> None:
        try:
            asked = self._decoder.decode(spec)
            template = await self._sandboxes.templates.resolve(asked.template)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return call.done(InvalidSpec(f"no call can be of this kind: {error}"))
        except (BarchanError, OSError) as error:
            return call.done(error if isinstance(error, BarchanError) else BackendError(f"{asked.template}: {error}"))
        if self._is_closed:
            return call.done(BackendError("the node is ending"))
        key = (asked, template.digest)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(asked, template)
        now = asyncio.get_running_loop().time()
        if len(self._names) >= NAMES_MAX:
            self._names.clear()
        self._names[spec] = (kind, now)
        self._enter(kind, owner, call, now)

    def _enter(self, kind: _Kind, owner: Hashable, call: Call, now: float) -> None:
        if kind.idle:
            worker, _ = kind.idle.popitem()  # the one that idled last: others may come to their end
            return worker.run(call)
        if sum(len(other.queue) for other in self._kinds.values()) >= QUEUED_MAX:
            self._refused_total += 1
            what = f"{QUEUED_MAX} calls wait on this node already, its bound"
            return call.done(CapacityError(what, retry_after_ms=RETRY_AFTER_MS))
        if not kind.queue:
            kind.oldest = now
        kind.queue.push(owner, _Waiting(call, now))
        self._grow(kind)

    # workers

    def _grow(self, kind: _Kind) -> None:
        """Begin to make another worker, if one is needed and there is room, or another kind's can go for it."""
        if kind.starting >= len(kind.queue) or self._is_closed:
            return
        while not self._has_room(kind):
            idle = [(since, other, worker) for other in self._kinds.values() for worker, since in other.idle.items()]
            if not idle:
                return
            _, other, worker = min(idle, key=lambda item: item[0])
            self._retire(other, worker)
        kind.starting += 1
        self._sandboxes.tasks.spawn(self._start(kind))
        if self._sweeping is None:
            self._sweeping = self._sandboxes.tasks.spawn(self._sweep())

    def _has_room(self, kind: _Kind) -> bool:
        taken_mib = sum(other.size * other.spec.memory_mib for other in self._kinds.values())
        count = sum(other.size for other in self._kinds.values())
        return not count or (count < self.workers_max and taken_mib + kind.spec.memory_mib <= self._memory_mib_max)

    async def _start(self, kind: _Kind) -> None:
        worker_id = new_worker_id()
        try:
            await self._sandboxes.holds.hold(worker_id, kind.template)
            backend = cast(FunctionBackend, await self._sandboxes.backend("function"))
            worker = await backend.worker(worker_id, kind.spec, kind.template)
        except BaseException as error:
            kind.starting -= 1
            self._sandboxes.holds.release(worker_id)
            if not isinstance(error, BarchanError | OSError):
                raise
            self._fail(kind, error if isinstance(error, BarchanError) else BackendError(f"no worker: {error}"))
            return
        kind.starting -= 1
        kind.workers[worker] = worker_id
        worker.on_ready = lambda: self._ready(kind, worker)
        worker.on_broken = lambda error: self._broken(kind, worker, error)
        if self._is_closed:
            self._retire(kind, worker)
        elif worker.is_ready:
            self._ready(kind, worker)

    def _fail(self, kind: _Kind, error: BarchanError) -> None:
        """No worker can be had. Those that wait are told, unless other workers take their turn."""
        if not kind.size:
            for waiting in kind.queue.clear():
                waiting.call.done(error)
        self._share(0.0)

    def _ready(self, kind: _Kind, worker: Worker) -> None:
        """It takes the next call of its kind, or gives way to a kind that has waited long enough."""
        now = asyncio.get_running_loop().time()
        if kind.queue and not (worker.calls_total and now - worker.made_at >= TURN_S):
            return worker.run(kind.queue.pop().call)
        kind.idle[worker] = now
        self._share(TURN_S if kind.queue else 0.0)
        while kind.queue and kind.idle:
            kind.idle.popitem()[0].run(kind.queue.pop().call)

    def _share(self, turn_s: float) -> None:
        """Have workers made of kinds that have none and have waited so long."""
        now = asyncio.get_running_loop().time()
        for kind in [kind for kind in self._kinds.values() if kind.is_starved and now - kind.oldest >= turn_s]:
            self._grow(kind)

    def _broken(self, kind: _Kind, worker: Worker, error: BarchanError) -> None:
        self._broken_total += 1
        self._retire(kind, worker)
        if not worker.was_ready:
            self._fail(kind, error)
        self._grow(kind)
        self._share(0.0)

    def _retire(self, kind: _Kind, worker: Worker) -> None:
        worker_id = kind.workers.pop(worker, None)
        kind.idle.pop(worker, None)
        if worker_id is not None:
            task = asyncio.get_running_loop().create_task(self._end(worker, worker_id))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _end(self, worker: Worker, worker_id: str) -> None:
        try:
            await worker.end()
        except (BarchanError, OSError) as error:  # mostly that its supervisor is gone, and it with that
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"removing the worker {worker_id} failed", "exception": error}
            )
        finally:
            self._sandboxes.holds.release(worker_id)

    async def _sweep(self) -> None:
        """Let workers go that nobody needs."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._share(0.0)
            now = asyncio.get_running_loop().time()
            for key, kind in list(self._kinds.items()):
                for worker in [worker for worker, since in kind.idle.items() if now - since > IDLE_S]:
                    self._retire(kind, worker)
                if not kind.size and not kind.queue:
                    del self._kinds[key]
                    self._names = {spec: known for spec, known in self._names.items() if known[0] is not kind}

    async def close(self) -> None:
        """End all workers; those that wait are told. Repeating is harmless."""
        self._is_closed = True
        for kind in self._kinds.values():
            for waiting in kind.queue.clear():
                waiting.call.done(BackendError("the node is ending"))
            for worker in list(kind.workers):
                self._retire(kind, worker)
        while self._ending or any(kind.starting for kind in self._kinds.values()):
            await (asyncio.wait(self._ending) if self._ending else asyncio.sleep(CLOSE_LOOK_S))
        for transport in self.connections:
            transport.close()
