"""HumanEval in groups with a model that takes its time: what the sandboxes hold meanwhile, with tiers off and on.

    sudo python -m bench.state_waiting --tasks 8 --group 16 --step-s 2 --out waiting.json --picture waiting.png

The model is a stub that sleeps and then does what is known to be good: in its shell it starts a Python that has
imported and parsed things and stays, asks that a dozen times, each time what only it knows, and hands the known
solution in. Every other attempt's Python is an interpreter at the other end of two pipes, the others' a server at a
port. Sampled twice a second: memory charged to the sandboxes and what compressed memory takes for them, processes' CPU
time, and how many sandboxes are in each phase. A wrong answer ends the run.
"""

import argparse
import asyncio
import shlex
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

import barchan
from barchan.model.tiers import Waiting
from barchan.rollout.calls import Observation, call_to
from barchan.rollout.policies.base import Step
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Task
from barchan.rollout.tasksets import humaneval
from bench.state_common import mib, say, table
from bench.state_resume import zram, zram_bytes
from scripts.own_node import OwnNode, own_node

SAMPLE_S = 0.5
HEAP = (
    "import ast, asyncio, glob, json, sqlite3, sys, unittest; "
    "kept = [ast.parse(open(path).read()) for path in sorted(glob.glob('/usr/lib/python3*/*.py'))[:15]]; "
)
REPL = HEAP + "print('up', flush=True); [print(eval(line), flush=True) for line in sys.stdin]"
SERVER = (
    HEAP + "serve = lambda reader, writer: asyncio.ensure_future(answer(reader, writer))\n"
    "async def answer(reader, writer):\n"
    "    writer.write(str(eval(await reader.readline())).encode() + b'\\n')\n"
    "    writer.close()\n"
    "async def main():\n"
    "    server = await asyncio.start_server(serve, '127.0.0.1', 8000)\n"
    "    print('up', flush=True)\n"
    "    await server.serve_forever()\n"
    "asyncio.run(main())"
)
ASK_REPL = 'echo "len(kept) + NUMBER" >&"${KEPT[1]}"; read -r line <&"${KEPT[0]}"; echo "$line"'
ASK_SERVER = 'exec 5<>/dev/tcp/127.0.0.1/8000; echo "len(kept) + NUMBER" >&5; read -r line <&5; echo "$line"; exec 5>&-'
KEPT = 15


def start_of(source: str) -> str:
    """What starts a Python beside a shell, with pipes to and from it, and waits until it says that it is up."""
    command = f"coproc KEPT {{ exec python3 -c {shlex.quote(source)}; }} 2>/dev/null"
    return f'{command}; read -r line <&"${{KEPT[0]}}"; echo "$line"'


class Sample(Struct, frozen=True, kw_only=True):
    """One look: seconds since the start, bytes charged to the sandboxes' groups, their CPU seconds, phases."""

    t_s: float
    memory_bytes: int
    cpu_s: float
    phases: dict[str, int]


class Played(Struct, frozen=True, kw_only=True):
    """One run. `memory_byte_s`: the integral of memory over time."""

    tiers: bool
    wall_s: float
    rollouts: int
    reward_mean: float
    void: int
    memory_byte_s: float
    memory_peak_bytes: int
    cpu_s: float
    samples: list[Sample]


class SlowOracle:
    """Sleeps before each turn, as a model thinks."""

    name = "slow-oracle"

    def __init__(self, step_s: float, looks: int) -> None:
        self._step_s = step_s
        self._looks = looks

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        await asyncio.sleep(self._step_s)
        turn = observation.turn
        expected = "up" if turn == 1 else str(KEPT + turn - 1)
        if 1 <= turn <= self._looks + 1 and [result.content.strip() for result in observation.results] != [expected]:
            raise SystemExit(f"turn {turn}: {observation.results} instead of {expected!r}")
        source, ask = (REPL, ASK_REPL) if sample_index % 2 == 0 else (SERVER, ASK_SERVER)
        asks = [ask.replace("NUMBER", str(number + 1)) for number in range(self._looks)]
        work = [call_to("bash", command=text) for text in (start_of(source), *asks)]
        script = [*work, *task.oracle]
        return Step(tool_calls=tuple(script[turn : turn + 1]), is_last=turn >= len(script) - 1)


class Told:
    """A client whose sandboxes are told what may be done with them while they wait."""

    def __init__(self, client: barchan.AsyncClient, waiting: Waiting) -> None:
        self._client, self._waiting = client, waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def create(self, template: str, **options: Any) -> barchan.AsyncSandbox:
        return await self._client.create(template, waiting=self._waiting, **options)


def counters(own: OwnNode, swapped_before: int) -> tuple[int, float]:
    """Bytes that the node's sandboxes take, and their CPU seconds so far. `swapped_before`: that compressed memory took
    when there were none.
    """
    memory, cpu = 0, 0.0
    for root in own.cgroup_dirs():
        usage = root / "memory.usage_in_bytes"
        if usage.exists():
            memory = int(usage.read_text())
        for line in (root / "cpu.stat").read_text().splitlines() if (root / "cpu.stat").exists() else ():
            if line.startswith("usage_usec"):
                cpu = int(line.split()[1]) / 1e6
    return memory + zram_bytes() - swapped_before, cpu


async def watch(own: OwnNode, client: barchan.AsyncClient, samples: list[Sample]) -> None:
    began, swapped_before = time.monotonic(), zram_bytes()
    while True:
        memory, cpu = counters(own, swapped_before)
        phases: dict[str, int] = {}
        for info in await client.list():
            phases[info.phase] = phases.get(info.phase, 0) + 1
        samples.append(Sample(t_s=time.monotonic() - began, memory_bytes=memory, cpu_s=cpu, phases=phases))
        await asyncio.sleep(SAMPLE_S)


async def play(arguments: argparse.Namespace, *, tiers: bool) -> Played:
    tasks = [
        replace(task, limits=replace(task.limits, turns_max=arguments.looks + 2))
        for task in humaneval.load()[: arguments.tasks]
    ]
    records: list[RolloutRecord] = []
    samples: list[Sample] = []
    waiting = Waiting(after_s=arguments.after_s, hibernate=False) if tiers else Waiting(pause=False)
    with own_node() as own:
        async with barchan.connect_async(state_dir=own.state_dir) as client:
            settings = RunSettings(
                run_id=f"waiting-{'on' if tiers else 'off'}", template="debian", group=arguments.group,
                concurrency=arguments.tasks * arguments.group, graders=8, memory_mib=256,
            )  # fmt: skip
            runner = Runner(
                Told(client, waiting), tasks, SlowOracle(arguments.step_s, arguments.looks), settings, records.append
            )
            watcher = asyncio.create_task(watch(own, client, samples))
            began = time.monotonic()
            await runner.run()
            wall_s = time.monotonic() - began
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
    rewards = [record.verdict.reward for record in records if record.verdict.reward is not None]
    area = sum((after.t_s - before.t_s) * before.memory_bytes for before, after in pairwise(samples))
    return Played(
        tiers=tiers, wall_s=wall_s, rollouts=len(records), reward_mean=sum(rewards) / max(1, len(rewards)),
        void=sum(record.verdict.status == "void" for record in records), memory_byte_s=area,
        memory_peak_bytes=max(sample.memory_bytes for sample in samples), cpu_s=samples[-1].cpu_s - samples[0].cpu_s,
        samples=samples,
    )  # fmt: skip


def draw(runs: list[Played], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    memory, cpu, phases = figure.subplots(3, 1, sharex=True)
    for run in runs:
        label = f"tiers {'on' if run.tiers else 'off'}"
        at = [sample.t_s for sample in run.samples]
        memory.plot(at, [sample.memory_bytes / 2**20 for sample in run.samples], label=label)
        cpu.plot(at, [sample.cpu_s - run.samples[0].cpu_s for sample in run.samples], label=label)
        if run.tiers:
            names = sorted({name for sample in run.samples for name in sample.phases})
            phases.stackplot(
                at, [[sample.phases.get(name, 0) for sample in run.samples] for name in names], labels=names
            )
    memory.set_ylabel("memory, MiB")
    cpu.set_ylabel("CPU, s")
    phases.set_ylabel("sandboxes, tiers on")
    phases.set_xlabel("s")
    for axes in (memory, cpu, phases):
        axes.legend(loc="upper right")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def report(runs: list[Played]) -> str:
    rows = [
        (
            f"tiers {'on' if run.tiers else 'off'}", run.rollouts, f"{run.reward_mean:.3f}", run.void,
            f"{run.wall_s:.1f}",
            f"{run.memory_byte_s / 2**30:.1f}", mib(run.memory_peak_bytes), f"{run.cpu_s:.1f}",
        )
        for run in runs
    ]  # fmt: skip
    columns = ("", "rollouts", "reward", "void", "wall s", "memory, GiB s", "peak MiB", "sandboxes' CPU s")
    off, on = (next(run for run in runs if run.tiers is tiers) for tiers in (False, True))
    return table("a slow model", columns, rows) + f"wall time, on over off: {on.wall_s / off.wall_s:.3f}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--step-s", type=float, default=2.0)
    parser.add_argument("--looks", type=int, default=12, help="steps between the first and what is handed in")
    parser.add_argument("--after-s", type=float, default=0.5, help="quiet time after which a sandbox is paged out")
    parser.add_argument("--zram-mib", type=int, default=8192, help="swap in compressed memory; 0: none is made")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    parser.add_argument("--picture", type=Path, help="a file for the picture, PNG or SVG")
    arguments = parser.parse_args()
    runs = []
    with zram(arguments.zram_mib):
        for tiers in (False, True):
            say(f"tiers {'on' if tiers else 'off'}")
            runs.append(asyncio.run(play(arguments, tiers=tiers)))
    sys.stdout.write(report(runs))
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(runs)) + b"\n")
    if arguments.picture is not None:
        draw(runs, arguments.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
