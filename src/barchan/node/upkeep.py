"""What a node does by itself from time to time, and what it says of itself."""

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from barchan import backends
from barchan.errors import BarchanError, RequirementMissing
from barchan.model.node import NodeInfo
from barchan.node.density import memory

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

SWEEP_S = 1.0
STALL_S = 2 * SWEEP_S  # a turn that comes later than this tells of a node that stood still, and heard nobody
LOST_KEPT_MAX = 1000
AGAIN_S, AGAIN_S_MAX = 1.0, 60.0


async def sweep(sandboxes: "Sandboxes") -> None:
    """Idle time-outs and old journal rows, for ever."""
    loop = asyncio.get_running_loop()
    turn, last = 0, loop.time()
    while True:
        await asyncio.sleep(SWEEP_S)
        turn += 1
        now = loop.time()
        since_s, last = now - last, now
        try:
            await _sweep_once(sandboxes, since_s, is_thorough=turn % 60 == 0)
        except (BarchanError, OSError) as error:  # a full disk, mostly: the next turn may find room
            asyncio.get_running_loop().call_exception_handler({"message": "the node's sweep", "exception": error})


async def _sweep_once(sandboxes: "Sandboxes", since_s: float, *, is_thorough: bool) -> None:
    end_idle(sandboxes, since_s)
    sandboxes.leases.look(stalled_s=max(0.0, since_s - STALL_S))
    if sandboxes.holds.is_due:
        sandboxes.tasks.spawn(sandboxes.holds.settle(sandboxes.unmount))
    sandboxes.journal.settle()
    if is_thorough:
        await sandboxes.unmount()  # of images that other processes have removed
        sandboxes.journal.prune()
        sandboxes.lost = dict(list(sandboxes.lost.items())[-LOST_KEPT_MAX:])


async def start_again(sandboxes: "Sandboxes", backend: str) -> None:
    """A backend whose supervisor died: the next one removes what that has left, as soon as the host has room for it."""
    pause_s = AGAIN_S
    sandboxes.fallen.add(backend)
    while True:
        try:
            await sandboxes.backend(backend)
            sandboxes.fallen.discard(backend)
            return
        except RequirementMissing:
            raise
        except (BarchanError, OSError) as error:
            asyncio.get_running_loop().call_exception_handler({"message": "starting a supervisor", "exception": error})
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_S_MAX)


async def clear_fallen(sandboxes: "Sandboxes") -> None:
    """A node that ends has such a one started all the same, for once: with its end it is all gone."""
    await asyncio.sleep(0)  # what was seen to die by now has its watcher run
    for backend in list(sandboxes.fallen):
        with suppress(BarchanError, OSError):
            await sandboxes.backend(backend)


def end_idle(sandboxes: "Sandboxes", since_s: float) -> None:
    """End those that nobody has asked anything of, and that run nothing, for their idle time-out.

    Args:
        since_s: Seconds since this was last done.
    """
    now = asyncio.get_running_loop().time()
    for live in list(sandboxes.live.values()):
        limit_s = live.spec.idle_timeout_s
        if limit_s is None or live.ending is not None or not live.is_here:
            continue
        idle_from = max(live.last_used, live.rest.idle_from)
        if live.rest.is_asked:  # asleep by somebody's wish
            live.rest.idle_from = idle_from + since_s
        elif live.requests or live.attached or (live.is_equipped and live.handle.guest.running):
            live.rest.idle_from = now
        elif now - idle_from > limit_s:
            sandboxes.expire(live, "idle_timeout")


def node_info(sandboxes: "Sandboxes", pid: int) -> NodeInfo:
    """What this node is and how loaded."""
    reading = memory(sandboxes)
    return NodeInfo(
        node_id=sandboxes.node_id,
        version=sandboxes.version,
        pid=pid,
        uptime_s=time.monotonic() - sandboxes.started,
        sandboxes_running=sum(live.is_up for live in sandboxes.live.values()),
        sandboxes_paused=sum(live.phase == "paused" for live in sandboxes.live.values()),
        sandboxes_hibernated=sandboxes.tiers.stored,
        sandboxes_starting=sandboxes.admission.starting,
        sandboxes_queued=sandboxes.admission.queued,
        running_max=sandboxes.admission.limits.running_max,
        starting_max=sandboxes.admission.limits.starting_max,
        leases=sandboxes.leases.held,
        creates_total=sandboxes.creates_total,
        create_failures_total=sandboxes.create_failures_total,
        memory_available_mib=reading.available_mib,
        memory=reading,
        backends=backends.names(),
        store=sandboxes.templates.remote.url if sandboxes.templates.remote is not None else "",
        start_s_max={
            name: running.capabilities.start_s_max
            for name in backends.names()
            if (running := sandboxes.running_backend(name)) is not None
        },
    )
