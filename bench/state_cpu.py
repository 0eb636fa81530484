"""Execs of latency-class sandboxes, on a node that does nothing else and on one that batch-class ones keep busy.

    sudo python -m bench.state_cpu --overcommit 8 --count 400 --out cpu.json

Batch sandboxes each run a loop that never ends; there are as many busy processors' worth of them as asked for. The two
measurements take turns, so that a slow spell of the machine meets both.
"""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

import barchan
from barchan.bench.statistics import Percentiles
from bench.state_common import ms, say, table
from scripts.own_node import own_node

ROUNDS = 4
BUSY = "while :; do :; done"
KINDS: tuple[Literal["", "batch", "latency"], ...] = ("", "batch", "latency")


class Shared(Struct, frozen=True, kw_only=True):
    """Milliseconds of an exec of `true`, p50 to p99, alone and beside `busy` loops on `processors`."""

    processors: int
    busy: int
    alone_ms: Percentiles
    beside_batch_ms: Percentiles
    beside_latency_ms: Percentiles

    @property
    def ratio(self) -> float:
        return self.beside_batch_ms.p99 / self.alone_ms.p99


async def execs(sandbox: barchan.AsyncSandbox, count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.monotonic()
        (await sandbox.exec(["/bin/true"])).check()
        found.append((time.monotonic() - began) * 1e3)
        await asyncio.sleep(0.01)
    return found


async def measure(arguments: argparse.Namespace) -> Shared:
    processors = os.cpu_count() or 1
    busy = processors * arguments.overcommit
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with own_node() as own:
        async with barchan.connect_async(state_dir=own.state_dir) as client, await client.create("debian") as sandbox:
            for turn in range(ROUNDS):
                for kind in KINDS:
                    say(f"round {turn + 1} of {ROUNDS}, beside {kind or 'nothing'}")
                    loops = []
                    if kind:
                        loops = [await client.create("debian", cpu_class=kind, memory_mib=64) for _ in range(busy)]
                        for loop in loops:
                            await loop.start(BUSY)
                    found[kind] += await execs(sandbox, arguments.count // ROUNDS)
                    await asyncio.gather(*(loop.kill() for loop in loops))
    return Shared(
        processors=processors,
        busy=busy,
        alone_ms=Percentiles.of(found[""]),
        beside_batch_ms=Percentiles.of(found["batch"]),
        beside_latency_ms=Percentiles.of(found["latency"]),
    )


def report(found: Shared) -> str:
    rows = [
        (what, ms(item.p50), ms(item.p95), ms(item.p99))
        for what, item in (
            ("on an idle node", found.alone_ms),
            (f"beside {found.busy} batch loops", found.beside_batch_ms),
            (f"beside {found.busy} loops of its own class", found.beside_latency_ms),
        )
    ]
    title = f"exec of true, {found.processors} processors"
    return table(title, ("", "p50 ms", "p95 ms", "p99 ms"), rows) + f"p99 beside batch over idle: {found.ratio:.2f}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--overcommit", type=int, default=8, help="busy loops for each processor")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments))
    sys.stdout.write(report(found))
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
