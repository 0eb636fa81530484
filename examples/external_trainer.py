"""A trainer with its own generation: 32 processes, groups of 16, 20 tool turns each on a published package's source.
Even members repair a broken function, odd ones patch it wrongly; one process is killed, and only its rollouts end.
Ctrl-C or SIGTERM ends the trainers, and what they have on the node.
"""

import argparse
import asyncio
import multiprocessing
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import barchan
from barchan.rollout.calls import call_to
from barchan.rollout.store import read_rollouts
from barchan.rollout.task import Environment, FileArtifact, ScriptGrader
from barchan.sdk.recipe import Put, Recipe

REPO, FILE = "/home/agent/idna", "/home/agent/idna/idna/intranges.py"
RIGHT, BROKEN, WRONG = "if left <= int_ < right:", "if left <= int_ <= right:", "if left < int_ < right - 1:"
TESTS, REWARD = f"cd {REPO} && python3 -m unittest tests.test_intranges", "/logs/verifier/reward.txt"
LOOK = [f"cd {REPO}", "ls", "head README.rst", f"cat {FILE}", TESTS, *(f"grep -rm{n} import" for n in range(1, 12))]


def broken_package(folder: Path) -> barchan.Task:
    download = [sys.executable, "-m", "pip", "download", "-qd", str(folder), "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*download, "idna==3.10"], check=True)
    shutil.unpack_archive(folder / "idna-3.10.tar.gz", folder, filter="data")
    source = folder / "idna-3.10/idna/intranges.py"
    source.write_text(source.read_text().replace(RIGHT, BROKEN))
    recipe = Recipe(base="debian", steps=(Put(path=REPO, source=str(folder / "idna-3.10"), user="agent"),))
    return barchan.Task(
        task_id="idna/intranges",
        instruction="Repair the package.",
        environment=Environment(recipe=recipe, memory_mib=256),
        artifact=FileArtifact(path=FILE),
        grader=ScriptGrader(command=f"({TESTS}) && echo 1 >{REWARD} || echo 0 >{REWARD}"),
    )


async def play(rollout: barchan.AsyncRollout) -> None:
    new = WRONG if rollout.index % 2 else RIGHT
    patch = call_to("edit", command="str_replace", path=FILE, old_str=BROKEN, new_str=new)
    look, test = [call_to("bash", command=line) for line in LOOK], call_to("bash", command=TESTS)
    for turn, call in enumerate([*look, patch, test, call_to("python", code="print(6 * 7)"), call_to("submit")]):
        if (await rollout.observe()).over is None:
            await rollout.record(prompt_ids=[1, 2], completion_ids=[turn, 7], logprobs=[-0.5, -0.1], policy_version=1)
            await rollout.act([call], timeout_s=120)
    await rollout.finish()


async def train(task: barchan.Task, folder: Path, name: str, group: int) -> None:
    training = asyncio.ensure_future(rollouts(task, folder, name, group))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a Ctrl-C its parent hears, too, and ends it
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, training.cancel)
    with suppress(asyncio.CancelledError):
        await training


async def rollouts(task: barchan.Task, folder: Path, name: str, group: int) -> None:
    async with barchan.connect_async() as client, client.run("external", out=folder, labels={"trainer": name}) as run:
        await asyncio.gather(*[play(rollout) async for rollout in await run.group(task, group, key=f"step0/{name}")])


def main(folder: Path, count: int, group: int) -> None:
    task, fork = broken_package(folder), multiprocessing.get_context("fork")
    trainers = [fork.Process(target=lambda n=n: asyncio.run(train(task, folder, str(n), group))) for n in range(count)]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda caught, _: sys.exit(128 + caught))
    try:
        for process in trainers:
            process.start()
        watch(folder, trainers, group)
    finally:
        begun = [process for process in trainers if process.pid is not None]
        for process in begun:
            process.terminate()  # of one that has ended, nothing
        for process in begun:
            process.join()


def watch(folder: Path, trainers: list[multiprocessing.context.ForkProcess], group: int) -> None:
    with barchan.connect() as client:
        while trainers[0].is_alive() and len(client.list(labels={"trainer": "0", "role": "agent"})) < group:
            time.sleep(0.1)
        trainers[0].kill()
        while client.list(labels={"trainer": "0"}):
            time.sleep(0.1)
    print(f"trainer 0 was killed, and none of its sandboxes is left; results: {folder}\ntrainer exit rollouts turns")
    for number, process in enumerate(trainers):
        process.join()
        rows = [row for row in read_rollouts(folder) if f"-step0-{number}-" in row.rollout_id]
        right, wrong = ([row.verdict.reward for row in rows if row.sample_index % 2 == odd] for odd in (0, 1))
        solved = f"{right.count(1.0)} of {len(right)} repairs and {wrong.count(1.0)} of {len(wrong)} wrong patches pass"
        print(f"{number:7} {process.exitcode:4} {len(rows):8} {sum(row.turns for row in rows):5}  {solved}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=32, help="trainers, each with a group of its own (default 32)")
    parser.add_argument("--group", type=int, default=16, help="rollouts of a group (default 16)")
    parser.add_argument("--out", type=Path, help="folder for logs and results (default: a new one below /tmp)")
    given = parser.parse_args()
    main(given.out or Path(tempfile.mkdtemp()), given.processes, given.group)
