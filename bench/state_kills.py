"""Kill the node at random moments of hibernations, forks and resumes: is anything lost, does anything leak?

    sudo python -m bench.state_kills --times 50 --seed 1 --out kills.json

A few sandboxes each hold a Python with a secret and append numbered lines to a file; a line counts when its write
was answered. Then one operation is begun, and the node gets SIGKILL after a random part of the time that it usually
takes. The next node of the same state directory must have every sandbox that was acknowledged, awake or asleep,
with its secret and all its lines, and nothing else: cgroups, writable layers, cuts, folders of half-made snapshots.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.errors import BarchanError
from bench.state_common import Repl, say
from scripts.own_node import OwnNode, own_node

OPERATIONS = ("hibernate", "fork fs", "fork memory", "resume")
PARENTS = 3
SERVER = """
import sys
secret = {secret}
print("ready", flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""
SETTLE_S = 20.0


class Kills(Struct, kw_only=True):
    """What was seen. Each loss and leak in words; `kills` and `finished_first` by operation."""

    seed: int
    kills: dict[str, int]
    finished_first: dict[str, int]
    losses: list[str]
    leaks: list[str]
    usual_ms: dict[str, float]


class Held:
    """One sandbox, and what was acknowledged of it."""

    def __init__(self, sandbox: barchan.AsyncSandbox, repl: Repl, secret: int) -> None:
        self.sandbox, self.repl, self.secret = sandbox, repl, secret
        self.lines = 0

    @classmethod
    async def begin(cls, client: barchan.AsyncClient, secret: int) -> "Held":
        # Detached: it shall outlive the connection that dies with the node.
        sandbox = await client.create("debian", memory_mib=128, disk_mib=128, detach=True, ttl_s=3600.0)
        return cls(sandbox, await Repl.start(sandbox, SERVER.format(secret=secret)), secret)

    async def write(self) -> None:
        (await self.sandbox.exec(f"echo {self.lines} >> lines")).check()
        self.lines += 1

    async def check(self, client: barchan.AsyncClient) -> str:
        """What is missing, or nothing."""
        here = Held(await client.attach(self.sandbox.id), self.repl, self.secret)
        here.repl = self.repl.of(here.sandbox)
        try:
            lines = (await here.sandbox.exec("cat lines 2>/dev/null; true")).check().text.split()
            if lines[: self.lines] != [str(number) for number in range(self.lines)]:
                return f"{self.sandbox.id} has {len(lines)} lines of {self.lines}"
            answer = await here.repl.ask("secret")
        except BarchanError as error:
            return f"{self.sandbox.id}: {type(error).__name__}: {error}"
        self.sandbox, self.repl, self.lines = here.sandbox, here.repl, len(lines)
        return "" if answer == str(self.secret) else f"{self.sandbox.id} says {answer}, not {self.secret}"


async def operate(held: Held, operation: str) -> list[barchan.AsyncSandbox]:
    if operation == "hibernate":
        await held.sandbox.hibernate()
    elif operation == "resume":
        await held.sandbox.resume()
    else:
        children = await held.sandbox.fork(2, kind=operation.partition(" ")[2])  # type: ignore[arg-type]
        return [child for child in children if isinstance(child, barchan.AsyncSandbox)]
    return []


async def usual_ms(client: barchan.AsyncClient) -> dict[str, float]:
    held, found = await Held.begin(client, 1), {}
    for operation in OPERATIONS:
        began = time.monotonic()
        children = await operate(held, operation)
        found[operation] = (time.monotonic() - began) * 1e3
        await asyncio.gather(*(child.kill() for child in children))
        if operation == "hibernate":
            await held.sandbox.resume()
            await held.sandbox.exec("true")
        if operation == "fork memory":
            await held.sandbox.hibernate()
    await held.sandbox.kill()
    return found


async def wait_settled(own: OwnNode, client: barchan.AsyncClient, known: set[str]) -> list[str]:
    """What is there beyond the known sandboxes, after a while in which it may go."""
    until = time.monotonic() + SETTLE_S
    while True:
        extra = {info.sandbox_id for info in await client.list()} - known
        groups = {
            path.name.removesuffix(".platform")
            for root in own.cgroup_dirs()
            for path in root.iterdir()
            if path.is_dir() and path.name.startswith("sb_")
        } - known
        folders = (
            {path.name for path in (own.state_dir / "memory").glob("*")}
            if (own.state_dir / "memory").is_dir()
            else set()
        )
        found = [
            f"{kind} {name}"
            for kind, names in (("sandbox", extra), ("cgroup", groups), ("folder", folders))
            for name in names
        ]
        if not found or time.monotonic() > until:
            return found
        await asyncio.sleep(0.25)


async def once(own: OwnNode, alive: list[Held], operation: str, after_s: float, found: Kills) -> None:
    async with barchan.connect_async(state_dir=own.state_dir) as client:
        held = random.choice(alive)
        held.sandbox = await client.attach(held.sandbox.id)
        for _ in range(3):
            await held.write()
        if operation == "resume":
            await held.sandbox.hibernate()
        task = asyncio.create_task(operate(held, operation))
        await asyncio.wait({task}, timeout=after_s)
        was_done = task.done() and task.exception() is None
        found.finished_first[operation] += was_done
        children = task.result() if was_done else []
        own.kill()
        found.kills[operation] += 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    own.start_again()
    async with barchan.connect_async(state_dir=own.state_dir) as client:
        ids = {info.sandbox_id for info in await client.list()}
        for child in children:
            if child.id not in ids:
                found.losses.append(f"{operation}: child {child.id}, acknowledged, is gone")
        for other in alive:
            if missing := await other.check(client):
                found.losses.append(f"{operation} after {after_s * 1e3:.0f} ms: {missing}")
        known = {item.sandbox.id for item in alive}
        for sandbox_id in ids - known:
            await (await client.attach(sandbox_id)).kill()
        leaked = await wait_settled(own, client, known)
        found.leaks += [f"{operation} after {after_s * 1e3:.0f} ms: {what}" for what in leaked]


async def measure(arguments: argparse.Namespace) -> Kills:
    random.seed(arguments.seed)
    found = Kills(
        seed=arguments.seed, kills=dict(Counter()), finished_first=dict(Counter()), losses=[], leaks=[], usual_ms={}
    )
    found.kills = dict.fromkeys(OPERATIONS, 0)
    found.finished_first = dict.fromkeys(OPERATIONS, 0)
    with own_node() as own:
        async with barchan.connect_async(state_dir=own.state_dir) as client:
            found.usual_ms = await usual_ms(client)
            alive = [await Held.begin(client, 1000 + number) for number in range(PARENTS)]
        for number in range(arguments.times):
            operation = OPERATIONS[number % len(OPERATIONS)]
            after_s = random.uniform(0, 1.1 * found.usual_ms[operation]) / 1e3
            say(f"{number + 1} of {arguments.times}: {operation}, killed after {after_s * 1e3:.0f} ms")
            await once(own, alive, operation, after_s, found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the findings as JSON")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments))
    text = msgspec.json.format(msgspec.json.encode(found)).decode() + "\n"
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
    return 1 if found.losses or found.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
