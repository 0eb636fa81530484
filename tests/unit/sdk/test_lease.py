"""A lease as its holder has it, when its node answers otherwise than it likes."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from barchan.errors import CapacityError, ConnectionLost, Preempted
from barchan.model.lease import LeaseBeat
from barchan.model.node import LeaseInfo
from barchan.sdk.lease import BEAT, END, HOLD, Lease
from barchan.sdk.transport import Call


class Response:
    """Says once that the lease is held, and goes when told to; `error`: how."""

    def __init__(self, lease_id: str, error: Exception | None) -> None:
        self._lease_id, self._error = lease_id, error
        self.goes = threading.Event()  # for it is read on the SDK's own thread

    async def pieces(self, _quiet_s: float) -> AsyncIterator[bytes]:
        record = msgspec.msgpack.encode(LeaseInfo(lease_id=self._lease_id, grace_s=10.0))
        yield len(record).to_bytes(4, "little") + record
        while not self.goes.is_set():
            await asyncio.sleep(0.005)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        return


class Node:
    """A transport to no node."""

    def __init__(self, *responses: Response | CapacityError) -> None:
        self._responses = list(responses)
        self.calls: list[Call[Any]] = []
        self.beats: list[int] = []
        self.ends: list[Exception] = []

    async def open(self, call: Call[Any], *_: Any, **__: Any) -> Response:
        assert call is HOLD
        if not self._responses:
            await asyncio.get_running_loop().create_future()
        response = self._responses.pop(0)
        if isinstance(response, CapacityError):
            raise response
        return response

    async def value(self, call: Call[Any], _target: str, body: bytes = b"", **_: Any) -> None:
        self.calls.append(call)
        if call is BEAT:
            self.beats.append(msgspec.msgpack.decode(body, type=LeaseBeat).tokens)
        if call is END and self.ends:
            raise self.ends.pop(0)


async def until(is_so: Any) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_the_end_of_a_preempted_lease_is_none() -> None:
    """Its holder has not heard of that, for it opens its lease anew: the node says so, and that is no error."""
    lost = Response("le_1", ConnectionLost("cut"))
    node = Node(lost)
    node.ends.append(Preempted("put aside"))
    lease = Lease(node)  # type: ignore[arg-type]
    await lease.ensure()
    lost.goes.set()
    await lease.end()
    assert node.calls == [END]


async def test_a_node_without_room_to_note_a_lease_is_asked_again() -> None:
    """A run that comes back to a node whose disk is full for a moment goes on when there is room."""
    node = Node(
        CapacityError("full", retry_after_ms=10), CapacityError("full", retry_after_ms=10), Response("le_1", None)
    )
    lease = Lease(node)  # type: ignore[arg-type]
    assert await lease.ensure() == "le_1"
    await lease.let_go()


async def test_tokens_are_told_to_the_lease_they_were_used_under() -> None:
    """The next one has used none."""
    first = Response("le_1", None)
    node = Node(first, Response("le_2", None))
    lease = Lease(node)  # type: ignore[arg-type]
    assert await lease.ensure() == "le_1"
    lease.use_tokens(10)
    await until(lambda: lease._tokens == 10)
    await lease.let_go()
    assert node.beats == [10]
    assert await lease.ensure() == "le_2"
    lease.use_tokens(3)
    await until(lambda: lease._tokens)
    await lease.let_go()
    assert node.beats == [10, 3]
