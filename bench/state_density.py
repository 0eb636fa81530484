"""How many idle Python sandboxes this machine holds, and whether each of them still answers.

    sudo python -m bench.state_density --way separate --count 2000 --out density.json

Every sandbox comes from `create()` and has run one command: a Python that has imported and parsed modules of its
own library until it holds 30 MiB, and waits for its next line. `separate`: each started for itself, then paused and
paged out. `zygote`: forked from a warm interpreter. `hibernated`: as `separate`, then to disk. At the end each is
asked for what only it knows, and must give it. Stops early when memory or disk run short, and says which.
"""

import argparse
import asyncio
import shutil
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.bench.statistics import Percentiles
from barchan.errors import BarchanError
from barchan.model.tiers import Waiting
from bench.state_common import IMPORTS, Repl, heap_program, memory_available_bytes, mib, ms, say, table
from bench.state_resume import zram
from scripts.own_node import OwnNode, own_node, pool_bytes

WAYS = ("separate", "zygote", "hibernated")
FLOOR_BYTES = 1 << 30
SECRET = "secret = {number} * 7919 + 1"
SERVER = "import sys\n{secret}\nprint('ready', flush=True)\nfor line in sys.stdin: print(repr(eval(line)), flush=True)"
PROBES_AT_ONCE = 4


class Held(Struct, frozen=True, kw_only=True):
    """What one way came to. `limit`: what ran short, or that nothing did."""

    way: str
    alive: int
    limit: str
    memory_used_bytes: int
    memory_each_bytes: int
    disk_used_bytes: int
    pool_bytes: int
    wrong: int
    lost: int
    create_ms_first: Percentiles
    create_ms_last: Percentiles
    probe_ms: Percentiles
    wall_s: float


def shortage(own: OwnNode) -> str:
    if memory_available_bytes() < FLOOR_BYTES:
        return "memory"
    return "disk" if shutil.disk_usage(own.state_dir).free < 4 * FLOOR_BYTES else ""


async def begin(
    client: barchan.AsyncClient, template: object, way: str, number: int
) -> tuple[barchan.AsyncSandbox, Repl, float]:
    began = time.monotonic()
    sandbox = await client.create(template, memory_mib=128, disk_mib=64, waiting=Waiting(pause=False))  # type: ignore[arg-type]
    create_ms = (time.monotonic() - began) * 1e3
    secret = SECRET.format(number=number)
    if way == "zygote":
        process = await sandbox.start_python(SERVER.format(secret=secret), process_id="repl")
        repl = Repl(process)
        await repl.ready()
    else:
        repl = await Repl.start(sandbox, heap_program(30).replace('print("ready"', secret + '\nprint("ready"', 1))
    if way == "separate":
        await sandbox.page_out()
    elif way == "hibernated":
        await sandbox.hibernate()
    return sandbox, repl, create_ms


async def hold(own: OwnNode, client: barchan.AsyncClient, way: str, count: int) -> Held:
    template: object = "debian" if way != "zygote" else client.zygote("debian", imports=IMPORTS)
    memory, disk, began = memory_available_bytes(), shutil.disk_usage(own.state_dir).free, time.monotonic()
    alive: list[tuple[int, barchan.AsyncSandbox, Repl]] = []
    creates: list[float] = []
    limit, todo = "none", iter(range(count))

    async def worker() -> None:
        nonlocal limit
        for number in todo:
            if limit == "none" and (short := shortage(own)):
                limit = short
            if limit != "none":
                return
            try:
                sandbox, repl, create_ms = await begin(client, template, way, number)
            except BarchanError as error:
                limit = f"{type(error).__name__}: {error}"
                return
            alive.append((number, sandbox, repl))
            creates.append(create_ms)
            if len(alive) % 100 == 0:
                say(f"{way}: {len(alive)}, {mib(memory_available_bytes())} MiB available, create {create_ms:.1f} ms")

    await asyncio.gather(*(worker() for _ in range(2)))
    used, disk_used = memory - memory_available_bytes(), disk - shutil.disk_usage(own.state_dir).free
    of_pool, wrong, lost = pool_bytes(own), 0, 0
    probes: list[float] = []
    turns = asyncio.Semaphore(PROBES_AT_ONCE)

    async def probe(number: int, sandbox: barchan.AsyncSandbox, repl: Repl) -> None:
        nonlocal wrong, lost
        async with turns:
            asked = time.monotonic()
            try:
                wrong += await repl.ask("secret") != str(number * 7919 + 1)
                probes.append((time.monotonic() - asked) * 1e3)
                if way == "separate":
                    await sandbox.page_out()
                elif way == "hibernated":
                    await sandbox.hibernate()
            except BarchanError as error:
                say(f"{sandbox.id}: {error}")
                lost += 1

    say(f"{way}: asking all {len(alive)}")
    await asyncio.gather(*(probe(*item) for item in alive))
    share = min(100, max(1, len(creates) // 4))
    return Held(
        way=way, alive=len(alive), limit=limit, memory_used_bytes=used,
        memory_each_bytes=used // max(1, len(alive)),
        disk_used_bytes=disk_used, pool_bytes=of_pool, wrong=wrong, lost=lost,
        create_ms_first=Percentiles.of(creates[:share]),
        create_ms_last=Percentiles.of(creates[-share:]), probe_ms=Percentiles.of(probes),
        wall_s=time.monotonic() - began,
    )  # fmt: skip


async def measure(arguments: argparse.Namespace) -> Held:
    with own_node(None, "--memory-overcommit", "1000") as own:
        async with barchan.connect_async(state_dir=own.state_dir) as client:
            return await hold(own, client, arguments.way, arguments.count)


def report(found: Held) -> str:
    rows = [
        ("alive", found.alive),
        ("stopped by", found.limit),
        ("memory, MiB in all", mib(found.memory_used_bytes)),
        ("memory, MiB each", mib(found.memory_each_bytes)),
        ("disk, MiB in all", mib(found.disk_used_bytes)),
        ("of it the pool", mib(found.pool_bytes)),
        ("wrong answers", found.wrong),
        ("lost", found.lost),
        ("create, first ones, p50 ms", ms(found.create_ms_first.p50)),
        ("create, last ones, p50 ms", ms(found.create_ms_last.p50)),
        ("probe, p50 and p99 ms", f"{ms(found.probe_ms.p50)} {ms(found.probe_ms.p99)}"),
        ("wall s", f"{found.wall_s:.0f}"),
    ]
    return table(f"idle Pythons, {found.way}", ("", ""), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--way", choices=WAYS, default="separate")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--zram-mib", type=int, default=65536, help="swap in compressed memory; 0: none is made")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    arguments = parser.parse_args()
    with zram(arguments.zram_mib if arguments.way == "separate" else 0):
        found = asyncio.run(measure(arguments))
    sys.stdout.write(report(found))
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
