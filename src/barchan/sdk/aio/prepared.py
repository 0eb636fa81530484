"""Sandboxes whose set-up was run already: forks of one that ran it, made ahead and paused until they are wanted."""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack

from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import (
    BarchanError,
    CapacityError,
    InvalidSpec,
    LocalProtocolError,
    NotFound,
    SandboxExpired,
    SandboxLost,
    TransportError,
)
from barchan.model.fork import ForkKind
from barchan.model.sandbox import SandboxSpec
from barchan.sdk.aio.fork import FORK_TIMEOUT_S
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.cancel import clean_up
from barchan.sdk.checks import check_count
from barchan.sdk.options import CreateOptions

FORKS_AT_ONCE = 4  # of one refill: creates of others come in between
REFILL_PAUSE_S = 0.05
RETRY_S_MIN, RETRY_S_MAX = 0.5, 30.0
_GONE = (NotFound, SandboxExpired, SandboxLost)


class PreparedStatistics(Struct, frozen=True, kw_only=True):
    """What a prepared pool has ready, and what became of it so far.

    Attributes:
        wanted, ready: How many it keeps, and how many could be handed out now.
        claimed_total, forked_total: Creates that found one ready, and those that were forked when they were asked for.
        died_total: Ready ones that had ended before anybody wanted them.
        setups_total: How often the set-up was run.
        failure: Why the pool is not being filled up at the moment; empty: it is, or it is full.
    """

    wanted: int
    ready: int
    claimed_total: int
    forked_total: int
    died_total: int
    setups_total: int
    failure: str


class AsyncPrepared:
    """A pool of one set-up, made by `client.prepare()`; as a context it is closed on exit, and with its client it ends.

    It belongs to the event loop and the process that it was made in.
    """

    def __init__(
        self,
        start: Callable[[SandboxSpec], Awaitable[AsyncSandbox]],
        spec: SandboxSpec,
        count: int,
        kind: ForkKind,
        on_close: "Callable[[AsyncPrepared], None]",
    ) -> None:
        """Not called by users. `start` makes a sandbox, and runs its set-up."""
        check_count(count=count)
        if spec.setup is None:
            raise InvalidSpec("give the script that prepares them: setup=")
        if spec.detach:
            raise InvalidSpec("a prepared pool ends with its client, and so must its sandboxes: leave out detach=")
        self._start = start
        # The one that all are forked from lives as long as the pool; theirs is the time that was asked for.
        self._spec = replace(spec, ttl_s=None, idle_timeout_s=None, create_id=None)
        self._own: CreateOptions = {"ttl_s": spec.ttl_s, "idle_timeout_s": spec.idle_timeout_s}
        self._count, self._kind, self._on_close = count, kind, on_close
        self._pid = os.getpid()
        self._parent: AsyncSandbox | None = None
        self._setting_up = asyncio.Lock()
        self._ready: deque[AsyncSandbox] = deque()
        self._made: deque[AsyncSandbox] = deque()  # not paused yet
        self._taken = asyncio.Event()
        self._filler: asyncio.Task[None] | None = None
        self._is_closed = False
        self._claimed = self._forked = self._died = self._setups = 0
        self._failure = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Not called by users: run the set-up, and begin to fill the pool. Raises as `client.create`."""
        await self._prepared()
        self._filler = asyncio.create_task(self._fill())

    def statistics(self) -> PreparedStatistics:
        return PreparedStatistics(
            wanted=self._count,
            ready=len(self._ready),
            claimed_total=self._claimed,
            forked_total=self._forked,
            died_total=self._died,
            setups_total=self._setups,
            failure=self._failure,
        )

    async def create(self, *, timeout_s: float = FORK_TIMEOUT_S, **options: Unpack[CreateOptions]) -> AsyncSandbox:
        """A sandbox with the set-up done, that nobody else has: one that is ready, or, if none is, a fork made now.

        With options in which it is to differ, as for `sandbox.fork()`, it is always a fork made now. It lives on when
        the pool is closed.

        Raises:
            SetupFailed: What all are forked from had ended, and the set-up that was run again has failed.
            CapacityError, NotSnapshotable, ...: As `sandbox.fork()`.
        """
        self._check()
        if not options:
            while self._ready:
                child = self._ready.popleft()  # nobody else can have it from here on
                self._taken.set()
                if await self._wake(child):
                    self._claimed += 1
                    return child
                self._died += 1
        (made,) = await self._fork(1, options, timeout_s)
        if isinstance(made, BarchanError):
            raise made
        self._forked += 1
        return made

    async def close(self) -> None:
        """End what is ready and what it was forked from; those handed out live on."""
        await self.stop()
        parents = [] if self._parent is None else [self._parent]
        left = [*parents, *self._ready, *self._made]
        self._parent = None
        self._ready.clear()
        self._made.clear()
        await _end(left)

    async def stop(self) -> None:
        """Not called by users: as `close`, but what was made is left to the end of its lease."""
        self._is_closed = True
        self._on_close(self)
        if self._filler is not None:
            self._filler.cancel()
            await asyncio.wait({self._filler})

    def _check(self) -> None:
        if self._is_closed:
            raise LocalProtocolError("the prepared pool is closed")
        if self._pid != os.getpid():
            raise LocalProtocolError("the prepared pool is another process's: two would hand out the same sandboxes")

    async def _wake(self, child: AsyncSandbox) -> bool:
        """Whether it can be handed out; False: it has ended, or can't be brought back."""
        try:
            await child.resume()
        except BaseException as error:
            if isinstance(error, BarchanError) and not isinstance(error, TransportError | CapacityError):
                await _end([child])
                return False
            if self._is_closed:
                await clean_up(error, _end([child]), f"sandbox {child.id} may live")
            else:
                self._ready.appendleft(child)  # nobody has got it: whoever comes next does
            raise
        return True

    async def _prepared(self) -> AsyncSandbox:
        """The sandbox that has run the set-up; made again, if it has ended."""
        async with self._setting_up:
            self._check()
            if self._parent is None:
                parent = await self._start(self._spec)
                self._setups += 1
                if self._is_closed:
                    await _end([parent])
                    self._check()
                self._parent = parent
            return self._parent

    async def _fork(self, n: int, options: CreateOptions, timeout_s: float) -> list[AsyncSandbox | BarchanError]:
        changes: CreateOptions = {**self._own, **options}
        parent = await self._prepared()
        try:
            return await parent.fork(n, kind=self._kind, timeout_s=timeout_s, **changes)
        except _GONE:
            if self._parent is parent:
                self._parent = None
                await _end([parent])  # where it is only out of reach
        parent = await self._prepared()
        return await parent.fork(n, kind=self._kind, timeout_s=timeout_s, **changes)

    async def _fill(self) -> None:
        """Keep the pool full: a few at a time, with a pause, and a longer one after each failure in a row."""
        retry_s = RETRY_S_MIN
        while True:
            self._taken.clear()
            missing = self._count - len(self._ready) - len(self._made)
            try:
                if missing > 0:
                    await self._add(min(missing, FORKS_AT_ONCE))
                await self._pause_made()
            except BarchanError as error:
                self._failure = f"{type(error).__name__}: {error}"
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_S_MAX)
                continue
            self._failure, retry_s = "", RETRY_S_MIN
            if len(self._ready) >= self._count:
                await self._taken.wait()
            await asyncio.sleep(REFILL_PAUSE_S)

    async def _add(self, n: int) -> None:
        made = await self._fork(n, {}, FORK_TIMEOUT_S)
        self._made += [child for child in made if isinstance(child, AsyncSandbox)]
        for failed in made:
            if isinstance(failed, BarchanError):
                raise failed

    async def _pause_made(self) -> None:
        """Only what stands still is ready: while it waits it takes no processor, and its clocks don't run."""
        while self._made:
            try:
                await self._made[0].pause()
            except BarchanError:
                await _end([self._made.popleft()])
                raise
            self._ready.append(self._made.popleft())


async def _end(sandboxes: Iterable[AsyncSandbox]) -> None:
    """As far as the node can be reached: what can't be ended now ends with the lease that they all belong to."""

    async def end(sandbox: AsyncSandbox) -> None:
        with suppress(BarchanError):
            await sandbox.kill()

    await asyncio.gather(*map(end, sandboxes))
