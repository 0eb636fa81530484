"""A lease as its holder has it: held as long as the SDK's own thread reads a response and sends its beats."""

import asyncio
import os
import secrets
import time

from msgspec.structs import replace

from barchan.errors import (
    BarchanError,
    CapacityError,
    ConnectionLost,
    LocalProtocolError,
    NotFound,
    Preempted,
    ReadTimeout,
    SandboxExpired,
)
from barchan.model.lease import BEAT_S, LeaseBeat
from barchan.model.node import Killed, LeaseInfo, LeaseRequest
from barchan.sdk.background import BACKGROUND
from barchan.sdk.http1 import Response
from barchan.sdk.transport import RESEND_S, Call, Transport, encode, records

HOLD = Call("lease_hold", LeaseInfo)
END = Call("lease_end", Killed)
BEAT = Call("lease_beat", LeaseInfo)

PLAIN = LeaseRequest(grace_s=10.0)
_QUIET_S = 15.0  # three of the node's records
_REOPEN_S = 60.0
_END_PATIENCE_S = 3.0
_BEAT_SOON_S = 0.5  # after tokens were used that a budget bounds


class Lease:
    """Opened by the first `ensure()`; with a `lease_id` in its terms, that of another process is held, too. All but the
    id is touched only on the background loop.
    """

    def __init__(self, transport: Transport, terms: LeaseRequest = PLAIN) -> None:
        self.terms = terms
        self._transport = transport
        self._asked_id = terms.lease_id
        self._pid = 0
        self._id: str | None = None
        self._holder: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[str] | None = None
        self._name = ""  # by which the node knows this process among the lease's holders
        self._tokens = self._told = 0
        self._used = asyncio.Event()  # tokens that the node should hear of soon
        self._dismissal: Preempted | None = None  # why nobody holds it any more

    @property
    def id(self) -> str | None:
        """The id, while this process holds it."""
        return self._id if self._pid == os.getpid() else None

    async def ensure(self) -> str:
        """The id of a lease that is being held.

        Raises:
            Preempted: It was put aside. To go on takes another one.
        """
        if self._id is not None and self._pid == os.getpid():
            return self._id
        return await BACKGROUND.call(self._open())

    def hold_nowait(self) -> None:
        """Begin to hold it; an error is told by the next `ensure()`."""
        BACKGROUND.start(self._open())

    def use_tokens(self, count: int) -> None:
        """Prompt and completion tokens that a model call of this process took, for the lease's budget; from any thread.

        They count from the next beat on: after half a second where there is such a budget, else after five.
        """
        if count > 0 and self._pid == os.getpid():
            BACKGROUND.loop().call_soon_threadsafe(self._count, count)

    def _count(self, count: int) -> None:
        self._tokens += count
        if self.terms.budget is not None and self.terms.budget.tokens_max is not None:
            self._used.set()

    async def end(self) -> None:
        """End the lease and with it its sandboxes. A lease of the parent of this process is the parent's to end."""
        if self._pid == os.getpid():
            await BACKGROUND.call(self._end(is_kept=False))

    async def let_go(self) -> None:
        """Hold it no longer; with nobody else who does, it ends after its grace time."""
        if self._pid == os.getpid():
            await BACKGROUND.call(self._end(is_kept=True))

    async def _open(self) -> str:
        if self._pid != os.getpid():
            if self._pid:  # forked: the parent's lease is the parent's
                self._asked_id = None
            self._pid, self._id, self._holder = os.getpid(), None, None
            self._name, self._dismissal = f"{os.getpid()}-{secrets.token_hex(8)}", None
            self._tokens = self._told = 0
        if self._dismissal is not None:
            raise self._dismissal
        if self._opened is None or self._holder is None or self._holder.done():
            self._opened = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._opened))
        return await asyncio.shield(self._opened)

    async def _hold(self, opened: "asyncio.Future[str]") -> None:
        """Read the response; when it breaks off, open the same lease again, for the node may have been restarted.

        A response that ends as it should says that the node ended the lease; the next create then opens another.
        """
        try:
            while await self._read(opened):
                continue
        except BarchanError as error:
            # Once opened there is nobody to tell here: the lease's sandboxes answer for themselves.
            if isinstance(error, Preempted):
                self._dismissal = error
                await self._tell_use()
            if not opened.done():
                opened.set_exception(error)
        finally:
            if self._id is not None:
                self._id = self._asked_id = None
                self._tokens = self._told = 0  # the next lease has used none
            if not opened.done():
                opened.set_exception(LocalProtocolError("the client was closed"))

    async def _read(self, opened: "asyncio.Future[str]") -> bool:
        """Hold one response as long as it lasts; returns whether to open the lease again."""
        terms = encode(replace(self.terms, lease_id=self._id or self._asked_id, holder=self._name))
        response = await self._opened_response(terms)
        beating: asyncio.Task[None] | None = None
        try:
            async for info in records(response, HOLD, quiet_s=_QUIET_S):
                self._id = info.lease_id
                if info.phase == "preempted":
                    raise info.dismissal()
                beating = beating or asyncio.create_task(self._beat(info.lease_id))
                if not opened.done():
                    opened.set_result(info.lease_id)
        except (ConnectionLost, ReadTimeout):
            return True
        finally:
            response.close()
            if beating is not None:
                beating.cancel()
                await asyncio.wait({beating})
        if not opened.done():
            opened.set_exception(ConnectionLost("the node ended the lease before it began"))
        return False

    async def _opened_response(self, terms: bytes) -> Response:
        """A node that can't note a lease, for its disk is full, say, is asked again for as long as one may be away."""
        give_up_at: float | None = None
        while True:
            try:
                return await self._transport.open(HOLD, HOLD.target(), terms, timeout_s=_REOPEN_S, patience_s=_REOPEN_S)
            except CapacityError as error:
                wait_s = error.retry_after_s
                give_up_at = give_up_at or time.monotonic() + RESEND_S
                if time.monotonic() + wait_s > give_up_at:
                    raise
            await asyncio.sleep(wait_s)

    async def _beat(self, lease_id: str) -> None:
        """Say for ever that this process is alive, and what it has used."""
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._used.wait()
                await asyncio.sleep(_BEAT_SOON_S)  # for more of them
            except TimeoutError:
                pass
            await self._beat_once(lease_id)

    async def _beat_once(self, lease_id: str) -> None:
        self._used.clear()
        self._told = self._tokens
        beat = encode(LeaseBeat(holder=self._name, tokens=self._tokens))
        try:
            await self._transport.value(BEAT, BEAT.target(lease_id=lease_id), beat, timeout_s=BEAT_S, patience_s=0)
        except BarchanError:
            self._told = -1  # whoever reads the lease's response learns of it, too

    async def _tell_use(self) -> None:
        """The last tokens, before nobody asks any more."""
        if self._id is not None and self._told != self._tokens:
            await self._beat_once(self._id)

    async def _end(self, *, is_kept: bool) -> None:
        lease_id, holder = self._id, self._holder
        await self._tell_use()
        if holder is not None:
            holder.cancel()
            await asyncio.wait({holder})
        if lease_id is None or is_kept:
            return
        try:
            await self._transport.value(END, END.target(lease_id=lease_id), patience_s=_END_PATIENCE_S)
        except (NotFound, SandboxExpired, Preempted):
            return  # it ended by itself, or somebody has put it aside
