"""A lease as its holder has it: held as long as a response is being read on the SDK's own thread."""

import asyncio
import os

from msgspec.structs import replace

from barchan.errors import BarchanError, ConnectionLost, LocalProtocolError, NotFound, ReadTimeout, SandboxExpired
from barchan.model.node import Killed, LeaseInfo, LeaseRequest
from barchan.sdk.background import BACKGROUND
from barchan.sdk.transport import Call, Transport, encode, records

HOLD = Call("lease_hold", LeaseInfo)
END = Call("lease_end", Killed)

PLAIN = LeaseRequest(grace_s=10.0)
_QUIET_S = 15.0  # three of the node's records
_REOPEN_S = 60.0
_END_PATIENCE_S = 3.0


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

    @property
    def id(self) -> str | None:
        """The id, while this process holds it."""
        return self._id if self._pid == os.getpid() else None

    async def ensure(self) -> str:
        """The id of a lease that is being held."""
        if self._id is not None and self._pid == os.getpid():
            return self._id
        return await BACKGROUND.call(self._open())

    def hold_nowait(self) -> None:
        """Begin to hold it; an error is told by the next `ensure()`."""
        BACKGROUND.start(self._open())

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
            if not opened.done():
                opened.set_exception(error)
        finally:
            if self._id is not None:
                self._id = self._asked_id = None
            if not opened.done():
                opened.set_exception(LocalProtocolError("the client was closed"))

    async def _read(self, opened: "asyncio.Future[str]") -> bool:
        """Hold one response as long as it lasts; returns whether to open the lease again."""
        request = encode(replace(self.terms, lease_id=self._id or self._asked_id))
        response = await self._transport.open(HOLD, HOLD.target(), request, timeout_s=_REOPEN_S, patience_s=_REOPEN_S)
        try:
            async for info in records(response, HOLD, quiet_s=_QUIET_S):
                self._id = info.lease_id
                if not opened.done():
                    opened.set_result(info.lease_id)
        except (ConnectionLost, ReadTimeout):
            return True
        finally:
            response.close()
        if not opened.done():
            opened.set_exception(ConnectionLost("the node ended the lease before it began"))
        return False

    async def _end(self, *, is_kept: bool) -> None:
        lease_id, holder = self._id, self._holder
        if holder is not None:
            holder.cancel()
            await asyncio.wait({holder})
        if lease_id is None or is_kept:
            return
        try:
            await self._transport.value(END, END.target(lease_id=lease_id), patience_s=_END_PATIENCE_S)
        except (NotFound, SandboxExpired):
            return  # it ended by itself
