"""How many idle Python sandboxes this machine holds, and whether each of them still answers.

    sudo python -m bench.state_density --way separate --count 2000 --out density.json

Every sandbox comes from `create()` and has a Python that has imported and parsed modules of its own library until it
holds 30 MiB, and waits for its next line. `separate`: each started for itself, then paused and paged out. `zygote`:
forked from a warm interpreter. `hibernated`: each created of one memory snapshot of such a sandbox, told what only it
is to know, and put on disk. At the end each is asked for what only it knows, and must give it; one from disk is ended
then. Stops early when memory or disk run short, and says which. Creates are timed with nothing else at work, first
beside ten sandboxes, then beside all.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

import barchan
from barchan.bench.statistics import Percentiles
from barchan.errors import BarchanError, CapacityError
from barchan.model.tiers import Waiting
from bench.state_common import IMPORTS, REPL, Repl, heap_program, memory_available_bytes, mib, ms, say, table
from bench.state_resume import zram
from scripts.own_node import OwnNode, descriptors_of, own_node, pool_bytes, status_of

WAYS = ("separate", "zygote", "hibernated")
FLOOR_BYTES = 1 << 30
SECRET = "secret = {number} * 7919 + 1"
SERVER = "import sys\n{secret}\nprint('ready', flush=True)\nfor line in sys.stdin: print(repr(eval(line)), flush=True)"
PROBES_AT_ONCE = 4
FEW = 10
CREATES = 40
SETTLE_S = 2.0
STALLED_MAX = 1.0  # per cent of ten seconds that all programs waited for memory; a node refuses beyond 25
STALLED_S_MAX = 120
REFUSED_S_MAX = 60.0
T = TypeVar("T")


class Held(Struct, frozen=True, kw_only=True):
    """What one way came to.

    Attributes:
        limit: What ran short, or that nothing did.
        create_ms_few, create_ms_all: One create after the other, beside ten sandboxes and beside all.
        node_bytes_each: By how much the node's process has grown for each sandbox.
        node_descriptors, node_threads: That it has with all of them.
        filled_s: Until all were there; `wall_s`: and until all were asked.
    """

    way: str
    alive: int
    limit: str
    memory_used_bytes: int
    memory_each_bytes: int
    disk_used_bytes: int
    pool_bytes: int
    wrong: int
    lost: int
    create_ms_few: Percentiles
    create_ms_all: Percentiles
    probe_ms: Percentiles
    node_bytes_each: int
    node_descriptors: int
    node_threads: int
    filled_s: float
    wall_s: float


def shortage(own: OwnNode) -> str:
    if memory_available_bytes() < FLOOR_BYTES:
        return "memory"
    return "disk" if shutil.disk_usage(own.state_dir).free < 4 * FLOOR_BYTES else ""


def files_bytes(folder: Path) -> int:
    """What the files below a folder take on the disk; the pool's is not among them, for it has no name."""
    found = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it went while we looked
                found += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return found


async def at_rest() -> None:
    """Wait until what was done has settled: the memory of all that were put away is still on its way for a while."""
    await asyncio.sleep(SETTLE_S)
    for _ in range(STALLED_S_MAX):
        if stalled() <= STALLED_MAX:
            break
        await asyncio.sleep(1)


def stalled() -> float:
    line = next(line for line in Path("/proc/pressure/memory").read_text().splitlines() if line.startswith("full"))
    return float(line.split()[1].removeprefix("avg10="))


async def patiently(begin: Callable[[], Awaitable[T]]) -> T:
    """Come again when the node says so, as a run does: it refuses while what was put away is still on its way."""
    until = time.monotonic() + REFUSED_S_MAX
    while True:
        try:
            return await begin()
        except CapacityError as error:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(error.retry_after_s)


class Maker:
    """Makes sandboxes of one way, each with what only it knows."""

    def __init__(self, client: barchan.AsyncClient, way: str) -> None:
        self._client, self._way = client, way
        self.template: Any = client.zygote("debian", imports=IMPORTS) if way == "zygote" else "debian"
        self._read = 0  # of the output of what the snapshot was made of

    async def prepare(self) -> None:
        """What all are made of: for those that go to disk, a snapshot with the Python in it."""
        if self._way != "hibernated":
            return
        async with await self.create() as parent:
            await Repl.start(parent, heap_program(30))
            self._read = len("ready\n")
            self.template = await parent.snapshot(kind="memory")

    async def create(self) -> barchan.AsyncSandbox:
        return await self._client.create(self.template, memory_mib=128, disk_mib=64, waiting=Waiting(pause=False))

    async def begin(self, number: int) -> tuple[barchan.AsyncSandbox, Repl]:
        sandbox = await patiently(self.create)
        secret = SECRET.format(number=number)
        if self._way == "zygote":
            process = await sandbox.start_python(SERVER.format(secret=secret), process_id=REPL)
            repl = Repl(process)
            await repl.ready()
        elif self._way == "hibernated":
            repl = Repl(sandbox.process(REPL), self._read)
            await repl.ask(f"globals().update(secret={number} * 7919 + 1)")
        else:
            repl = await Repl.start(sandbox, heap_program(30).replace('print("ready"', secret + '\nprint("ready"', 1))
        await patiently(lambda: self.down(sandbox))
        return sandbox, repl

    async def down(self, sandbox: barchan.AsyncSandbox) -> None:
        if self._way == "separate":
            await sandbox.page_out()
        elif self._way == "hibernated":
            await sandbox.hibernate()

    async def creates_ms(self) -> Percentiles:
        """One after the other, nothing else at work."""
        await at_rest()
        found = []
        for _ in range(CREATES):
            began = time.monotonic()
            sandbox = await self.create()
            found.append((time.monotonic() - began) * 1e3)
            await sandbox.kill()
            await asyncio.sleep(0.02)  # for the next slot to be filled
        return Percentiles.of(found)


async def hold(own: OwnNode, client: barchan.AsyncClient, way: str, count: int) -> Held:
    maker = Maker(client, way)
    await maker.prepare()
    memory, disk, began = memory_available_bytes(), files_bytes(own.state_dir), time.monotonic()
    alive: list[tuple[int, barchan.AsyncSandbox, Repl]] = []
    limit, todo = "none", iter(range(count))

    async def worker(until: int) -> None:
        nonlocal limit
        while limit == "none" and len(alive) < until and (number := next(todo, None)) is not None:
            if short := shortage(own):
                limit = short
                return
            try:
                alive.append((number, *await maker.begin(number)))
            except BarchanError as error:
                limit = f"{type(error).__name__}: {error}"
                return
            if len(alive) % 100 == 0:
                say(f"{way}: {len(alive)}, {mib(memory_available_bytes())} MiB available")

    await worker(FEW)
    few, node_bytes = await maker.creates_ms(), status_of(own.pid, "VmRSS") << 10
    await asyncio.gather(worker(count), worker(count))
    filled_s, node_grown = time.monotonic() - began, (status_of(own.pid, "VmRSS") << 10) - node_bytes
    used, of_pool, wrong, lost = memory - memory_available_bytes(), pool_bytes(own), 0, 0
    disk_used = files_bytes(own.state_dir) - disk + of_pool
    of_all = await maker.creates_ms()
    descriptors, threads = descriptors_of(own.pid), status_of(own.pid, "Threads")
    probes: list[float] = []
    turns = asyncio.Semaphore(PROBES_AT_ONCE)

    async def probe(number: int, sandbox: barchan.AsyncSandbox, repl: Repl) -> None:
        nonlocal wrong, lost
        async with turns:
            asked = time.monotonic()
            try:
                wrong += await repl.ask("secret") != str(number * 7919 + 1)
                probes.append((time.monotonic() - asked) * 1e3)
                await (sandbox.kill() if way == "hibernated" else maker.down(sandbox))
            except BarchanError as error:
                say(f"{sandbox.id}: {error}")
                lost += 1

    say(f"{way}: asking all {len(alive)}")
    await asyncio.gather(*(probe(*item) for item in alive))
    return Held(
        way=way, alive=len(alive), limit=limit, memory_used_bytes=used,
        memory_each_bytes=used // max(1, len(alive)),
        disk_used_bytes=disk_used, pool_bytes=of_pool, wrong=wrong, lost=lost,
        create_ms_few=few, create_ms_all=of_all, probe_ms=Percentiles.of(probes),
        node_bytes_each=node_grown // max(1, len(alive) - FEW), node_descriptors=descriptors, node_threads=threads,
        filled_s=filled_s, wall_s=time.monotonic() - began,
    )  # fmt: skip


async def measure(arguments: argparse.Namespace) -> None:
    """Measure and tell, before the node is told to end: with so many, that is not sure to go well."""
    with own_node(None, "--memory-overcommit", "1000") as own:
        async with barchan.connect_async(state_dir=own.state_dir) as client:
            found = await hold(own, client, arguments.way, arguments.count)
            sys.stdout.write(report(found))
            sys.stdout.flush()
            if arguments.out is not None:
                arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
            began = time.monotonic()
        say(f"{arguments.way}: the lease ended in {time.monotonic() - began:.1f} s")
    say(f"{arguments.way}: all was gone {time.monotonic() - began:.1f} s after the first was told to end")


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
        ("a create beside ten, p50 ms", ms(found.create_ms_few.p50)),
        ("a create beside all, p50 ms", ms(found.create_ms_all.p50)),
        ("node, KiB each", f"{found.node_bytes_each / 1024:.1f}"),
        ("node, descriptors and threads", f"{found.node_descriptors} {found.node_threads}"),
        ("probe, p50 and p99 ms", f"{ms(found.probe_ms.p50)} {ms(found.probe_ms.p99)}"),
        ("until all were there, s", f"{found.filled_s:.0f}"),
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
        asyncio.run(measure(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
