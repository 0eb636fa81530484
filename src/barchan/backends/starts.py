"""Starts of programs in one guest, and how they are held off.

An init waits for each program that it starts, until that has begun. One that is stopped just then keeps the init from
answering anything: so nothing may be starting when a guest is stopped for longer than a moment.
"""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from barchan.errors import BackendError, CallerError, Conflict, InvalidSpec


class Starts:
    """Any number of starts at once, or one who wants none."""

    def __init__(self) -> None:
        self._count = 0
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._none_left = asyncio.Event()
        self._none_left.set()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Around a start; it waits while somebody wants none."""
        while not self._may_begin.is_set():
            await self._may_begin.wait()
        self._count += 1
        self._none_left.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._none_left.set()

    @asynccontextmanager
    async def none(self) -> AsyncIterator[None]:
        """Inside, nothing is being started: what was under way has ended, and what comes waits. For one at a time."""
        self._may_begin.clear()
        try:
            await self._none_left.wait()
            yield
        finally:
            self._may_begin.set()


def start_error(error: OSError, process_id: str) -> Exception:
    """What the init's answer to a start is to whoever asked for it."""
    if error.errno == errno.EEXIST:
        return Conflict(f"process id {process_id!r} was used for something else", process_id=process_id)
    if error.errno in (errno.EINVAL, errno.E2BIG, errno.ENAMETOOLONG):
        return InvalidSpec(f"the guest can't start this: {error.strerror}", process_id=process_id)
    if error.errno in (errno.EAGAIN, errno.ENOSPC, errno.EMFILE, errno.ENFILE):
        return CallerError(f"the guest has no room for another process: {error.strerror}", process_id=process_id)
    return BackendError(f"the guest init could not start it: {error.strerror}", errno=error.errno or 0)
