"""A warm create against `crun run`, and a burst of claims larger than the pool.

    sudo python -m bench.state_claim --count 200 --burst 1000 --pool 200 --out claim.json

Both start the same static program, whose first instruction reads the clock: the time is from before the request
until then. In the burst every create is asked for at once; each sandbox then says what it finds in its file system
and among its processes, so that one that was used before, or handed out twice, is seen.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.bench import peers
from barchan.bench.ground import prepare
from barchan.bench.launcher import SPEC
from barchan.bench.statistics import Percentiles
from bench.state_common import ms, say, table

ROUNDS = 5


class Claims(Struct, frozen=True, kw_only=True):
    """Milliseconds. `dirty`: sandboxes of the burst that were not new; `shared`: ids or uid ranges handed out twice."""

    warm_ms: Percentiles
    warm_node_ms: Percentiles
    cold_ms: Percentiles
    crun_ms: Percentiles
    burst: int
    pool: int
    burst_ms: Percentiles
    burst_s: float
    burst_warm: int
    dirty: int
    shared: int

    @property
    def ratio(self) -> float:
        return self.crun_ms.p50 / self.warm_ms.p50


async def first_instruction_ms(client: barchan.AsyncClient) -> tuple[float, float]:
    """From the request for a sandbox to the first instruction of a program in it, and the node's part of the create."""
    began_ns = time.monotonic_ns()
    sandbox = await client.create(SPEC)
    result = await sandbox.exec(["/payload"])
    took_ms = (int(result.check().text.split()[-1]) - began_ns) / 1e6
    info = await sandbox.info()
    await sandbox.kill()
    return took_ms, info.create_ms


async def wait_for_pool(client: barchan.AsyncClient, count: int) -> None:
    while (await client.pool()).ready < count:  # noqa: ASYNC110 (nothing tells of it)
        await asyncio.sleep(0.02)


async def rounds(client: barchan.AsyncClient, count: int, pool: int) -> list[tuple[float, float]]:
    await client.set_pool(pool)
    await wait_for_pool(client, pool)
    found = []
    for _ in range(count):
        if pool:
            await wait_for_pool(client, 1)
        found.append(await first_instruction_ms(client))
    return found


async def burst(client: barchan.AsyncClient, count: int, pool: int) -> tuple[list[float], float, int, int, int]:
    await client.set_pool(pool)
    await wait_for_pool(client, pool)
    before = await client.pool()
    sandboxes: list[barchan.AsyncSandbox] = []
    turns = asyncio.Semaphore(256)  # connections of one client

    async def one() -> float:
        async with turns:
            began = time.monotonic()
            sandbox = await client.create("debian", memory_mib=64, disk_mib=64)
            took = (time.monotonic() - began) * 1e3
            sandboxes.append(sandbox)
            return took

    began = time.monotonic()
    took = list(await asyncio.gather(*(one() for _ in range(count))))
    took_s = time.monotonic() - began
    warm = (await client.pool()).claimed_total - before.claimed_total
    dirty, marks = 0, set()

    async def look(sandbox: barchan.AsyncSandbox) -> None:
        nonlocal dirty
        async with turns:
            script = (
                "ls -A /tmp /dev/shm; ls /proc | grep -c '^[0-9]'; echo x > /tmp/mark; cut -d' ' -f1 /proc/self/uid_map"
            )
            found = (await sandbox.exec(f"cat /proc/self/uid_map; {script}")).check().text
            marks.add((sandbox.id, found.split()[1]))
            dirty += "mark" in found

    await asyncio.gather(*(look(sandbox) for sandbox in sandboxes))
    shared = 2 * count - len({mark[0] for mark in marks}) - len({mark[1] for mark in marks})
    await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes))
    return took, took_s, warm, dirty, shared


def measure(arguments: argparse.Namespace) -> Claims:
    with prepare(Path(__file__).parent / "bare") as ground:

        async def ours() -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
            async with barchan.connect_async(state_dir=ground.state_dir) as client:
                share = max(2, arguments.count // ROUNDS)
                return await rounds(client, share, 16), await rounds(client, share, 0)

        warm: list[tuple[float, float]] = []
        cold: list[tuple[float, float]] = []
        crun: list[float] = []
        for turn in range(ROUNDS):  # in turns, so that a slow spell of the machine meets all of them
            say(f"round {turn + 1} of {ROUNDS}")
            one_warm, one_cold = asyncio.run(ours())
            warm, cold = warm + one_warm, cold + one_cold
            crun += peers.oci("crun", ground, max(5, arguments.count // ROUNDS // 2)).create_ms
    say(f"a burst of {arguments.burst}")

    async def many() -> tuple[list[float], float, int, int, int]:
        async with barchan.connect_async() as client:
            return await burst(client, arguments.burst, arguments.pool)

    took, took_s, of_pool, dirty, shared = asyncio.run(many())
    return Claims(
        warm_ms=Percentiles.of([item[0] for item in warm]),
        warm_node_ms=Percentiles.of([item[1] for item in warm]),
        cold_ms=Percentiles.of([item[0] for item in cold]),
        crun_ms=Percentiles.of(crun),
        burst=arguments.burst,
        pool=arguments.pool,
        burst_ms=Percentiles.of(took),
        burst_s=took_s,
        burst_warm=of_pool,
        dirty=dirty,
        shared=shared,
    )


def report(found: Claims) -> str:
    rows = [
        (what, ms(item.p50), ms(item.p95), ms(item.p99))
        for what, item in (
            ("warm create to first instruction", found.warm_ms),
            ("  of it the node's create", found.warm_node_ms),
            ("cold create to first instruction", found.cold_ms),
            ("crun run", found.crun_ms),
            (f"each of {found.burst} creates at once, pool of {found.pool}", found.burst_ms),
        )
    ]
    tail = (
        f"crun run over a warm create: {found.ratio:.2f}\n"
        f"burst: {found.burst_s:.2f} s in all, {found.burst_warm} from the pool, {found.dirty} dirty, "
        f"{found.shared} handed out twice\n"
    )
    return table("claims", ("", "p50 ms", "p95 ms", "p99 ms"), rows) + tail


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--burst", type=int, default=1000)
    parser.add_argument("--pool", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    arguments = parser.parse_args()
    found = measure(arguments)
    sys.stdout.write(report(found))
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
