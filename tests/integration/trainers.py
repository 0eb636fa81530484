"""Other processes that take part in a run: a trainer with a group of its own, and one that is sent a rollout."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.integration.rollout_hacks import TASK
from tests.nodes import NodeProcess

# Another trainer: asks for a group, takes one turn in each member, says what it has, and waits to be told more.
TRAINER = """
import asyncio, json, pickle, sys
import barchan, msgspec
from barchan.rollout.calls import call_to
from barchan.rollout.task import Task

async def main(url, out, name, key, n):
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    async with barchan.connect_async(url) as client, client.run(name, out=out, memory_mib=128, grace_s=4.0) as run:
        group = await run.group(task, int(n), key=key)
        rollouts = sorted([rollout async for rollout in group], key=lambda rollout: rollout.index)
        for rollout in rollouts:
            if rollout.verdict is None:
                await rollout.act([call_to("bash", command="cd /tmp; echo mine > mark; x=kept")])
        print(json.dumps({"lease": run.lease_id, "ids": [r.rollout_id for r in rollouts],
                          "sandboxes": [r.sandbox_id for r in rollouts]}), flush=True)
        while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if word == "act":
                try:
                    await rollouts[0].act([call_to("bash", command="echo again >> mark")])
                    print("acted", flush=True)
                except barchan.Conflict as error:
                    print("conflict", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class Trainer:
    """A trainer in a process of its own."""

    def __init__(self, node: NodeProcess, out: Path, name: str, key: str, n: int) -> None:
        words = [f"unix://{node.socket}", str(out), name, key, str(n)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.say(msgspec.json.encode(TASK).decode())
        self.told: dict[str, Any] = {}

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    async def ready(self) -> "Trainer":
        self.told = json.loads(await asyncio.to_thread(self.hear))
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


RECEIVER = """
import asyncio, pickle, sys
import barchan
from barchan.rollout.calls import call_to

async def main(path):
    with open(path, "rb") as file:
        rollout, run = pickle.load(file)
    observation = await rollout.act([call_to("bash", command="pwd; echo $x")])
    print(observation.turn, *observation.results[0].content.split(), run.lease_id, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await rollout.act([call_to("submit", solution="def double(x): return 2 * x")])
    print((await rollout.finish()).reward, flush=True)

asyncio.run(main(sys.argv[1]))
"""


@contextmanager
def receiver(path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", RECEIVER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
