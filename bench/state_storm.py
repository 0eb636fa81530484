"""A preempted job: all of its sandboxes are asked to pause, hibernate and resume at once.

    sudo python -m bench.state_storm --count 1000 --out storm.json

Each sandbox comes from `create()` and has a Python of its own, which has imported modules of its library and holds a
number that only it knows. Then all are asked to go to one tier after another, by one request each time. Meanwhile one
client asks the node of a sandbox, over and over, and runs a program in a sandbox that is not of the job; during the
resume from disk another asks some sleeping sandboxes for their number: those must come before the rest. At the end
every sandbox is asked for its number.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.bench.statistics import Percentiles
from barchan.errors import BarchanError
from barchan.model.tiers import TierChange, Waiting
from bench.state_common import IMPORTS, Repl, gathered, ms, say, table, timed_ms
from scripts.own_node import OwnNode, cpu_s_of, own_node

SERVER = (
    "import sys, {imports}\nsecret = {number} * 7919 + 1\nprint('ready', flush=True)\n"
    "for line in sys.stdin: print(repr(eval(line)), flush=True)"
)
LOOK_S = 0.02
AT_ONCE = 4
WANTED = 20  # sleeping ones that a client asks something during the resume
Item = tuple[int, barchan.AsyncSandbox, Repl]


class Storm(Struct, frozen=True, kw_only=True):
    """All of them to one tier.

    Attributes:
        wall_s: To the last one's record; `first_s` and `half_s` to those of the first one and of half of them.
        refused: That are not where they were asked to be.
        info_ms, exec_ms: The node's answers meanwhile, and a program's in a sandbox that is not of the job.
        wanted_ms: Of those that a client asked something while all came back: to the answer.
        wanted_passed: How many others, at the median, were told of between the question and the answer.
        node_cpu_s: The node's own processor time.
    """

    tier: str
    count: int
    first_s: float
    half_s: float
    wall_s: float
    refused: int
    info_ms: Percentiles
    exec_ms: Percentiles
    node_cpu_s: float
    wanted_ms: Percentiles | None = None
    wanted_passed: int = 0


class Found(Struct, frozen=True, kw_only=True):
    """`wrong`, `lost`: of all sandboxes, asked at the end."""

    before: dict[str, Percentiles]
    storms: list[Storm]
    wrong: int
    lost: int


async def begin(client: barchan.AsyncClient, number: int) -> Item:
    sandbox = await client.create(
        "debian", memory_mib=128, disk_mib=64, labels={"job": "storm"}, waiting=Waiting(pause=False)
    )
    repl = await Repl.start(sandbox, SERVER.format(number=number, imports=", ".join(IMPORTS[:4])))
    return number, sandbox, repl


class Observer:
    """Asks the node the same small things over and over, and keeps how long that took."""

    def __init__(self, client: barchan.AsyncClient, beside: barchan.AsyncSandbox, one: barchan.AsyncSandbox) -> None:
        self._client, self._beside, self._one = client, beside, one
        self.info_ms: list[float] = []
        self.exec_ms: list[float] = []

    async def look(self) -> None:
        while True:
            self.info_ms.append(await timed_ms(self._one.info()))
            self.exec_ms.append(await timed_ms(self._beside.exec(["/bin/true"])))
            await asyncio.sleep(LOOK_S)

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncGenerator[None, None]:
        task = asyncio.create_task(self.look())
        try:
            yield
            while not self.exec_ms:  # noqa: ASYNC110 (a short storm is over before the first answer)
                await asyncio.sleep(LOOK_S)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class Progress:
    """When each record came, and how many so far."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.began = time.monotonic()
        self.at_s: list[float] = []
        self.refused: list[TierChange] = []

    def __call__(self, change: TierChange) -> None:
        self.at_s.append(time.monotonic() - self.began)
        if change.refused:
            self.refused.append(change)
        if len(self.at_s) % max(1, self.count // 4) == 0:
            say(f"  {len(self.at_s)} of {self.count} after {self.at_s[-1]:.1f} s")


async def wanted(items: Sequence[Item], progress: Progress) -> tuple[list[float], list[int], int]:
    """Ask some of them, spread over the first half of the storm; how long each answer took, how many others were told
    of meanwhile, and how many answers were wrong.
    """
    took, passed, wrong = [], [], 0
    for number, sandbox, repl in random.Random(7).sample(list(items), min(WANTED, len(items))):
        if (await sandbox.info()).phase != "hibernated" or len(progress.at_s) > len(items) * 3 // 4:
            continue
        before, asked = len(progress.at_s), time.monotonic()
        wrong += await repl.ask("secret") != str(number * 7919 + 1)
        took.append((time.monotonic() - asked) * 1e3)
        passed.append(len(progress.at_s) - before)
    return took, passed, wrong


async def storm(
    own: OwnNode, client: barchan.AsyncClient, tier: str, items: Sequence[Item], observer: Observer
) -> tuple[Storm, int]:
    """Bring all of them to a tier; and how many answers were wrong on the way."""
    say(tier)
    ask = {"paused": client.pause_many, "hibernated": client.hibernate_many, "running": client.resume_many}[tier]
    progress, cpu_s = Progress(len(items)), cpu_s_of(own.pid)
    observer.info_ms, observer.exec_ms = [], []
    was_on_disk = (await items[0][1].info()).phase == "hibernated"
    took: list[float] = []
    passed: list[int] = []
    wrong = 0
    async with observer.looking():
        following = asyncio.create_task(ask(labels={"job": "storm"}, progress=progress))
        if tier == "running" and was_on_disk:
            took, passed, wrong = await wanted(items, progress)
        await following
    for change in progress.refused[:3]:
        say(f"  {change.sandbox_id}: {change.refused}")
    return Storm(
        tier=f"{tier} from disk" if tier == "running" and was_on_disk else tier,
        count=len(progress.at_s),
        first_s=progress.at_s[0],
        half_s=progress.at_s[len(progress.at_s) // 2],
        wall_s=progress.at_s[-1],
        refused=len(progress.refused),
        info_ms=Percentiles.of(observer.info_ms),
        exec_ms=Percentiles.of(observer.exec_ms),
        node_cpu_s=cpu_s_of(own.pid) - cpu_s,
        wanted_ms=Percentiles.of(took) if took else None,
        wanted_passed=sorted(passed)[len(passed) // 2] if passed else 0,
    ), wrong


async def measure(count: int) -> Found:
    with own_node(None, "--memory-overcommit", "1000") as own:
        async with barchan.connect_async(state_dir=own.state_dir) as client:
            beside = await client.create("debian", waiting=Waiting(pause=False))
            items: list[Item] = []

            async def one(number: int) -> float:
                items.append(await begin(client, number))
                if len(items) % max(1, count // 4) == 0:
                    say(f"{len(items)} of {count} made")
                return 0.0

            await gathered(count, one, AT_ONCE)
            observer = Observer(client, beside, items[0][1])
            async with observer.looking():
                await asyncio.sleep(3)
            before = {"info": Percentiles.of(observer.info_ms), "exec": Percentiles.of(observer.exec_ms)}
            storms, wrong, lost = [], 0, 0
            for tier in ("paused", "running", "hibernated", "running"):
                found, wrong_now = await storm(own, client, tier, items, observer)
                storms.append(found)
                wrong += wrong_now
            say("asking all")

            async def probe(index: int) -> float:
                nonlocal wrong, lost
                number, sandbox, repl = items[index]
                try:
                    wrong += await repl.ask("secret") != str(number * 7919 + 1)
                except BarchanError as error:
                    say(f"{sandbox.id}: {error}")
                    lost += 1
                return 0.0

            await gathered(len(items), probe, AT_ONCE)
    return Found(before=before, storms=storms, wrong=wrong, lost=lost)


def report(found: Found) -> str:
    rows: list[tuple[object, ...]] = [("before", *[""] * 5, *_pair(found.before["info"], found.before["exec"]), "")]
    rows += [
        (
            item.tier, item.count, item.refused, f"{item.first_s:.2f}", f"{item.half_s:.1f}", f"{item.wall_s:.1f}",
            *_pair(item.info_ms, item.exec_ms), f"{item.node_cpu_s:.1f}",
        )
        for item in found.storms
    ]  # fmt: skip
    columns = (
        "to",
        "told",
        "refused",
        "first s",
        "half s",
        "all s",
        "info p50, p99 ms",
        "exec p50, p99 ms",
        "node CPU s",
    )
    text = table("storms", columns, rows)
    for item in found.storms:
        if item.wanted_ms is not None:
            text += (
                f"asked meanwhile, to the answer: p50 {ms(item.wanted_ms.p50)}, p99 {ms(item.wanted_ms.p99)} ms; "
                f"{item.wanted_passed} others came before it, at the median\n"
            )
    return text + f"wrong answers {found.wrong}, lost {found.lost}\n"


def _pair(*items: Percentiles) -> list[str]:
    return [f"{ms(item.p50)} {ms(item.p99)}" for item in items]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.count))
    sys.stdout.write(report(found))
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 1 if found.wrong or found.lost else 0


if __name__ == "__main__":
    sys.exit(main())
