"""A steady mixed load on one node for an hour: does anything grow? `sudo make soak`, `sudo make soak DURATION=6`.

Short sandboxes with execs and files, kept ones with a stream, images of live sandboxes, clients that are killed, and
rollouts with their grading, all at fixed times, so that every minute is asked for the same. Two comparisons decide:

- under load, the medians of the window that starts a twelfth of the way in (minute 5 to 10 of an hour) against those
  of the last window of that length: memory, counts and exec latencies may be at most 10 % more;
- at rest, what is left when no sandbox and no client is there, before the first window and after the last: descriptors,
  threads, mounts, cgroups and the pool's disk may not be more.

Writes soak.json (all samples) and soak.svg (their course) to the folder of --out. Exit code 1 if something grew, or if
an operation failed.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from msgspec.structs import replace
from own_node import OwnNode, cgroup_count, descriptors_of, mounts_of, own_node, pool_bytes, status_of
from soak_report import Soak, judge, picture, table

import barchan
from barchan.errors import BarchanError
from barchan.model.sandbox import SandboxSpec
from barchan.sdk.aio.client import AsyncClient

WINDOWS = 12  # of a run; one before the first comparison, one for it, one at the end
SAMPLE_S = 5.0
REST_SAMPLES = 10
REST_S_MAX = 90.0
AT_ONCE_MAX = 16  # short sandboxes; beyond it the machine is too slow for the rate, which the report then says
PEAK = 64
KEPT = 6
KEPT_S = 60.0
ROLLOUTS = 16
TICKS = "while :; do echo tick; sleep 0.1; done"
SPEC = SandboxSpec(template="debian", memory_mib=256, disk_mib=64)


class Load:
    """The operations, at fixed times; what they took and how they ended goes to the soak's record."""

    def __init__(self, node: OwnNode, soak: Soak, rate: float, scratch: Path) -> None:
        self._node = node
        self._soak = soak
        self._rate = rate
        self._scratch = scratch
        self._runs = 0

    async def peak(self) -> None:
        """As many sandboxes at once as the load can come to, so that what the node keeps per place is all there."""
        async with barchan.connect_async(state_dir=self._node.state_dir) as client:
            async for sandbox in client.create_many(SPEC, n=PEAK):
                if isinstance(sandbox, BarchanError):
                    raise sandbox

    async def run(self, duration_s: float) -> None:
        """Load the node for so long; at the end nothing of it is left."""
        async with barchan.connect_async(state_dir=self._node.state_dir) as client:
            lanes = [
                self._every(1 / self._rate, AT_ONCE_MAX, lambda: self._short(client)),
                self._every(15.0, 1, lambda: self._images(client)),
                self._every(15.0, 1, self._victim),
                self._every(30.0, 1, self._rollouts),
                *(self._kept(client, KEPT_S * (1 + index / KEPT)) for index in range(KEPT)),
            ]
            tasks = [asyncio.ensure_future(lane) for lane in lanes]
            done, _ = await asyncio.wait(tasks, timeout=duration_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()

    async def _every(self, period_s: float, at_once_max: int, work: Callable[[], Awaitable[None]]) -> None:
        """Start the work at fixed times. One that is due while too many are under way is left out, and counted."""
        under_way: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        try:
            while True:
                due += period_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if len(under_way) >= at_once_max:
                    self._soak.late += 1
                    continue
                task = asyncio.ensure_future(self._told(work))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
        finally:
            await asyncio.gather(*under_way)  # each ends on its own, so that nothing is cut off halfway

    async def _told(self, work: Callable[[], Awaitable[None]]) -> None:
        """One operation; a failure is an event of the record, which decides, and never ends the load."""
        try:
            await work()
        except BarchanError as error:
            self._soak.failures.append(f"{work.__qualname__}: {type(error).__name__}: {error}"[:400])

    async def _exec(self, sandbox: barchan.AsyncSandbox, command: list[str]) -> bytes:
        began = time.monotonic()
        result = (await sandbox.exec(command)).check()
        self._soak.execs.append((round(began - self._soak.began, 3), round((time.monotonic() - began) * 1e3, 3)))
        return result.stdout

    async def _short(self, client: AsyncClient) -> None:
        async with await client.create(SPEC) as sandbox:
            await self._exec(sandbox, ["true"])
            data = b"%d" % time.monotonic_ns() * 1000
            await sandbox.files.write("/tmp/data", data)
            self._expect("a file comes back as it was", await self._exec(sandbox, ["cat", "/tmp/data"]) == data)
            await self._exec(sandbox, ["sh", "-c", "exit 0"])
            self._expect("a file is read as it is", await sandbox.files.read("/tmp/data") == data)
        self._soak.done["short"] += 1

    async def _images(self, client: AsyncClient) -> None:
        async with await client.create(SPEC) as sandbox:
            await sandbox.files.write("/tmp/mark", b"sibling")
            image = await sandbox.snapshot()
            try:
                async with await client.create(replace(SPEC, template=image.name)) as sibling:
                    self._expect(
                        "a sibling has the files", await self._exec(sibling, ["cat", "/tmp/mark"]) == b"sibling"
                    )
            finally:
                await client.remove_image(image.name)
        self._soak.done["image"] += 1

    async def _kept(self, client: AsyncClient, first_s: float) -> None:
        """Sandboxes that live long, one after the other, each with a stream that is read all the time."""
        kept_s = first_s  # so that they don't all change at once
        while True:
            await self._told(lambda kept_s=kept_s: self._keep(client, kept_s))  # type: ignore[misc]
            kept_s = KEPT_S

    async def _keep(self, client: AsyncClient, kept_s: float) -> None:
        async with await client.create(SPEC) as sandbox:
            process = await sandbox.start(["sh", "-c", TICKS])
            read = 0
            try:
                async with asyncio.timeout(kept_s):
                    async for _, _, data in process.output():
                        read += len(data)
            except TimeoutError:
                pass  # its time is over
            self._expect("a stream flows", read > 0)
        self._soak.done["kept"] += 1

    async def _victim(self) -> None:
        """A client that is killed while it holds two sandboxes and a stream."""
        command = [sys.executable, __file__, "--victim", str(self._node.state_dir)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            self._expect("a client gets ready", await process.stdout.readline() == b"ready\n")
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        self._soak.done["killed client"] += 1

    async def _rollouts(self) -> None:
        self._runs += 1
        out = self._scratch / f"run-{self._runs}"
        command = [sys.executable, "-m", "barchan.cli", "rollout", "humaneval", "--policy", "oracle"]
        options = ["--limit", str(ROLLOUTS), "--state-dir", str(self._node.state_dir), "--out", str(out)]
        process = await asyncio.create_subprocess_exec(
            *command, *options, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            _, said = await process.communicate()
        except asyncio.CancelledError:
            process.terminate()
            await process.wait()
            raise
        if process.returncode != 0:
            self._soak.failures.append(f"rollouts: {said.decode('utf-8', 'replace')[-400:]}")
            return
        summary = json.loads((out / "summary.json").read_bytes())
        self._expect("oracles score 1", summary["reward_mean"] == 1.0 and summary["void"] == 0)
        self._soak.done["rollout"] += ROLLOUTS

    def _expect(self, what: str, held: bool) -> None:
        if not held:
            self._soak.failures.append(f"not held: {what}")


def sample(node: OwnNode, t_s: float, images: Path) -> dict[str, float]:
    """What node and kernel hold now."""
    supervisor, files = node.supervisor_pid, node.state_dir
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {
        "t_s": round(t_s, 3),
        "node_rss_mib": status_of(node.pid, "VmRSS") / 1024,
        "node_descriptors": descriptors_of(node.pid),
        "node_threads": status_of(node.pid, "Threads"),
        "node_mounts": mounts_of(node.pid),
        "supervisor_rss_mib": status_of(supervisor, "VmRSS") / 1024,
        "supervisor_descriptors": descriptors_of(supervisor),
        "supervisor_mounts": mounts_of(supervisor),
        "cgroups": cgroup_count(node),
        "pool_mib": pool_bytes(node) / 2**20,
        "journal_mib": sum(path.stat().st_size for path in files.glob("journal.sqlite*")) / 2**20,
        "image_files": sum(1 for path in images.rglob("*") if path.is_file()),
        "slab_unreclaimable_mib": int(meminfo["SUnreclaim"].split()[0]) / 1024,
    }


@contextlib.asynccontextmanager
async def sampling(node: OwnNode, soak: Soak) -> AsyncIterator[None]:
    """Sample every few seconds, beside the event loop."""

    async def go_on() -> None:
        while True:
            t_s = time.monotonic() - soak.began
            soak.samples.append(await asyncio.to_thread(sample, node, t_s, node.state_dir / "images"))
            await asyncio.sleep(SAMPLE_S)

    task = asyncio.ensure_future(go_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def at_rest(node: OwnNode, soak: Soak) -> dict[str, float]:
    """The least of each number once no sandbox and no lease is left: what comes and goes does not count."""
    deadline = time.monotonic() + REST_S_MAX
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        while (info := await client.node_info()).sandboxes_running or info.leases:
            if time.monotonic() > deadline:
                soak.failures.append(f"{info.sandboxes_running} sandboxes and {info.leases} leases stay at rest")
                break
            await asyncio.sleep(0.5)
    least: dict[str, float] = {}
    for _ in range(REST_SAMPLES):
        await asyncio.sleep(1.0)
        found = await asyncio.to_thread(sample, node, time.monotonic() - soak.began, node.state_dir / "images")
        least = {name: min(value, least.get(name, value)) for name, value in found.items()}
    return least


async def victim(state_dir: Path) -> None:
    """What the killed client does: hold two sandboxes, read a stream."""
    async with barchan.connect_async(state_dir=state_dir) as client:
        sandboxes = [await client.create(SPEC) for _ in range(2)]
        process = await sandboxes[0].start(["sh", "-c", TICKS])
        is_ready = False
        async for _ in process.output():
            if not is_ready:
                print("ready", flush=True)
                is_ready = True


async def soak_node(node: OwnNode, duration_s: float, rate: float) -> Soak:
    soak = Soak(duration_s=duration_s, window_s=duration_s / WINDOWS, began=time.monotonic(), done=Counter())
    load = Load(node, soak, rate, node.state_dir)
    await load.peak()
    await load.run(soak.window_s)
    soak.rest_before = await at_rest(node, soak)
    soak.began, soak.execs = time.monotonic() - soak.window_s, []  # the rest is no part of the run's time
    soak.done.clear()
    async with sampling(node, soak):
        await load.run(duration_s - soak.window_s)
    soak.rest_after = await at_rest(node, soak)
    return soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: an hour)")
    parser.add_argument("--rate", type=float, default=5.0, help="short sandboxes per second (default: 5)")
    parser.add_argument("--out", type=Path, help="a folder for the report (default: runs/soak-DATE)")
    parser.add_argument("--victim", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.victim is not None:
        asyncio.run(victim(asked.victim))
        return 0
    out = asked.out or Path("runs", f"soak-{time.strftime('%Y%m%d-%H%M%S')}")
    out.mkdir(parents=True, exist_ok=True)
    with own_node() as node:
        soak = asyncio.run(soak_node(node, asked.minutes * 60, asked.rate))
    rows = judge(soak)
    (out / "soak.json").write_text(json.dumps(soak.as_dict(rows), indent=1) + "\n")
    (out / "soak.svg").write_text(picture(soak))
    print(table(soak, rows))
    print(f"{out}/soak.json, {out}/soak.svg")
    return 0 if not soak.failures and all(row.is_held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
