"""Forks of a sandbox, asked of its node."""

import asyncio
import uuid

from barchan.errors import BarchanError, ConnectionLost, ReadTimeout, from_wire
from barchan.model.fork import Forked, ForkKind, ForkRequest
from barchan.model.node import Killed
from barchan.sdk.cancel import clean_up
from barchan.sdk.checks import check_count, check_seconds
from barchan.sdk.options import CreateOptions, spec_fields
from barchan.sdk.transport import Call, Transport, encode, records

FORK = Call("fork", Forked)
FORK_END = Call("fork_end", Killed)

FORK_TIMEOUT_S = 300.0
_TRIES = 2  # a node that was killed meanwhile may be back with the children it has made


async def fork(
    transport: Transport, sandbox_id: str, n: int, kind: ForkKind, timeout_s: float, options: CreateOptions
) -> list[Forked]:
    """Make the children; what became of each, by its index. If this is cancelled or times out, none is left."""
    check_seconds(timeout_s=timeout_s)
    check_count(n=n)
    asked = ForkRequest(n=n, kind=kind, fork_id=uuid.uuid4().hex, changes=spec_fields(options))
    try:
        async with asyncio.timeout(timeout_s):
            return await _asked(transport, sandbox_id, asked, timeout_s)
    except (asyncio.CancelledError, TimeoutError, BarchanError) as error:
        await clean_up(error, _end(transport, asked.fork_id), f"children of fork {asked.fork_id} may live")
        if isinstance(error, TimeoutError):
            raise ReadTimeout(f"the fork was not done in {timeout_s:g} s") from error
        raise


async def _asked(transport: Transport, sandbox_id: str, asked: ForkRequest, timeout_s: float) -> list[Forked]:
    for tries_left in reversed(range(_TRIES)):
        done: dict[int, Forked] = {}
        target = FORK.target(sandbox_id=sandbox_id)
        response = await transport.open(FORK, target, encode(asked), timeout_s=timeout_s)
        try:
            async for forked in records(response, FORK, quiet_s=timeout_s):
                done[forked.index] = forked
            return [done[index] for index in range(asked.n)]
        except ConnectionLost:
            if not tries_left:
                raise
        finally:
            response.close()
    raise AssertionError("the last try returns or raises")


async def _end(transport: Transport, fork_id: str) -> None:
    await transport.value(FORK_END, FORK_END.target(fork_id=fork_id))


def error_of(forked: Forked) -> BarchanError:
    return from_wire(forked.code, forked.message, forked.details)
