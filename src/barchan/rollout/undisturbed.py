"""The platform's work in a sandbox whose programs may stand in its way.

No program of the guest can touch a file operation, but the platform's own programs in a sandbox run as one of its
users, whose other programs can kill or stop them. Whoever does that has no failure of the platform to show for it: all
that runs in the sandbox is ended, and the work is done again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from barchan.errors import BackendError, CallerError, ReadTimeout, TransportError
from barchan.rollout.ports import Sandbox

ENDS_AT_ONCE = 16
T = TypeVar("T")


async def undisturbed(sandbox: Sandbox, work: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Do the work; where it is killed, or not done in time, once more when nothing else runs. What fails then is the
    platform's.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await work()
    except (TimeoutError, TransportError):  # a stream whose process was killed breaks off
        pass
    except BackendError as error:
        if "wstatus" not in error.details:
            raise
    await end_all(sandbox)
    try:
        async with asyncio.timeout(timeout_s):
            return await work()
    except TimeoutError as error:
        raise ReadTimeout(f"not done in {timeout_s:g} s, with nothing else running in {sandbox.id}") from error


async def end_all(sandbox: Sandbox) -> None:
    """End every process that the platform has started in a sandbox, with all that it has left behind."""
    turns = asyncio.Semaphore(ENDS_AT_ONCE)

    async def end(process_id: str) -> None:
        async with turns:
            try:
                await sandbox.process(process_id).kill()
            except CallerError as error:
                if "sandbox_id" in error.details:
                    raise
                return  # the node has forgotten it meanwhile

    ends = [end(process.process_id) for process in await sandbox.processes()]
    for failed in await asyncio.gather(*ends, return_exceptions=True):
        if failed is not None:
            raise failed
