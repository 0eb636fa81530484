"""What the trajectory log costs: entries per second with and without the disk, bytes, checking, fast-forward, and what
it takes from a run.

    python -m bench.trajectory
    python -m bench.trajectory --steps 2000 --rounds 4 --json log.json
    python -m bench.trajectory --rollouts 64 --state-dir /var/lib/barchan

A disk that others use, too, is ten times faster in one second than in the next. So everything that is compared is done
in short turns, in another order each round, and the median of the rounds is given with their spread; and beside each
rate how many flushes of the disk one entry took, which does not depend on the moment. What a flush of this disk is
worth is not measured: on a virtual one the host decides.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.rollout.calls import call_to
from barchan.rollout.limits import Limits, Meter
from barchan.rollout.policies import OraclePolicy
from barchan.rollout.replay.logonly import LogOnly
from barchan.rollout.resuming.forward import forward
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.state import AttemptState
from barchan.rollout.store import RunFolder, RunInfo
from barchan.rollout.tasksets import humaneval
from barchan.trajectory.format import Header, log_path
from barchan.trajectory.reader import load, verify
from barchan.trajectory.writer import TrajectoryWriter
from bench.state_common import say, table

TURN_S = 0.4
WRITERS = (1, 16, 64)
OUTPUT = b"total 12\n-rw-r--r-- 1 agent agent 220 solution.py\n" * 4


class Rate(Struct, frozen=True, kw_only=True):
    """Entries per second: median, least and most of the rounds; flushes of the disk per entry, what others flush on it
    meanwhile included, None where the kernel does not count them.
    """

    name: str
    median: float
    least: float
    most: float
    flushes: float | None


class Cost(Struct, frozen=True, kw_only=True):
    """A log of so many steps: its size, and seconds to check it, to load it, to bring a rollout's state from its start
    to where the log ends (after loading), and to answer each operation from it.
    """

    steps: int
    entries: int
    bytes_per_entry: float
    verify_s: float
    load_s: float
    forward_s: float
    answer_s: float


class Overhead(Struct, frozen=True, kw_only=True):
    """Rollouts per second of the same runs with and without logs, in turns; `ratios` are with over without, by pair."""

    rollouts: int
    with_log: float
    without_log: float
    ratios: tuple[float, ...]


def header(rollout_id: str) -> Header:
    return Header(
        rollout_id=rollout_id,
        run_id="bench",
        task_id="bench",
        group_index=0,
        sample_index=0,
        epoch=0,
        created_unix_s=time.time(),
        barchan_version=barchan.__version__,
    )


def flushes_of(folder: Path) -> int | None:
    """Flushes that the disk below a folder has done."""
    device = folder.stat().st_dev
    for line in Path("/proc/diskstats").read_text().splitlines():
        words = line.split()
        if (int(words[0]), int(words[1])) == (os.major(device), os.minor(device)):
            return int(words[18]) if len(words) > 18 else None
    return None


def bare(folder: Path) -> int:
    """A line and an fdatasync, over and over: what any log that waits for its disk at each entry takes."""
    fd = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    line, count, end = b"x" * 600 + b"\n", 0, time.monotonic() + TURN_S
    try:
        while time.monotonic() < end:
            os.write(fd, line)
            os.fdatasync(fd)
            count += 1
    finally:
        os.close(fd)
    return count


async def written(folder: Path, writers: int, *, is_durable: bool) -> int:
    """Entries of so many rollouts at once; durable: each waits for its entry before the next."""
    end = time.monotonic() + TURN_S

    async def one() -> int:
        rollout_id, count = uuid.uuid4().hex, 0
        log = TrajectoryWriter.create(log_path(folder, rollout_id), header(rollout_id))
        while time.monotonic() < end:
            seq = log.intent("exec", {"sandbox_id": "sb_bench", "command": "ls -l", "timeout_s": 120.0}, op_id="op")
            if is_durable:
                await log.committed(seq)
            seq = log.result(seq, {"exit_code": 0, "stdout": OUTPUT})
            if is_durable:
                await log.committed(seq)
            else:
                await asyncio.sleep(0)
            count += 2
        await asyncio.to_thread(log.close)
        return count

    return sum(await asyncio.gather(*(one() for _ in range(writers))))


def rates(folder: Path, rounds: int, seed: int) -> list[Rate]:
    def durable(writers: int) -> Callable[[], int]:
        return lambda: asyncio.run(written(folder, writers, is_durable=True))

    work: dict[str, Callable[[], int]] = {
        "bare write and fdatasync, 1 file": lambda: bare(folder),
        **{f"committed, {writers} rollouts": durable(writers) for writers in WRITERS},
        "appended only, 16 rollouts": lambda: asyncio.run(written(folder, 16, is_durable=False)),
    }
    seen: dict[str, list[float]] = {name: [] for name in work}
    counts, flushes = dict.fromkeys(work, 0), dict.fromkeys(work, 0)
    order = random.Random(seed)
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for name in order.sample(list(work), len(work)):
            before, started = flushes_of(folder), time.monotonic()
            count = work[name]()
            seconds, after = time.monotonic() - started, flushes_of(folder)
            seen[name].append(count / seconds)
            counts[name] += count
            flushes[name] += (after or 0) - (before or 0)
    are_counted = flushes_of(folder) is not None
    return [
        Rate(
            name=name,
            median=statistics.median(found),
            least=min(found),
            most=max(found),
            flushes=flushes[name] / counts[name] if are_counted else None,
        )
        for name, found in seen.items()
    ]


def cost(folder: Path, steps: int) -> Cost:
    """Of a log as a rollout writes it: a model call, a turn, a tool call and its command in each step."""
    log = TrajectoryWriter.create(log_path(folder, "long"), header("long"))
    prompt = list(range(500))
    for number in range(steps):
        call = call_to("bash", f"c{number}", command=f"ls -l {number}")
        sampled = [number % 50_000, 11, 12, 13]
        step = {"tool_calls": [call], "is_last": False, "cause": None}
        log.entry("model_call", {"text": "ls", "prompt_ids": prompt, "completion_ids": sampled, "step": step})
        prompt = [*prompt, *sampled, 7, 8, 9] if len(prompt) < 4000 else prompt[:500]
        log.entry("turn", {"calls": [call], "timeout_s": None})
        args = {"id": call.id, "name": call.name, "arguments": call.arguments, "turn": number, "timeout_s": 120.0}
        tool = log.intent("tool_call", args)
        seq = log.intent("exec", {"sandbox_id": "sb_bench", "command": f"ls -l {number}", "timeout_s": 120.0})
        log.result(seq, {"exit_code": 0, "stdout": OUTPUT})
        log.result(tool, {"content": OUTPUT.decode(), "status": "ok", "truncated": False, "agent_s": 0.002})
    log.close()
    verify_s = timed(lambda: verify(log.path))
    started = time.monotonic()
    entries = load(log.path).entries
    load_s = time.monotonic() - started
    limits = Limits(turns_max=steps + 1)
    state = AttemptState(meter=Meter(limits), messages=[])
    forward_s = timed(lambda: forward(state, entries))
    if state.meter.turns != steps:
        raise SystemExit(f"fast-forward came to turn {state.meter.turns} of {steps}")
    answers = LogOnly(entries)

    def answer() -> None:
        for number in range(steps):
            answers.exec(f"ls -l {number}", timeout_s=120.0)

    return Cost(
        steps=steps,
        entries=len(entries),
        bytes_per_entry=log.path.stat().st_size / len(entries),
        verify_s=verify_s,
        load_s=load_s,
        forward_s=forward_s,
        answer_s=timed(answer),
    )


def timed(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


async def overhead(folder: Path, state_dir: Path | None, rollouts: int, pairs: int) -> Overhead:
    """The oracle on HumanEval, in pairs of runs, one with logs and one without, the first of a pair by turns."""
    tasks = humaneval.load()[:rollouts]
    ratios: list[float] = []
    seconds = {True: 0.0, False: 0.0}
    async with barchan.connect_async(state_dir=state_dir) as client:
        for pair in range(pairs):
            took: dict[bool, float] = {}
            for is_logged in (pair % 2 == 0, pair % 2 == 1):
                run_id = f"bench-{uuid.uuid4().hex[:8]}"
                settings = RunSettings(run_id=run_id, template="debian", memory_mib=128, concurrency=4)
                info = RunInfo(
                    run_id=run_id,
                    task_set="humaneval",
                    policy="oracle",
                    settings={},
                    barchan_version=barchan.__version__,
                    started_unix_s=time.time(),
                )
                with RunFolder.create(folder / run_id, info, tasks) as store:
                    open_log = store.open_log if is_logged else None
                    runner = Runner(client, tasks, OraclePolicy(), settings, store.add, open_log=open_log)
                    started = time.monotonic()
                    await runner.run()
                    took[is_logged] = time.monotonic() - started
                seconds[is_logged] += took[is_logged]
            ratios.append(took[False] / took[True])
            say(f"pair {pair + 1} of {pairs}: with logs {ratios[-1]:.3f} of the rate without")
    total = len(tasks) * pairs
    return Overhead(
        rollouts=len(tasks),
        with_log=total / seconds[True],
        without_log=total / seconds[False],
        ratios=tuple(ratios),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=0, help="also compare runs of so many, with and without logs")
    parser.add_argument("--pairs", type=int, default=6, help="of such runs")
    parser.add_argument("--state-dir", type=Path)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the default is the current one's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder or Path.cwd()) as name:
        folder = Path(name)
        found = rates(folder, asked.rounds, asked.seed)
        spent = cost(folder, asked.steps)
        taken = asyncio.run(overhead(folder, asked.state_dir, asked.rollouts, asked.pairs)) if asked.rollouts else None
    rows = [
        (rate.name, *(f"{value:.0f}" for value in (rate.median, rate.least, rate.most)), _flushes(rate))
        for rate in found
    ]
    out = table("Entries per second", ("", "median", "least", "most", "flushes each"), rows)
    out += (
        f"\nA log of {spent.steps} steps: {spent.entries} entries of {spent.bytes_per_entry:.0f} bytes; "
        f"checked in {spent.verify_s:.2f} s, loaded in {spent.load_s:.2f} s, then fast-forwarded in "
        f"{spent.forward_s:.2f} s; operations answered from it in {spent.answer_s:.2f} s\n"
    )
    if taken is not None:
        ratios = sorted(taken.ratios)
        out += (
            f"\nRuns of {taken.rollouts} rollouts: {taken.with_log:.2f} a second with logs, {taken.without_log:.2f} "
            f"without; by pair {statistics.median(ratios):.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f})\n"
        )
    sys.stdout.write(out)
    if asked.json is not None:
        result = {"rates": found, "cost": spent, "overhead": taken, "load": os.getloadavg()}
        asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def _flushes(rate: Rate) -> str:
    return "-" if rate.flushes is None else f"{rate.flushes:.2f}"


if __name__ == "__main__":
    main()
