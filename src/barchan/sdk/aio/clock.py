"""A sandbox's own time, which stands still while the platform has the sandbox asleep, or is itself at a standstill."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from barchan.errors import ConnectionLost, ReadTimeout
from barchan.model.sandbox import SandboxInfo
from barchan.sdk.cancel import forget_error
from barchan.sdk.http1 import Response
from barchan.sdk.transport import Call, Transport, records
from barchan.wire.api import Awake

T = TypeVar("T")
INFO = Call("info", SandboxInfo)
AWAKE = Call("awake", Awake)
WAKE_TIMEOUT_S = 120.0  # others of the node may have their turn first
_QUIET_S = 30.0  # the node says something every 5 s
_SILENCE_S_MAX = 7.0  # longer is no lateness: the node, the host or this process stands still
_AGAIN_S = 0.05
_LOOK_S = 5.0


async def awake_s(transport: Transport, sandbox_id: str) -> float:
    """Since when a sandbox is awake, in seconds: 0 for one that sleeps, for ever where none will wake."""
    info = await transport.value(INFO, INFO.target(sandbox_id=sandbox_id))
    return math.inf if info.awake_s is None else info.awake_s


async def in_its_time(transport: Transport, sandbox_id: str, call: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Await a call that the node answers in so much of the sandbox's time: a sleep meanwhile is no time-out.

    Raises:
        ReadTimeout: It has been awake for so long, and there is no answer.
    """
    task, left_s = asyncio.ensure_future(call), timeout_s
    try:
        while not (await asyncio.wait({task}, timeout=left_s))[0]:
            is_awake_s = await awake_s(transport, sandbox_id)
            if is_awake_s >= timeout_s:
                raise ReadTimeout(f"no answer from {transport.endpoint} in {timeout_s:g} s")
            left_s = timeout_s - is_awake_s if is_awake_s else min(_LOOK_S, timeout_s)
        return task.result()
    finally:
        task.cancel()
        task.add_done_callback(forget_error)


class AsyncSandboxClock:
    """As a context it wakes the sandbox, and keeps it awake but from a sleep that somebody asks for.

    Times are seconds of the event loop's clock, without those that the sandbox slept, and without those for which the
    node was silent beyond 7 s. For the loop it is entered on.

    Raises:
        SandboxExpired, SandboxLost: It has ended. CapacityError, ReadTimeout, ...: It can't be woken.
    """

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._bounds: dict[asyncio.Timeout, float] = {}
        self._slept_s = 0.0
        self._stalled_s = 0.0
        self._heard_at: float | None = None  # the node's last word; None where none is waited for
        self._asleep_at: float | None = None
        self._told_s: float | None = None  # what the node's count was when this one's was 0
        self._follower: asyncio.Task[None] | None = None

    def time(self) -> float:
        """Seconds since some moment."""
        now = asyncio.get_running_loop().time()
        if self._asleep_at is not None:
            return self._asleep_at - self._slept_s - self._stalled_s
        return now - self._slept_s - self._stalled_s - self._silent_s(now)

    @property
    def stalled_s(self) -> float:
        """For how long the node was silent, beyond what is allowed, since this was made."""
        return self._stalled_s + self._silent_s(asyncio.get_running_loop().time())

    def _silent_s(self, now: float) -> float:
        """For how long the node has been silent without a reason."""
        if self._heard_at is None or self._asleep_at is not None:
            return 0.0
        return max(0.0, now - self._heard_at - _SILENCE_S_MAX)

    @asynccontextmanager
    async def timeout(self, delay_s: float | None) -> AsyncIterator[asyncio.Timeout]:
        """As `asyncio.timeout`, in the sandbox's time."""
        async with asyncio.timeout(None) as bound:
            if delay_s is not None:
                self._bounds[bound] = self.time() + delay_s
                self._set(bound)
            try:
                yield bound
            finally:
                self._bounds.pop(bound, None)

    async def __aenter__(self) -> Self:
        response = await self._open(again=None)
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._follower = asyncio.create_task(self._follow(response, first))
        self._follower.add_done_callback(forget_error)
        try:
            await asyncio.wait({first, self._follower}, return_when=asyncio.FIRST_COMPLETED)
            if self._follower.done():
                await self._follower
        except BaseException:
            self._follower.cancel()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait({self._follower})

    async def _open(self, *, again: bool | None) -> Response:
        target = AWAKE.target({"again": again}, sandbox_id=self._sandbox_id)
        return await self._transport.open(AWAKE, target, timeout_s=WAKE_TIMEOUT_S)

    async def _follow(self, response: Response, first: "asyncio.Future[None]") -> None:
        """Hear of every sleep, over lost connections too; until the sandbox has ended or can't be asked any more."""
        try:
            while True:
                try:
                    async with aclosing(self._records(response)) as told:
                        async for note in told:
                            self._take(note)
                            if not first.done():
                                first.set_result(None)
                except (ConnectionLost, ReadTimeout):
                    pass  # whoever runs something in it finds out for himself what is lost
                finally:
                    response.close()
                await asyncio.sleep(_AGAIN_S)
                response = await self._open(again=True)
        finally:
            self._hear()
            self._heard_at = None
            self._go_on()

    def _records(self, response: Response) -> AsyncGenerator[Awake, None]:
        return records(response, AWAKE, quiet_s=_QUIET_S)

    def _hear(self) -> None:
        now = asyncio.get_running_loop().time()
        self._stalled_s += self._silent_s(now)
        self._heard_at = now

    def _take(self, note: Awake) -> None:
        self._hear()
        self._go_on()
        if self._told_s is None or note.slept_s < self._told_s + self._slept_s:
            self._told_s = note.slept_s - self._slept_s  # the first word, or that of a node which counts anew
        self._slept_s = note.slept_s - self._told_s
        if not note.is_awake:
            self._asleep_at = asyncio.get_running_loop().time()
        for bound in self._bounds:
            self._set(bound)

    def _go_on(self) -> None:
        if self._asleep_at is not None:
            self._slept_s += asyncio.get_running_loop().time() - self._asleep_at
            self._asleep_at = None
            for bound in self._bounds:
                self._set(bound)

    def _set(self, bound: asyncio.Timeout) -> None:
        if not bound.expired():
            left_s = self._bounds[bound] - self.time()
            is_asleep = self._asleep_at is not None
            bound.reschedule(None if is_asleep else asyncio.get_running_loop().time() + left_s)
