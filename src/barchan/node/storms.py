"""Many sandboxes to one tier: each in its turn, told of as it is there, whoever goes on listening."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from barchan.errors import InvalidSpec
from barchan.model.tiers import Tier, TierChange, TierRequest
from barchan.node.live import Live
from barchan.node.sandboxes import Sandboxes


def chosen(sandboxes: Sandboxes, asked: TierRequest) -> list[Live]:
    """The sandboxes that a request names.

    Raises:
        InvalidSpec: It names none, or in two ways. NotFound, SandboxExpired, SandboxLost: One of the ids is not here.
    """
    if sum((bool(asked.sandbox_ids), bool(asked.labels), asked.all)) != 1:
        raise InvalidSpec("say which in one way: sandbox_ids, labels, or all=true for every sandbox of this node")
    if asked.sandbox_ids:
        return [sandboxes.get(sandbox_id) for sandbox_id in dict.fromkeys(asked.sandbox_ids)]
    return [live for live in sandboxes.matching(asked.labels, None) if live.is_here and live.ending is None]


async def bring(sandboxes: Sandboxes, chosen: Sequence[Live], tier: Tier) -> AsyncGenerator[TierChange, None]:
    """Bring all of them to a tier; a record of each as it is done or refused.

    Ending the iteration ends nothing of it: a job that is being preempted need not wait.
    """
    done: asyncio.Queue[TierChange] = asyncio.Queue()

    async def one(live: Live) -> None:
        try:
            done.put_nowait(await sandboxes.tiers.change(live, tier))
        except Exception as error:  # a fault of the node: whoever counts the records must not wait for ever
            done.put_nowait(TierChange(sandbox_id=live.sandbox_id, tier=live.rest.tier, refused=repr(error)))
            raise

    for live in chosen:
        sandboxes.tasks.spawn(one(live))
    for _ in chosen:
        yield await done.get()
