"""A node's side of the supervisor's slots: which are ready, which is whose."""

from collections.abc import Awaitable, Callable, Sequence

from barchan.backends.base import SlotCounts
from barchan.backends.container.supervisor import Answer
from barchan.errors import BootFailed, NotFound
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec
from barchan.wire import supervisor as wire

Ask = Callable[..., Awaitable[Answer]]


class ContainerSlots:
    """See `backends.base.Slots`. The supervisor makes them, and a create that names one claims it."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._ready: dict[str, None] = {}  # in the order they came
        self._lent: set[str] = set()

    async def keep(self, count: int, prefix: str) -> SlotCounts:
        message = (await self._ask("slots", count=count, prefix=prefix)).message
        return SlotCounts(
            ready=message.number("ready"),
            filling=message.number("filling"),
            claimed=message.number("claimed"),
            cold=message.number("cold"),
            filled=message.number("filled"),
            died=message.number("died"),
            fill_ms=message.number("fill_us") / 1e3,
        )

    def hear(self, message: wire.Message) -> None:
        """The supervisor's word on one of them."""
        sandbox_id = message.get("id")
        if message.number("ready"):
            self._ready[sandbox_id] = None
        else:
            self._ready.pop(sandbox_id, None)
            self._lent.discard(sandbox_id)

    def take(self, spec: SandboxSpec, template: Template) -> str | None:
        if not self._ready or spec.root != "plain" or spec.cpu_class != "latency" or spec.zygote is not None:
            return None
        sandbox_id, _ = self._ready.popitem()  # the newest: most of it is still in the processors' caches
        self._lent.add(sandbox_id)
        return sandbox_id

    def is_lent(self, sandbox_id: str) -> bool:
        return sandbox_id in self._lent

    def put_back(self, sandbox_id: str) -> None:
        self._lent.remove(sandbox_id)
        self._ready[sandbox_id] = None

    async def let_go(self, sandbox_id: str) -> None:
        self._lent.remove(sandbox_id)
        await self._remove(sandbox_id)

    async def start(self, op: str, *, id: str, fds: Sequence[int] = (), timeout_s: float, **keys: str | int) -> Answer:
        """A create or restore. One that was to be warm and could not is made cold, under the same id."""
        self._lent.discard(id)
        try:
            return await self._ask(op, fds=fds, timeout_s=timeout_s, id=id, **keys)
        except BootFailed as error:
            if error.details.get("stage") != "slot":
                raise
            await self._remove(id)
        return await self._ask(op, fds=fds, timeout_s=timeout_s, id=id, **keys)

    async def _remove(self, sandbox_id: str) -> None:
        try:
            (await self._ask("destroy", id=sandbox_id)).close()
        except NotFound:
            pass  # it is gone already


def keys_of(spec: SandboxSpec, cpu_period_us: int, shm_bytes_max: int) -> dict[str, str | int]:
    """What a spec says, in the supervisor's words."""
    return {
        "upper_bytes": spec.disk_mib << 20,
        "memory_bytes": spec.memory_mib << 20,
        "pids": spec.pids_max,
        "cpu_us": max(1000, int(spec.cpus * cpu_period_us)),
        "cpu": spec.cpu_class,
        "shm_bytes": min(shm_bytes_max, spec.memory_mib << 19),
        "hostname": spec.hostname,
        "root": spec.root,
    }
