"""The clients of the sandbox benchmark: each runs as a process of its own, like a trainer would.

`python -m barchan.bench.launcher MODE STATE_DIR COUNT BALLAST_MIB`, samples as JSON on stdout.
"""

import asyncio
import sys
import time
from pathlib import Path

import msgspec

import barchan
from barchan.bench.ground import DYNAMIC, TEMPLATE
from barchan.bench.peers import Samples
from barchan.model.sandbox import SandboxSpec
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.aio.sandbox import AsyncSandbox

WARM_UP = 5
SPEC = SandboxSpec(template=TEMPLATE, memory_mib=256, disk_mib=64)


def _ms_since(began_ns: int) -> float:
    return (time.monotonic_ns() - began_ns) / 1e6


async def _first_instruction(client: AsyncClient) -> tuple[AsyncSandbox, float]:
    """A new sandbox, and the milliseconds from asking for it to the clock that its first program reads first."""
    began_ns = time.monotonic_ns()
    sandbox = await client.create(SPEC)
    result = (await sandbox.exec(["/payload"])).check()
    return sandbox, (int(result.stdout) - began_ns) / 1e6


async def cycle(client: AsyncClient, count: int) -> Samples:
    """Create, one program, destroy, one sandbox after the other."""
    samples = Samples()
    for _ in range(count):
        sandbox, create_ms = await _first_instruction(client)
        samples.create_ms.append(create_ms)
        began_ns = time.monotonic_ns()
        await sandbox.kill()
        samples.destroy_ms.append(_ms_since(began_ns))
    return samples


async def execs(client: AsyncClient, count: int, program: str = "true") -> Samples:
    """The cheapest program, again and again in one sandbox."""
    samples = Samples()
    async with await client.create(SPEC) as sandbox:
        for index in range(count + WARM_UP):
            began_ns = time.monotonic_ns()
            (await sandbox.exec([f"/{program}"])).check()
            if index >= WARM_UP:
                samples.exec_ms.append(_ms_since(began_ns))
    return samples


async def burst(client: AsyncClient, count: int) -> Samples:
    """All at once; each is measured from the moment of the burst."""
    made = await asyncio.gather(*(_first_instruction(client) for _ in range(count)))
    return Samples(create_ms=[create_ms for _, create_ms in made])


async def dynamic_execs(client: AsyncClient, count: int) -> Samples:
    """The same for a program that is linked dynamically."""
    return await execs(client, count, DYNAMIC)


MODES = {"dynamic-execs": dynamic_execs, "cycle": cycle, "execs": execs, "burst": burst}


async def _main(mode: str, state_dir: Path, count: int) -> Samples:
    async with barchan.connect_async(state_dir=state_dir) as client:
        if mode == "cycle":
            await cycle(client, WARM_UP)
        began_ns = time.monotonic_ns()
        samples = await MODES[mode](client, count)
        sys.stderr.write(f"wall_ms {_ms_since(began_ns)}\n")
        return samples


if __name__ == "__main__":
    ballast = bytearray(int(sys.argv[4]) << 20)
    for at in range(0, len(ballast), 4096):
        ballast[at] = 1
    result = asyncio.run(_main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
