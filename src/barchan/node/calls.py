"""A node's calls: workers for each kind of call, made when they are needed, and the queues before them."""

import asyncio
import os
from collections.abc import Collection, Hashable, Iterable
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
QUEUED_BYTES_MAX = 256 << 20  # of what they bring with them
RETRY_AFTER_MS = 200
IDLE_S = 60.0
SWEEP_S = 1.0
CLOSE_LOOK_S = 0.02
TURN_S = 0.1  # that a worker has for its kind while others wait, and they wait before
RESOLVED_S = 1.0  # for which the image of a name is taken to be the same
NAMES_MAX = 1000


class _Kind:
    """Calls that the same workers serve."""

    def __init__(self, spec: CallSpec, template: Template, held: Collection[Hashable]) -> None:
        self.spec = spec
        self.template = template
        self.workers: dict[Worker, str] = {}  # with their ids
        self.idle: dict[Worker, float] = {}  # since when, the longest first
        self.starting = 0
        self.queue: FairQueue[tuple[Hashable, Call]] = FairQueue(held)  # with their owners
        self.oldest = 0.0  # since when something has waited, while there are no workers

    @property
    def size(self) -> int:
        return len(self.workers) + self.starting

    @property
    def is_starved(self) -> bool:
        return self.queue.is_ready and not self.size


class _Waiting:
    """What one owner has waiting: calls in the order in which they came, with their kinds once those are known."""

    def __init__(self) -> None:
        self.kinds: dict[Call, _Kind | None] = {}
        self.bytes = 0

    def share(self, count: int = 0, more_bytes: int = 0) -> float:
        """Of what may wait, with so many more."""
        return max((len(self.kinds) + count) / QUEUED_MAX, (self.bytes + more_bytes) / QUEUED_BYTES_MAX)


class Calls:
    """All workers of one node. `submit` and `cancel` never wait."""

    def __init__(self, sandboxes: "Sandboxes") -> None:
        self._sandboxes = sandboxes
        self._names: dict[bytes, tuple[_Kind, float]] = {}  # by the spec as it came, and when it was resolved
        self._kinds: dict[tuple[CallSpec, str], _Kind] = {}
        self._waiting: dict[Hashable, _Waiting] = {}  # by the owner
        self._held: set[Hashable] = set()  # owners none of whose calls begin
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
            queued=sum(len(waiting.kinds) for waiting in self._waiting.values()),
            queued_max=QUEUED_MAX,
            calls_total=self._calls_total,
            refused_total=self._refused_total,
            broken_total=self._broken_total,
        )

    @property
    def is_busy(self) -> bool:
        """Somebody waits for a call."""
        return bool(self._waiting) or any(
            kind.starting or any(worker.is_running for worker in kind.workers) for kind in self._kinds.values()
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
        kind = known[0] if known is not None and now - known[1] < RESOLVED_S else None
        if kind is not None and kind.idle and owner not in self._held:
            worker, _ = kind.idle.popitem()  # the one that idled last: others may come to their end
            return worker.run(call)
        full = self._make_room(owner, call)
        if full is not None:
            return call.done(full)
        waiting = self._waiting.setdefault(owner, _Waiting())
        waiting.kinds[call] = None
        waiting.bytes += len(call.request)
        if kind is not None:
            self._enter(kind, owner, call, now)
        else:
            self._sandboxes.tasks.spawn(self._find_kind(owner, spec, call))

    def cancel(self, owner: Hashable, call: Call) -> None:
        """Nobody waits for it any more: it is ended, or does not begin. It may be told of its end all the same."""
        if call.worker is not None:
            return call.worker.cancel(call)
        self._drop(owner, call)

    def leave(self, owner: Hashable, calls: Iterable[Call]) -> None:
        """Cancel all of an owner's, who does not come again."""
        self._held.discard(owner)
        waiting = self._waiting.pop(owner, _Waiting())
        for kind in {kind for kind in waiting.kinds.values() if kind is not None}:
            kind.queue.drop_owner(owner)
        for call in calls:
            if call.worker is not None:
                call.worker.cancel(call)

    def hold(self, owner: Hashable) -> None:
        """Begin no call of this owner's, who has more answers than it reads, until `go_on`."""
        self._held.add(owner)

    def go_on(self, owner: Hashable) -> None:
        """The end of `hold`."""
        self._held.discard(owner)
        for kind in {kind for kind in self._waiting.get(owner, _Waiting()).kinds.values() if kind is not None}:
            self._run_idle(kind)
            self._grow(kind)

    # what waits

    def _make_room(self, owner: Hashable, call: Call) -> CapacityError | None:
        """Have there be room for one more that waits: at need, the newest of whoever has most waiting gives way."""
        size = len(call.request)
        own = self._waiting.get(owner, _Waiting()).share(1, size)
        while (
            sum(len(waiting.kinds) for waiting in self._waiting.values()) >= QUEUED_MAX
            or sum(waiting.bytes for waiting in self._waiting.values()) + size > QUEUED_BYTES_MAX
        ):
            self._refused_total += 1
            what = f"{QUEUED_MAX} calls, or {QUEUED_BYTES_MAX >> 20} MiB of them, wait on this node already, its bound"
            error = CapacityError(what, retry_after_ms=RETRY_AFTER_MS)
            greatest = max(self._waiting, key=lambda other: self._waiting[other].share())
            if self._waiting[greatest].share() <= own:
                return error
            newest = next(reversed(self._waiting[greatest].kinds))
            self._drop(greatest, newest)
            newest.done(error)
        return None

    def _forget(self, owner: Hashable, call: Call) -> "_Kind | None":
        """It does not wait any more."""
        waiting = self._waiting.get(owner)
        if waiting is None or call not in waiting.kinds:
            return None
        kind = waiting.kinds.pop(call)
        waiting.bytes -= len(call.request)
        if not waiting.kinds:
            del self._waiting[owner]
        return kind

    def _drop(self, owner: Hashable, call: Call) -> None:
        kind = self._forget(owner, call)
        if kind is not None:
            kind.queue.drop(owner, (owner, call))

    def _run_next(self, kind: _Kind, worker: Worker) -> None:
        owner, call = kind.queue.pop()
        self._forget(owner, call)
        worker.run(call)

    def _run_idle(self, kind: _Kind) -> None:
        while kind.queue.is_ready and kind.idle:
            self._run_next(kind, kind.idle.popitem()[0])

    def _refuse_all(self, kind: _Kind, error: BarchanError) -> None:
        for owner, call in kind.queue.clear():
            self._forget(owner, call)
            call.done(error)

    async def _find_kind(self, owner: Hashable, spec: bytes, call: Call) -> None:
        try:
            kind = await self._kind_of(spec)
        except BarchanError as error:
            self._forget(owner, call)
            return call.done(error)
        if call not in self._waiting.get(owner, _Waiting()).kinds:
            return  # it was cancelled meanwhile, or gave way
        now = asyncio.get_running_loop().time()
        if len(self._names) >= NAMES_MAX:
            self._names.clear()
        self._names[spec] = (kind, now)
        self._enter(kind, owner, call, now)

    async def _kind_of(self, spec: bytes) -> _Kind:
        try:
            asked = self._decoder.decode(spec)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidSpec(f"no call can be of this kind: {error}") from error
        if asked.memory_mib > self._memory_mib_max:
            raise InvalidSpec(
                f"memory_mib={asked.memory_mib}: all calls of this node together have {self._memory_mib_max} MiB"
            )
        try:
            template = await self._sandboxes.templates.resolve(asked.template)
        except OSError as error:
            raise BackendError(f"{asked.template}: {error}") from error
        if self._is_closed:
            raise BackendError("the node is ending")
        key = (asked, template.digest)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(asked, template, self._held)
        return kind

    def _enter(self, kind: _Kind, owner: Hashable, call: Call, now: float) -> None:
        if not kind.queue:
            kind.oldest = now
        self._waiting[owner].kinds[call] = kind
        kind.queue.push(owner, (owner, call))
        self._run_idle(kind)
        self._grow(kind)

    # workers

    def _grow(self, kind: _Kind) -> bool:
        """Begin to make another worker, if one is needed and there is room, or others that idle can go for it."""
        if self._is_closed or not kind.queue.is_ready or kind.starting + len(kind.idle) >= len(kind.queue):
            return False
        leaving = self._in_the_way(kind)
        if leaving is None:
            return False
        for other, worker in leaving:
            self._retire(other, worker)
        kind.starting += 1
        self._sandboxes.tasks.spawn(self._start(kind))
        if self._sweeping is None:
            self._sweeping = self._sandboxes.tasks.spawn(self._sweep())
        return True

    def _in_the_way(self, kind: _Kind) -> list[tuple[_Kind, Worker]] | None:
        """Those without which there is room for another of this kind, the longest idle first. None: all that idle are
        not enough, so that none need go."""
        left_mib = self._memory_mib_max - sum(other.size * other.spec.memory_mib for other in self._kinds.values())
        left = self.workers_max - sum(other.size for other in self._kinds.values())
        found: list[tuple[_Kind, Worker]] = []
        idle = [(since, other, worker) for other in self._kinds.values() for worker, since in other.idle.items()]
        for _, other, worker in sorted(idle, key=lambda item: item[0]):
            if left > 0 and left_mib >= kind.spec.memory_mib:
                break
            found.append((other, worker))
            left, left_mib = left + 1, left_mib + other.spec.memory_mib
        return found if left > 0 and left_mib >= kind.spec.memory_mib else None

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
            self._refuse_all(kind, error)
        self._share(0.0)

    def _ready(self, kind: _Kind, worker: Worker) -> None:
        """It takes the next call of its kind, or gives way to a kind that has waited long enough."""
        now = asyncio.get_running_loop().time()
        if kind.queue.is_ready and not (worker.calls_total and now - worker.made_at >= TURN_S):
            return self._run_next(kind, worker)
        kind.idle[worker] = now
        self._share(TURN_S if kind.queue.is_ready else 0.0)
        self._run_idle(kind)

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
        """Make workers that are needed still, and let those go that nobody needs."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._share(0.0)
            for kind in list(self._kinds.values()):
                while self._grow(kind):  # of what waited already when there was no room
                    continue
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
            self._refuse_all(kind, BackendError("the node is ending"))
            for worker in list(kind.workers):
                self._retire(kind, worker)
        while self._ending or any(kind.starting for kind in self._kinds.values()):
            await (asyncio.wait(self._ending) if self._ending else asyncio.sleep(CLOSE_LOOK_S))
        for transport in self.connections:
            transport.close()
