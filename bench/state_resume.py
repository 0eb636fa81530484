"""What it takes a sleeping sandbox to answer, tier by tier, and what its sleep gives back.

    sudo python -m bench.state_resume --mib 30 300 --count 20 --out resume.json

In each sandbox a Python has parsed its own library's sources until it holds as much as asked for. It is put to
sleep, and then asked for a value by an ordinary request: the time is from the request to the answer of that same
process. Paged out means: to swap, which the host must have (`--zram-mib` makes a compressed one in memory, and
removes it at the end).
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.bench.statistics import Percentiles
from bench.state_common import Repl, heap_program, memory_bytes, mib, ms, pids_of, run_quietly, say, table, timed_ms
from scripts.own_node import own_node

TIERS = ("awake", "paused", "paged_out", "hibernated")


class Tier(Struct, frozen=True, kw_only=True):
    """One tier for one size. Milliseconds to the answer and to fall asleep; bytes that a sandbox's sleep gave back."""

    heap_mib: int
    tier: str
    answer_ms: Percentiles
    down_ms: Percentiles
    freed_bytes: int


def zram_bytes() -> int:
    """That compressed memory takes on this host now."""
    return sum(int(path.read_text().split()[2]) for path in Path("/sys/block").glob("zram*/mm_stat"))


@contextlib.contextmanager
def zram(size_mib: int) -> Iterator[None]:
    """Swap in compressed memory for the time of a benchmark."""
    if not size_mib:
        yield
        return
    control = Path("/sys/class/zram-control")
    number = int((control / "hot_add").read_text())
    try:
        Path(f"/sys/block/zram{number}/comp_algorithm").write_text("lzo-rle")  # smaller than lz4
        Path(f"/sys/block/zram{number}/disksize").write_text(f"{size_mib}M")
        run_quietly("mkswap", f"/dev/zram{number}")
        run_quietly("swapon", "--discard", f"/dev/zram{number}")
        yield
    finally:
        run_quietly("swapoff", f"/dev/zram{number}")
        (control / "hot_remove").write_text(str(number))


async def measure_tier(client: barchan.AsyncClient, group: str, heap_mib: int, tier: str, count: int) -> Tier:
    answers, downs, freed = [], [], 0
    async with await client.create("debian", memory_mib=heap_mib * 2 + 256, disk_mib=256) as sandbox:
        repl = await Repl.start(sandbox, heap_program(heap_mib))
        expected = await repl.ask("digest()")
        for number in range(count):
            before = memory_bytes(pids_of(group, sandbox.id))["rss"]
            downs.append(await timed_ms(go_down(sandbox, tier)))
            if number == 0:
                freed = before - memory_bytes(pids_of(group, sandbox.id))["rss"]
            answers.append(await timed_ms(repl.ask(f"len(trees) + {number}")))
            if number % 5 == 0 and await repl.ask("digest()") != expected:
                raise SystemExit(f"{tier}: the process does not have what it had")
    return Tier(
        heap_mib=heap_mib,
        tier=tier,
        answer_ms=Percentiles.of(answers),
        down_ms=Percentiles.of(downs),
        freed_bytes=freed,
    )


async def go_down(sandbox: barchan.AsyncSandbox, tier: str) -> None:
    if tier == "paused":
        await sandbox.pause()
    elif tier == "paged_out":
        await sandbox.page_out()
    elif tier == "hibernated":
        await sandbox.hibernate()


async def measure(arguments: argparse.Namespace) -> list[Tier]:
    found = []
    with own_node() as own:
        async with barchan.connect_async(state_dir=own.state_dir) as client:
            for heap_mib in arguments.mib:
                for tier in TIERS:
                    say(f"{heap_mib} MiB, {tier}")
                    found.append(await measure_tier(client, own.cgroup, heap_mib, tier, arguments.count))
    return found


def report(found: list[Tier]) -> str:
    rows = [
        (
            f"{item.heap_mib} MiB {item.tier.replace('_', ' ')}",
            ms(item.answer_ms.p50),
            ms(item.answer_ms.p99),
            ms(item.down_ms.p50),
            mib(item.freed_bytes),
        )
        for item in found
    ]
    return table("request to answer", ("a Python of", "p50 ms", "p99 ms", "to sleep, p50 ms", "freed MiB"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[30, 300], help="sizes of the Python")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--zram-mib", type=int, default=4096, help="0: the host has swap of its own")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    arguments = parser.parse_args()
    with zram(arguments.zram_mib):
        found = asyncio.run(measure(arguments))
    sys.stdout.write(report(found))
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
