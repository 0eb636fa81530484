"""Kill a trainer with SIGKILL, time after time, in the middle of a run, and resume it: what becomes of the run?

    sudo python -m bench.resume --rollouts 1000 --kills 10 --out resume.json --picture resume.png

The same tasks are played by a scripted policy whose rollouts differ much in length (`bench.resume_tasks`): by `barchan
rollout` undisturbed, by `barchan rollout` that is killed and goes on by `--resume`, and by a trainer with generation
of its own (`bench.resume_trainer`) that is killed and goes on by `client.run(attach=True)`. Each command leaves one
line in its sandbox, which shows what ran twice; each sampled step leaves one line on the host.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from msgspec import Struct

from barchan.rollout.record import RolloutRecord
from barchan.rollout.store import read_rollouts
from barchan.trajectory.format import log_files
from barchan.trajectory.reader import load
from bench import resume_tasks
from bench.backends import machine
from bench.state_common import say, table
from scripts.own_node import own_node

ROOT = Path(__file__).parents[1]
LOOK_S = 0.01
AT_ONCE_S_MAX = 0.5  # from the moment when enough is done to the kill, at most
LIFE_S_MAX = 1800.0
GROUP = 4


class Played(Struct, kw_only=True):
    """One way to play the run.

    Attributes:
        places: Of all groups; `scored`, `void` and `again` (attempts after the first) are rows.
        void_why: What the last of each cause says.
        missing: Places without a score.
        wrong: Scores that are not what the rollout is worth.
        commands: Lines that commands have left; `twice`: those that are there more than once.
        sampled: Steps that the model was asked for; `sampled_again`: of the same turn of the same place.
        turns: Of each scored rollout, by its place.
        takeovers: Rollouts that went on in another process, each time counted; `answered` steps of theirs came from the
            log.
        wall_s: From the first process's start to the last one's end.
    """

    name: str
    kills: int
    places: int
    scored: int
    void: dict[str, int]
    void_why: dict[str, str]
    again: int
    missing: int
    wrong: int
    commands: int
    twice: int
    sampled: int
    sampled_again: int
    takeovers: int
    answered: int
    wall_s: float
    turns: dict[str, int]


class Report(Struct, kw_only=True):
    """`same_lengths`: the lengths of the places of each way, as a multiset, are the undisturbed run's."""

    machine: str
    seed: int
    runs: list[Played]
    same_lengths: dict[str, bool]


def play(name: str, scratch: Path, words: Callable[[bool], list[str]], places: int, kills: int, seed: int) -> Played:
    """Play a run to its end, with so many kills on the way, evenly spread over what gets done.

    Args:
        words: The trainer's command line; told whether it goes on with an earlier one's run.
    """
    folder, dice = scratch / "run", random.Random(seed)
    (scratch / resume_tasks.DRAWN).mkdir()
    began = time.monotonic()
    for number in range(kills + 1):
        with open(scratch / "output", "ab") as output:
            process = subprocess.Popen(
                words(number > 0),
                cwd=scratch,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        try:
            if number < kills:
                _wait_for(process, folder / "rollouts.jsonl", (number + 1) * places // (kills + 1), scratch)
                time.sleep(dice.uniform(0.0, AT_ONCE_S_MAX))
            elif process.wait(LIFE_S_MAX) != 0:
                sys.exit(f"the {name} failed: {_tail(scratch)}")
        finally:
            process.kill()
            process.wait()
        if number < kills:
            say(f"{name}: kill {number + 1} of {kills} after {time.monotonic() - began:.1f} s, {_rows(folder)} rows")
    return _played(name, scratch, places, kills, time.monotonic() - began)


def _wait_for(process: "subprocess.Popen[bytes]", rows: Path, count: int, scratch: Path) -> None:
    deadline = time.monotonic() + LIFE_S_MAX
    while not rows.exists() or rows.read_bytes().count(b"\n") < count:
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the trainer ended before it could be killed, or hangs: {_tail(scratch)}")
        time.sleep(LOOK_S)


def _rows(folder: Path) -> int:
    return (folder / "rollouts.jsonl").read_bytes().count(b"\n")


def _tail(scratch: Path) -> str:
    return (scratch / "output").read_text("utf-8", "replace")[-3000:]


def _played(name: str, scratch: Path, places: int, kills: int, wall_s: float) -> Played:
    rows = read_rollouts(scratch / "run")
    scored = [row for row in rows if row.verdict.status == "scored"]
    void = [row for row in rows if row.verdict.status == "void"]
    lines = [(row.artifact or "").replace("+", "").split() for row in rows]
    steps = [Counter(path.read_text().split()) for path in (scratch / resume_tasks.DRAWN).iterdir()]
    taken = [_taken_over(path) for path in log_files(scratch / "run")]
    return Played(
        name=name,
        kills=kills,
        places=places,
        scored=len(scored),
        void=dict(Counter(row.verdict.cause for row in void)),
        void_why={row.verdict.cause: f"{row.rollout_id}: {row.verdict.evidence}" for row in void},
        again=sum(row.attempt > 0 for row in rows),
        missing=places - len({_place(row) for row in scored}),
        wrong=sum(row.verdict.reward != row.sample_index % 2 for row in scored),
        commands=sum(map(len, lines)),
        twice=sum(len(found) - len(set(found)) for found in lines),
        sampled=sum(sum(turns.values()) for turns in steps),
        sampled_again=sum(count - 1 for turns in steps for count in turns.values()),
        takeovers=sum(count for count, _ in taken),
        answered=sum(answered for _, answered in taken),
        wall_s=round(wall_s, 3),
        turns={_place(row): row.turns for row in scored},
    )


def _place(row: RolloutRecord) -> str:
    return f"{row.task_id}-{row.sample_index}"


def _taken_over(log: Path) -> tuple[int, int]:
    """How often a log was taken over, and how many sampled steps it held then, each time counted."""
    takeovers = answered = steps = 0
    for entry in load(log).entries:
        if entry.part == "header" and entry.seq:
            takeovers, answered = takeovers + 1, answered + steps
        steps += entry.kind == "model_call" and entry.part != "intent"
    return takeovers, answered


def runs_of(asked: argparse.Namespace, folder: Path, socket: Path) -> list[Played]:
    count = -(-asked.rollouts // GROUP)
    cli = [sys.executable, "-m", "barchan.cli", "rollout", "bench.resume_tasks:tasks", "--limit", str(count)]
    cli += ["--policy", "bench.resume_tasks:Policy", "--group", str(GROUP), "--concurrency", str(asked.concurrency)]
    cli += ["--memory-mib", "128", "--state-dir", str(socket.parent)]
    trainer = [sys.executable, "-m", "bench.resume_trainer", str(socket), "run"]
    trainer += [str(count), str(GROUP), str(asked.concurrency)]

    def by_cli(goes_on: bool) -> list[str]:
        return [*cli, "--resume" if goes_on else "--out", "run"]

    def by_trainer(goes_on: bool) -> list[str]:
        return [*trainer, *(["attach"] if goes_on else [])]

    ways = [("undisturbed", by_cli, 0), ("barchan rollout --resume", by_cli, asked.kills)]
    ways.append(("client.run(attach=True)", by_trainer, asked.kills))
    found = []
    for name, words, kills in ways:
        scratch = folder / name.replace(" ", "-")
        scratch.mkdir()
        found.append(play(name, scratch, words, count * GROUP, kills, asked.seed))
    return found


def draw(runs: list[Played], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    bins = [edge - 0.5 for edge in range(1, resume_tasks.TURNS_MAX + 3)]
    for run, width in zip(runs, (5.0, 2.5, 1.0), strict=True):
        label = f"{run.name}, {run.kills} kills"
        axes.hist(list(run.turns.values()), bins=bins, histtype="step", linewidth=width, alpha=0.7, label=label)
    axes.set_xlabel("turns of a rollout")
    axes.set_ylabel("rollouts")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10, help="of each killed run")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1, help="of the kills' moments")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    with TemporaryDirectory(prefix="barchan-resume-", dir="/var/tmp") as name, own_node() as own:
        runs = runs_of(asked, Path(name), own.state_dir / "node.sock")
    lengths = [sorted(run.turns.values()) for run in runs]
    same = {run.name: found == lengths[0] for run, found in zip(runs, lengths, strict=True)}
    report = Report(machine=machine(), seed=asked.seed, runs=runs, same_lengths=same)
    if asked.out is not None:
        asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    if asked.picture is not None:
        draw(runs, asked.picture)
    columns = ["", "kills", "scored", "void", "again", "wrong", "commands", "twice", "sampled again"]
    columns += ["taken over", "steps from the log", "mean turns", "same lengths", "s"]
    rows = [
        (
            run.name, run.kills, f"{run.scored} of {run.places}", json.dumps(run.void) if run.void else 0, run.again,
            run.wrong, run.commands, run.twice, run.sampled_again, run.takeovers, run.answered,
            f"{sum(run.turns.values()) / max(1, len(run.turns)):.3f}", "yes" if same[run.name] else "no",
            f"{run.wall_s:.1f}",
        )
        for run in runs
    ]  # fmt: skip
    print(table(report.machine, columns, rows))
    for run in runs:
        for cause, why in run.void_why.items():
            print(f"{run.name}: void by {cause}: {why}")
    sound = all(not run.missing and not run.wrong and not run.twice for run in runs) and all(same.values())
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
