"""Kill the node at random moments of hibernations, forks and resumes: is anything lost, does anything leak?

    sudo python -m bench.state_kills --times 50 --seed 1 --out kills.json

A few sandboxes each hold a Python with a secret and append numbered lines to a file; a line counts when its write
was answered. Then one operation is begun, while lines are written on, and the node gets SIGKILL after a random part of
the time that it usually takes. The next node of the same state directory must have every sandbox that was
acknowledged, awake or asleep, with its secret and all its lines, and nothing else (`bench.state_remains`); at the end,
when all sandboxes have ended, as little as at the beginning.
"""

import argparse
import asyncio
import random
import sys
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.errors import BarchanError
from barchan.model.sandbox import CpuClass
from barchan.model.tiers import Waiting
from bench.state_common import Repl, say
from bench.state_remains import Remains
from scripts.own_node import OwnNode, own_node

OPERATIONS = ("hibernate", "fork fs", "fork memory", "resume")
HEAPS_MIB = (0, 48, 48)  # of each sandbox, beside Python's own; so much is brought back by the pager
CLASSES: tuple[CpuClass, ...] = ("batch", "latency", "latency")  # the first has groups in other places
SLOTS = 2
MOST = 1.5  # of the usual time: lines are written meanwhile, and some operations shall be over
SERVER = """
import hashlib, os, sys
secret, heap = {secret}, os.urandom({mib} << 20)
def digest():
    return hashlib.sha256(heap).hexdigest()
print("ready", flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""
EXPRESSION = "secret, digest()"
SETTLE_S = 20.0
LAST_SETTLE_S = 90.0  # layers of removed images are let go of once a minute


class Kills(Struct, kw_only=True):
    """What was seen. Each loss and leak in words; `kills` and `finished_first` by operation."""

    seed: int
    kills: dict[str, int]
    finished_first: dict[str, int]
    children_acknowledged: int
    losses: list[str]
    leaks: list[str]
    usual_ms: dict[str, float]


class Held:
    """One sandbox, and what was acknowledged of it: `answer` is what its Python must say, `lines` how many it has."""

    def __init__(self, sandbox: barchan.AsyncSandbox, repl: Repl, answer: str, lines: int) -> None:
        self.sandbox, self.repl, self.answer, self.lines = sandbox, repl, answer, lines

    @classmethod
    async def begin(cls, client: barchan.AsyncClient, secret: int, mib: int, cpu_class: CpuClass = "latency") -> "Held":
        # Detached: it shall outlive the connection that dies with the node. Nothing moves it but what is asked here.
        sandbox = await client.create(
            "debian",
            memory_mib=128 + 2 * mib,
            disk_mib=128,
            detach=True,
            ttl_s=3600.0,
            cpu_class=cpu_class,
            waiting=Waiting(pause=False, page_out=False, hibernate=False),
        )
        repl = await Repl.start(sandbox, SERVER.format(secret=secret, mib=mib))
        return cls(sandbox, repl, await repl.ask(EXPRESSION), 0)

    def child(self, sandbox: barchan.AsyncSandbox, lines: int, *, has_memory: bool) -> "Held":
        """One that was forked of it when it had at least so many lines."""
        return Held(sandbox, self.repl.of(sandbox), self.answer if has_memory else "", lines)

    async def write(self) -> None:
        (await self.sandbox.exec(f"echo {self.lines} >> lines")).check()
        self.lines += 1

    async def write_on(self) -> None:
        while True:
            await self.write()

    async def check(self, client: barchan.AsyncClient) -> str:
        """What is missing, or nothing."""
        try:
            self.sandbox = await client.attach(self.sandbox.id)
            self.repl = self.repl.of(self.sandbox)
            lines = (await self.sandbox.exec("cat lines 2>/dev/null; true")).check().text.split()
            if lines[: self.lines] != [str(number) for number in range(self.lines)]:
                return f"{self.sandbox.id} has {len(lines)} lines of {self.lines}"
            self.lines = len(lines)
            answer = await self.repl.ask(EXPRESSION) if self.answer else ""
        except (BarchanError, SystemExit) as error:
            return f"{self.sandbox.id}: {type(error).__name__}: {error}"
        return "" if answer == self.answer else f"{self.sandbox.id} says {answer}, not {self.answer}"


async def operate(held: Held, operation: str) -> list[Held]:
    """Returns the children, of a fork."""
    if operation == "hibernate":
        await held.sandbox.hibernate()
    elif operation == "resume":
        await held.sandbox.resume()
    else:
        kind, lines = operation.partition(" ")[2], held.lines
        children = await held.sandbox.fork(2, kind=kind)  # type: ignore[arg-type]
        return [
            held.child(child, lines, has_memory=kind == "memory")
            for child in children
            if isinstance(child, barchan.AsyncSandbox)
        ]
    return []


async def usual_ms(client: barchan.AsyncClient, mib: int) -> dict[str, float]:
    held, found = await Held.begin(client, 1, mib), {}
    for operation in OPERATIONS:
        if operation == "resume":
            await held.sandbox.hibernate()
        began = time.monotonic()
        children = await operate(held, operation)
        found[_key(operation, mib)] = (time.monotonic() - began) * 1e3
        await asyncio.gather(*(child.sandbox.kill() for child in children))
        await held.sandbox.exec("true")
    await held.sandbox.kill()
    return found


def _key(operation: str, mib: int) -> str:
    return f"{operation} of {mib} MiB"


def client_of(own: OwnNode) -> AbstractAsyncContextManager[barchan.AsyncClient]:
    """By its address: a client of a state directory would start a node where it finds none."""
    return barchan.connect_async(f"unix://{own.state_dir}/node.sock")


async def interrupted(own: OwnNode, held: Held, operation: str, after_s: float, found: Kills) -> list[Held]:
    """Kill the node in the middle; returns the children that were acknowledged."""
    async with client_of(own) as client:
        held.sandbox = await client.attach(held.sandbox.id)
        for _ in range(3):
            await held.write()
        if operation == "resume":
            await held.sandbox.hibernate()
        writing = [] if operation == "hibernate" else [asyncio.create_task(held.write_on())]  # it would turn round
        task = asyncio.create_task(operate(held, operation))
        await asyncio.sleep(after_s)
        own.kill()
        found.kills[operation] += 1
        was_done = task.done() and task.exception() is None
        await client.close()  # before the rest is cancelled, or it would wait to tell the next node so
        for each in (task, *writing):
            each.cancel()
        await asyncio.gather(task, *writing, return_exceptions=True)
    found.finished_first[operation] += was_done
    return task.result() if was_done else []


async def once(
    own: OwnNode, remains: Remains, alive: list[Held], operation: str, index: int, after_s: float, found: Kills
) -> None:
    what = f"{operation} of {HEAPS_MIB[index]} MiB, killed after {after_s * 1e3:.0f} ms"
    say(what)
    children = await interrupted(own, alive[index], operation, after_s, found)
    found.children_acknowledged += len(children)
    own.start_again()
    async with client_of(own) as client:
        for held in (*alive, *children):
            if missing := await held.check(client):
                found.losses.append(f"{what}: {missing}")
                say(found.losses[-1])
        ids = {info.sandbox_id for info in await client.list()}
        for place, held in enumerate(alive):
            if held.sandbox.id not in ids:
                alive[place] = await Held.begin(client, 2000 + place, HEAPS_MIB[place], CLASSES[place])
        known = {held.sandbox.id for held in alive}
        for sandbox_id in ids - known:
            await (await client.attach(sandbox_id)).kill()
        await client.set_pool(0)
        for line in await asyncio.to_thread(remains.settle, known, SETTLE_S):
            found.leaks.append(f"{what}: {line}")
            say(found.leaks[-1])
        await client.set_pool(SLOTS)


async def end_all(own: OwnNode, remains: Remains, found: Kills) -> None:
    async with client_of(own) as client:
        await client.set_pool(0)
        for info in await client.list():
            await (await client.attach(info.sandbox_id)).kill()
    found.leaks += [f"all ended: {line}" for line in await asyncio.to_thread(remains.settle, (), LAST_SETTLE_S)]
    own.shut_down()
    found.leaks += [f"node ended: {line}" for line in remains.settle_after_end(SETTLE_S)]


async def measure(arguments: argparse.Namespace) -> Kills:
    random.seed(arguments.seed)
    found = Kills(
        seed=arguments.seed,
        kills=dict.fromkeys(OPERATIONS, 0),
        finished_first=dict.fromkeys(OPERATIONS, 0),
        children_acknowledged=0,
        losses=[],
        leaks=[],
        usual_ms={},
    )
    with own_node(None, "--warm", str(SLOTS)) as own:
        async with client_of(own) as client:
            for mib in sorted(set(HEAPS_MIB)):
                found.usual_ms |= await usual_ms(client, mib)
            remains = Remains(own)
            kinds = enumerate(zip(HEAPS_MIB, CLASSES, strict=True))
            alive = [await Held.begin(client, 1000 + place, *kind) for place, kind in kinds]
        for number in range(arguments.times):
            operation = OPERATIONS[number % len(OPERATIONS)]
            index = random.randrange(len(alive))
            after_s = random.uniform(0, MOST * found.usual_ms[_key(operation, HEAPS_MIB[index])]) / 1e3
            await once(own, remains, alive, operation, index, after_s, found)
        await end_all(own, remains, found)
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
