"""What waits for calls: whose it is, how much, and what becomes of it. No worker is ever had here but those made up."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from barchan.backends.function.worker import Call, Outcome, Worker
from barchan.errors import BarchanError, CapacityError, InvalidSpec
from barchan.model.calls import CallSpec
from barchan.node import calls as node_calls
from barchan.node.calls import Calls
from barchan.node.sandboxes import Sandboxes

pytestmark = pytest.mark.timeout(60)
SPEC = msgspec.msgpack.encode(CallSpec())


class Lab:
    """`Calls` with a node that knows one template and whose workers are made by the test."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.known = asyncio.Event()
        self.known.set()
        self.asked: list[CallSpec] = []
        self.wanted: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()
        node = SimpleNamespace(
            tasks=SimpleNamespace(spawn=self._spawn),
            templates=SimpleNamespace(resolve=self._resolve),
            holds=SimpleNamespace(hold=self._hold, release=lambda worker_id: None),
            backend=self._backend,
            last_used=0.0,
        )
        self.calls = Calls(cast(Sandboxes, node))
        self.told: dict[str, Outcome | BarchanError] = {}

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task

    async def _resolve(self, name: str) -> Any:
        await self.known.wait()
        return SimpleNamespace(digest="d")

    async def _hold(self, worker_id: str, template: Any) -> None:
        pass

    async def _backend(self, name: str) -> Any:
        return SimpleNamespace(worker=self._worker)

    async def _worker(self, worker_id: str, spec: CallSpec, template: Any) -> Any:
        self.asked.append(spec)
        wanted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.wanted.put_nowait(wanted)
        return await wanted

    def submit(self, owner: str, name: str, request: bytes = b"", spec: bytes = SPEC) -> Call:
        call = Call(request, 1.0, 0, lambda outcome: self.told.__setitem__(name, outcome))
        self.calls.submit(owner, spec, call)
        return call

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class MadeUp:
    """A worker that is ready, and notes what it runs."""

    was_ready = is_ready = True
    is_running = False
    calls_total = 0
    made_at = float("inf")

    def __init__(self) -> None:
        self.ran: list[Call] = []
        self.cancelled: list[Call] = []

    def run(self, call: Call) -> None:
        call.worker = cast(Worker, self)
        self.ran.append(call)

    def cancel(self, call: Call) -> None:
        self.cancelled.append(call)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_call_that_is_cancelled_before_its_kind_is_known_does_not_run() -> None:
    """Its owner's others do."""
    lab = Lab()
    lab.known.clear()
    gone = lab.submit("a", "gone")
    kept = lab.submit("a", "kept")
    lab.calls.cancel("a", gone)
    lab.known.set()
    await settle()
    worker = MadeUp()
    (await lab.wanted.get()).set_result(worker)
    await settle()
    assert worker.ran == [kept] and lab.told == {} and lab.calls.info().queued == 0
    lab.calls.cancel("a", kept)
    assert worker.cancelled == [kept]
    await lab.close()


async def test_who_has_most_waiting_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number and by their bytes: its newest goes, and its own next one is refused."""
    monkeypatch.setattr(node_calls, "QUEUED_MAX", 4)
    monkeypatch.setattr(node_calls, "QUEUED_BYTES_MAX", 1000)
    lab = Lab()
    for name in ("a1", "a2", "a3", "a4", "a5"):
        lab.submit("a", name)
    await settle()
    assert list(lab.told) == ["a5"] and isinstance(lab.told["a5"], CapacityError)
    lab.submit("b", "b1", bytes(900))
    assert list(lab.told) == ["a5", "a4"]
    lab.submit("c", "c1", bytes(200))
    assert list(lab.told) == ["a5", "a4", "b1"]
    await settle()
    assert lab.calls.info().queued == 4
    lab.calls.leave("a", [])
    assert lab.calls.info().queued == 1
    lab.calls.leave("c", [])
    assert not lab.calls._waiting and not any(kind.queue for kind in lab.calls._kinds.values())
    await lab.close()


async def test_nothing_begins_for_who_does_not_read() -> None:
    """Until it does; others' calls go past."""
    lab = Lab()
    lab.calls.hold("a")
    held = lab.submit("a", "a1")
    other = lab.submit("b", "b1")
    await settle()
    worker = MadeUp()
    (await lab.wanted.get()).set_result(worker)
    await settle()
    assert worker.ran == [other]
    (kind,) = lab.calls._kinds.values()
    lab.calls._ready(kind, cast(Worker, worker))
    assert worker.ran == [other]
    lab.calls.go_on("a")
    assert worker.ran == [other, held]
    await lab.close()


async def test_more_memory_than_there_is_costs_nobody_a_worker() -> None:
    """It is refused; and what there would be room for only if more were idle retires none."""
    lab = Lab()
    lab.calls._memory_mib_max = 1000
    lab.submit("a", "a1", spec=msgspec.msgpack.encode(CallSpec(memory_mib=1001)))
    lab.submit("a", "a2")
    await settle()
    assert isinstance(lab.told["a1"], InvalidSpec)
    lab.submit("a", "a3")
    first, second = MadeUp(), MadeUp()
    for worker in (first, second):
        (await lab.wanted.get()).set_result(worker)
    await settle()
    (kind,) = lab.calls._kinds.values()
    lab.calls._ready(kind, cast(Worker, first))
    lab.submit("a", "a4", spec=msgspec.msgpack.encode(CallSpec(memory_mib=900)))
    await settle()
    assert len(kind.workers) == 2 and len(kind.idle) == 1 and "a4" not in lab.told
    await lab.close()


async def test_workers_are_made_for_what_waited_while_there_was_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as there is some, though no call comes any more."""
    monkeypatch.setattr(node_calls, "SWEEP_S", 0.01)
    lab = Lab()
    lab.calls.workers_max = 1
    for number in range(3):
        lab.submit("a", f"a{number}")
    await settle()
    assert len(lab.asked) == 1
    lab.calls.workers_max = 3
    while len(lab.asked) < 3:
        await asyncio.sleep(0.01)
    await lab.close()
