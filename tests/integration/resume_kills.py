"""Processes that drive rollouts and end themselves by SIGKILL at a chosen step, and the check of what they left.

A life is a process forked from one that has everything imported. The steps are put around the trajectory log's own
methods and the results' file from here: nothing in the product knows of them.
"""

import asyncio
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import asdict

import barchan
from barchan.rollout.live import AsyncRollout
from barchan.rollout.record import RolloutRecord
from barchan.rollout.shared import SharedFolder
from barchan.rollout.store import RunFolder, read_rollouts
from barchan.trajectory.format import log_files, log_path
from barchan.trajectory.reader import load, verify
from barchan.trajectory.writer import TrajectoryWriter
from tests.integration import resume_tasks
from tests.integration.resume_node import running
from tests.nodes import NodeProcess

MODULE = "tests.integration.resume_kills"
LIFE_S_MAX = 90.0
GRACE_S = 15.0  # of a killed life's lease
LOOK_S = 0.005
LOGGED = ("intent", "result", "entry")


class Step(NamedTuple):
    """Where a life ends.

    Attributes:
        when: `before` or `after` a line is written, with half of it written (`torn`), or `during` what it is about:
            as soon as a program with `program` among its arguments runs.
        parts: Which lines: `intent`, `result`, `entry`, `row` (of the results); or `sample`, while the model is asked.
        kind: Of the log's line; "" any.
        needle: What the line, or its intent, holds; for `sample` the turn.
        number: The how manieth such line of the process.
        signal: What it gets there.
    """

    when: str
    parts: str
    kind: str = ""
    needle: str = ""
    program: str = ""
    number: int = 1
    signal: int = signal.SIGKILL

    def end(self) -> None:
        os.kill(os.getpid(), self.signal)


def arm(step: Step) -> None:
    """From now on this process ends at the step."""
    left = [step.number]

    def is_it(part: str, kind: str, text: str) -> bool:
        if part not in step.parts.split("|") or step.kind not in ("", kind) or step.needle not in text:
            return False
        left[0] -= 1
        return left[0] == 0

    def around(real: Callable[..., Any], is_here: bool, path: Path, *words: Any, **more: Any) -> Any:
        if is_here and step.when in ("before", "torn"):
            if step.when == "torn":
                with path.open("ab") as file:
                    file.write(b'{"seq":17,"part":"int')
            step.end()
        made = real(*words, **more)
        if is_here and step.when == "after":
            step.end()
        elif is_here:
            threading.Thread(target=_end_with, args=(step,), daemon=True).start()
        return made

    asked: dict[tuple[Path, int], tuple[str, str]] = {}

    def logged(part: str) -> Callable[..., Any]:
        real = getattr(TrajectoryWriter, part)

        def call(writer: TrajectoryWriter, first: Any, body: Any, *words: Any, **more: Any) -> Any:
            said = asked.get((writer.path, first), ("", "")) if part == "result" else (first, repr(body))
            made = around(real, is_it(part, *said), writer.path, writer, first, body, *words, **more)
            if part == "intent":
                asked[writer.path, made] = said
            return made

        return call

    for part in LOGGED:
        setattr(TrajectoryWriter, part, logged(part))
    for folder in (RunFolder, SharedFolder):
        real = folder.add

        def add(self: Any, record: Any, real: Callable[..., Any] = real) -> None:
            around(real, is_it("row", "", ""), self.path / "rollouts.jsonl", self, record)

        folder.add = add  # type: ignore[method-assign]
    resume_tasks.asked = lambda turn: step.end() if is_it("sample", "", str(turn)) else None


def _end_with(step: Step) -> None:
    """End this process as soon as the program runs, wherever on this host."""
    while not any(running(step.program)):
        time.sleep(LOOK_S)
    step.end()


# lives


def _command(words: list[str], step: Step | None, folder: Path) -> None:
    """A life of `barchan rollout`."""
    from barchan.cli.main import main

    _begin(step, folder)
    sys.exit(main(words))


def _trainer(words: list[str], step: Step | None, folder: Path) -> None:
    """A life of a trainer with generation of its own, which says `attach` from its second life on."""
    _begin(step, folder)
    url, out, group, attach = words
    asyncio.run(train(url, Path(out), int(group), attach=attach == "attach"))


async def train(url: str, out: Path, n: int, *, attach: bool) -> None:
    async with (
        barchan.connect_async(url) as client,
        client.run("counted", out=out, memory_mib=128, grace_s=GRACE_S, attach=attach) as run,
    ):
        taken_over = await run.rollouts() if attach else []
        group = await run.group(resume_tasks.TASK, n, key="all")
        assert {rollout.rollout_id for rollout in taken_over} <= {rollout.rollout_id async for rollout in group}
        async with asyncio.TaskGroup() as playing:
            async for rollout in group:
                playing.create_task(play(rollout))


async def play(rollout: AsyncRollout) -> None:
    """To its end; what an earlier process has sampled is acted on first."""
    observation = await rollout.observe()
    while rollout.verdict is None and observation.over is None:
        if not rollout.pending:
            await rollout.record(**asdict(resume_tasks.sampled(rollout.index, observation.turn)))
        observation = await rollout.act(resume_tasks.calls_in(rollout.pending[-1].text))
    await rollout.finish()


def _begin(step: Step | None, folder: Path) -> None:
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(output, fd)
    resume_tasks.samples = folder / "samples"
    if step is not None:
        arm(step)


class Lives:
    """The lives of one run: its folder, and the process that drives it now.

    Args:
        folder: Made; holds the run's folder `run`, `samples` (of the policy) and `output`.
    """

    def __init__(self, folder: Path, node: NodeProcess, *, group: int = 2) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.url = f"unix://{node.socket}"  # and no other node is started in its place
        self.group = group
        folder.mkdir(exist_ok=True)
        (folder / "samples").touch()

    def words(self) -> list[str]:
        policy = ["--policy", "tests.integration.resume_tasks:Policy"]
        more = ["--group", str(self.group), "--memory-mib", "128", "--grace", str(GRACE_S), "--url", self.url, "--json"]
        where = ["--resume" if (self.run / "run.json").exists() else "--out", str(self.run)]
        return ["rollout", "tests.integration.resume_tasks:tasks", *policy, *more, *where]

    def live(self, step: Step | None = None) -> int | None:
        """One life of `barchan rollout`, to its end; returns its exit code, less than 0 when a signal was the end."""
        return self.end(self.begin(step))

    def train(self, step: Step | None = None) -> int | None:
        """The same of a trainer of its own."""
        return self.end(self.begin_to_train(step))

    def begin(self, step: Step | None = None) -> BaseProcess:
        return self._begin(_command, self.words(), step)

    def begin_to_train(self, step: Step | None = None) -> BaseProcess:
        attach = "attach" if (self.run / "run.json").exists() else ""
        words = [self.url, str(self.run), str(self.group), attach]
        return self._begin(_trainer, words, step)

    def end(self, process: BaseProcess) -> int | None:
        """Wait for a life's end, and end it where it does not."""
        try:
            process.join(LIFE_S_MAX)
            return process.exitcode
        finally:
            process.kill()
            process.join()
            process.close()

    def _begin(self, target: Callable[..., None], words: list[str], step: Step | None) -> BaseProcess:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["barchan.cli.main", "barchan.cli.rollout", MODULE])
        process = context.Process(target=target, args=(words, step, self.folder))
        process.start()
        return process

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text("utf-8", "replace")

    def logs(self) -> dict[str, bytes]:
        """What the logs hold, without a last line that was never whole."""
        return {path.name: path.read_bytes().rpartition(b"\n")[0] for path in log_files(self.run)}


# what they left


class Seen(NamedTuple):
    """One rollout, as its log, its row and its artifact tell of it.

    Attributes:
        nonces: Of its model calls, by the log.
        work: The lines that its commands wrote, label and nonce.
        told: What its tool calls gave, without nonces.
    """

    row: RolloutRecord
    nonces: list[str]
    work: list[tuple[str, str]]
    told: list[tuple[str, str, str]]


def seen(run: Path, row: RolloutRecord) -> Seen:
    entries = load(log_path(run, row.rollout_id)).entries
    asked = {entry.seq: entry.body for entry in entries if entry.part == "intent"}
    nonces, told = [], []
    for entry in entries:
        text = entry.body.get("text", "")
        if entry.kind == "model_call" and entry.part != "intent" and text:
            nonces.append(json.loads(text)["nonce"])
        if entry.kind == "tool_call" and entry.of is not None:
            content = re.sub(resume_tasks.NONCE, "NONCE", entry.body["content"])
            told.append((asked[entry.of]["name"], entry.body["status"], content))
    work = [tuple(line.split()[:2]) for line in (row.artifact or "").splitlines()]
    return Seen(row, nonces, [(label, nonce) for label, nonce in work], told)


def faults(lives: Lives, before: dict[str, bytes], *, may_sample_again: int = 0, may_be_void: int = 0) -> list[str]:
    """What is wrong with a run that was resumed to its end, in words.

    Args:
        before: The logs as they were when it was killed.
        may_sample_again: Model calls that were in flight then, and so had to be asked again.
        may_be_void: Rollouts that nobody could go on with.
    """
    wrong: list[str] = []
    after = lives.logs()
    changed = [name for name, data in before.items() if not after[name].startswith(data)]
    wrong += [f"{name}: what was acknowledged has changed" for name in changed]
    rows = read_rollouts(lives.run)
    again = Counter((row.group_index, row.sample_index, row.attempt) for row in rows)
    wrong += [f"{place} has {count} rows" for place, count in again.items() if count > 1]
    void = [row for row in rows if row.verdict.status != "scored"]
    if len(void) > may_be_void:
        wrong += [f"{row.rollout_id} is void: {row.verdict.cause} {row.verdict.evidence}" for row in void]
    places = {row.sample_index for row in rows}
    wrong += [f"place {index} has no row" for index in range(lives.group) if index not in places]
    turns = sampled_turns(lives)
    for row in rows:
        path = log_path(lives.run, row.rollout_id)
        check = verify(path, head_hash=row.head_hash)
        if not check.ok:
            wrong.append(f"{row.rollout_id}: its log: {check.why}")
        elif row.verdict.status == "scored" and (left := _left_open(path)):
            wrong.append(f"{row.rollout_id}: nobody knows what came of {left}")
        if row.verdict.status == "scored":
            wrong += [f"{row.rollout_id}: {what}" for what in _faults_of(seen(lives.run, row))]
    most = 1 + len(void)
    doubled = sum(max(0, count - most) for count in turns.values())
    if doubled > may_sample_again:
        wrong.append(f"{doubled} steps were sampled again: {turns}")
    return wrong


def _left_open(path: Path) -> list[str]:
    """Operations of which nobody knows what came of them, in the sandbox that was handed in. What a read gave that was
    cut short changed nothing, and a grading that was begins anew.
    """
    log = load(path)
    grading = min((entry.seq for entry in log.entries if entry.kind == "grade"), default=len(log.entries))
    operations = [entry for entry in log.entries[:grading] if "sandbox_id" in entry.body]
    return [
        f"{entry.seq} {entry.kind} {entry.body}"
        for entry in log.open_intents
        if entry.kind != "file_read" and entry in operations
        if entry.body["sandbox_id"] == operations[-1].body["sandbox_id"]
    ]


def sampled_turns(lives: Lives) -> Counter[tuple[int, int]]:
    """How often the policy was asked for each turn of each place."""
    lines = (lives.folder / "samples").read_text().splitlines()
    return Counter((int(line.split()[0]), int(line.split()[1])) for line in lines)


def _faults_of(found: Seen) -> list[str]:
    index, wrong = found.row.sample_index, []
    if found.row.verdict.reward != resume_tasks.reward_of(index):
        wrong.append(f"reward {found.row.verdict.reward}, and it is worth {resume_tasks.reward_of(index)}")
    nonces = found.nonces
    if len(nonces) != resume_tasks.TURNS or len(found.row.completions) != resume_tasks.TURNS:
        wrong.append(f"{len(nonces)} model calls in its log, {len(found.row.completions)} in its row")
    elif found.work != [(label, nonces[int(label[1])]) for label in resume_tasks.labels_of(index)]:
        wrong.append(f"its commands ran as {found.work}, and what was sampled is {nonces}")
    if found.told != TOLD:
        wrong.append(f"its calls gave {found.told}")
    return wrong


TOLD = [
    ("bash", "ok", "[no output]"),
    ("python", "ok", "T1 said"),
    ("bash", "ok", "[no output]"),
    ("bash", "ok", "/tmp\nkept"),
    ("edit", "ok", "[wrote /tmp/note, 1 lines]"),
    ("edit", "ok", "[changed /tmp/note]\n     1\ttwo"),
    ("bash", "ok", "two\none shell"),
    ("submit", "ok", "[submitted]"),
]


async def until(is_so: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Wait for what a function finds."""
    async with asyncio.timeout(timeout_s):
        while not (found := is_so()):
            await asyncio.sleep(0.02)
        return found
