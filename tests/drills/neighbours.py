"""While a bomb goes off in one sandbox, what another one's programs take: at most three times as long as before.

It compares times on a machine that should have nothing else to do: `make drills` runs it, the usual tests don't.
"""

import asyncio
import time

import pytest

import barchan
from tests.drills.programs import GUEST, PACKAGE, command
from tests.security.lab import Lab

pytestmark = [pytest.mark.timeout(300), pytest.mark.requires("root", "userns", "cgroup", "mkfs.btrfs")]
RATIO_MAX = 3.0
EXECS = 300
BOMB_S = 20
ALL = ("fork", "zombie", "memory", "disk", "entry", "descriptor", "inotify", "pipe", "stream", "output")
LIMITS = {"memory_mib": 128, "pids_max": 64, "disk_mib": 64}


async def p99_ms(sandbox: barchan.AsyncSandbox) -> float:
    """Of programs that do nothing, from the call to the result."""
    took = []
    for _ in range(EXECS):
        began = time.monotonic()
        (await sandbox.exec(["true"])).check()
        took.append((time.monotonic() - began) * 1e3)
    return sorted(took)[int(EXECS * 0.99) - 1]


async def bombs(sandbox: barchan.AsyncSandbox, what: str) -> None:
    """Again and again: one that is killed for what it takes begins anew."""
    while True:
        await sandbox.exec(command("bombs", what, "1000000", str(BOMB_S)), cwd="/opt", user="root", timeout_s=BOMB_S)


@pytest.mark.parametrize("what", ALL)
async def test_a_neighbours_programs_take_at_most_three_times_as_long(lab: Lab, backend: str, what: str) -> None:
    """The 99th percentile of 300, during the bomb against before it."""
    async with barchan.connect_async(f"unix://{lab.node().socket}") as client:
        neighbour = await client.create("debian", backend=backend)
        sandbox = await client.create("debian", backend=backend, **LIMITS)  # type: ignore[arg-type]
        for program in GUEST.glob("*.py"):
            path = f"/opt/{PACKAGE.replace('.', '/')}/{program.name}"
            await sandbox.files.as_user("root").write(path, program.read_bytes())
        await p99_ms(neighbour)  # what is slow the first time is no baseline
        before = await p99_ms(neighbour)
        bombing = asyncio.create_task(bombs(sandbox, what))
        try:
            await asyncio.sleep(0.5)
            during = await p99_ms(neighbour)
        finally:
            bombing.cancel()
            await asyncio.gather(bombing, return_exceptions=True)
        print(f"\n{backend} {what}: p99 {before:.1f} ms before, {during:.1f} ms during: {during / before:.2f}")
        assert during <= RATIO_MAX * before
        assert (await neighbour.exec(["true"])).ok
