"""While a bomb goes off in one sandbox, what another one's programs take: at most three times as long as without it. In
the bomb's own sandbox, with no wall between, it is more.

The bomb is paused and let go on in turns, so that whatever else the machine does is in both. It compares times all the
same, and wants a quiet machine: `make drills` runs it, the usual tests don't.
"""

import asyncio
import time
from contextlib import suppress

import pytest

import barchan
from tests.drills.programs import GUEST, PACKAGE, DrillLab, command, template_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.requires("root", "userns", "cgroup", "mkfs.btrfs")]
RATIO_MAX = 3.0
EXECS = 300
ROUNDS = 6
BOMB_S = 20
ALL = ("fork", "zombie", "memory", "disk", "entry", "descriptor", "inotify", "pipe", "stream", "output")
LIMITS = {"memory_mib": 128, "pids_max": 64, "disk_mib": 64}


async def timed(sandbox: barchan.AsyncSandbox) -> list[float]:
    """Milliseconds of programs that do nothing, from the call to the result."""
    took = []
    for _ in range(EXECS // ROUNDS):
        began = time.monotonic()
        (await sandbox.exec(["true"])).check()
        took.append((time.monotonic() - began) * 1e3)
    return took


def p99(took: list[float]) -> float:
    return sorted(took)[int(len(took) * 0.99) - 1]


async def bombs(sandbox: barchan.AsyncSandbox, what: str) -> None:
    """Again and again: one that is killed for what it takes begins anew."""
    while True:
        await sandbox.exec(command("bombs", what, "1000000", str(BOMB_S)), cwd="/opt", user="root", timeout_s=BOMB_S)


@pytest.mark.parametrize("what", ALL)
async def test_a_neighbours_programs_take_at_most_three_times_as_long(lab: DrillLab, backend: str, what: str) -> None:
    """The 99th percentile of 300, beside the bomb against without it."""
    async with barchan.connect_async(f"unix://{lab.node().socket}") as client:
        neighbour = await client.create(template_of(backend), backend=backend)
        sandbox = await client.create(template_of(backend), backend=backend, **LIMITS)  # type: ignore[arg-type]
        for program in GUEST.glob("*.py"):
            path = f"/opt/{PACKAGE.replace('.', '/')}/{program.name}"
            await sandbox.files.as_user("root").write(path, program.read_bytes())
        await timed(neighbour)  # what is slow the first time is no baseline
        without: list[float] = []
        beside: list[float] = []
        bombing = asyncio.create_task(bombs(sandbox, what))
        try:
            for _ in range(ROUNDS):
                await asyncio.sleep(0.5)
                beside += await timed(neighbour)
                with suppress(barchan.Conflict):  # one bomb ended at that moment, and the next one wakes it
                    await sandbox.pause()
                without += await timed(neighbour)
                await sandbox.resume()
        finally:
            bombing.cancel()
            await asyncio.gather(bombing, return_exceptions=True)
        before, during = p99(without), p99(beside)
        print(f"\n{backend} {what}: p99 {before:.1f} ms without, {during:.1f} ms during: {during / before:.2f}")
        assert during <= RATIO_MAX * before
        assert (await neighbour.exec(["true"])).ok


async def test_in_the_same_sandbox_they_take_longer(lab: DrillLab, backend: str) -> None:
    """Nothing but the sandbox's own limits lies between bomb and neighbour then: the measure sees that."""
    async with barchan.connect_async(f"unix://{lab.node().socket}") as client:
        sandbox = await client.create(template_of(backend), backend=backend, cpus=0.5)
        await timed(sandbox)
        before = p99(await timed(sandbox))
        for _ in range(8):
            await sandbox.start("while :; do :; done")
        during = p99(await timed(sandbox))
        print(f"\n{backend} busy loops beside it: p99 {before:.1f} ms without, {during:.1f} ms during")
        assert during > RATIO_MAX * before
