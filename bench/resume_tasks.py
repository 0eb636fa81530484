"""The tasks and the policy of `bench.resume`: rollouts of very different lengths, whose commands each leave one line.

How long a rollout becomes is drawn when its first step is sampled, from its place and from how often that was sampled
before. So one that begins anew becomes another length, and a run that loses its long ones and draws again is seen.
"""

import asyncio
import json
import os
import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from barchan.rollout.calls import Observation, ToolCall, call_to
from barchan.rollout.graders.base import Artifact
from barchan.rollout.policies import Step
from barchan.rollout.record import Completion
from barchan.rollout.task import FileArtifact, PythonGrader, Task

TASKS_MAX = 1000
TURNS_MAX = 40
WORK = "/tmp/work"
DRAWN = Path("drawn")  # a file per place, in the folder where the trainer runs: a line per step that was sampled
THINK_S_MEAN = 0.03


def tasks() -> list[Task]:
    grader = PythonGrader(function="bench.resume_tasks:is_whole")
    return [
        Task(
            task_id=f"counted-{number:04d}",
            instruction="Write down each step.",
            grader=grader,
            artifact=FileArtifact(path=WORK),
            oracle=(call_to("bash", command=f"echo 0 > {WORK}"), call_to("submit")),
        )
        for number in range(TASKS_MAX)
    ]


def is_whole(task: Task, artifact: Artifact) -> Mapping[str, float]:
    """Lines 0, 1, 2, ... once each, of which a lucky rollout has written the last as it should."""
    lines = artifact.data.decode().split()
    counted = [line.rstrip("+") for line in lines]
    twice = len(counted) - len(set(counted))
    return {"reward": float(lines[-1:] != [] and lines[-1].endswith("+")), "twice": twice, "lines": len(lines)}


def length(task_id: str, sample_index: int, draw: int) -> int:
    """How many commands a rollout runs: most few, some many."""
    drawn = random.Random(f"{task_id} {sample_index} {draw}").lognormvariate(1.4, 0.8)
    return max(1, min(TURNS_MAX, round(drawn)))


def sampled(task_id: str, sample_index: int, observation: Observation) -> Completion:
    """The model's answer. A turn of the rollout is one command; the last one hands in.

    A first step that is asked for again before a second one was is the call in flight when its trainer was killed, and
    gets the same answer, as by a seed. After that it is another rollout in its place, which is drawn anew.
    """
    path = DRAWN / f"{task_id}-{sample_index}"
    asked = path.read_text().split() if path.exists() else []
    draw = sum(turn == "0" and after != "0" for turn, after in pairwise(asked))
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{observation.turn}\n".encode())
    os.close(fd)
    if observation.turn:
        first = next(message for message in observation.messages if message["role"] == "assistant")
        turns = int(json.loads(first["content"])["turns"])
    else:
        turns = length(task_id, sample_index, draw)
    ids = tuple(random.Random(f"{task_id} {observation.turn}").choices(range(50_000), k=16))
    return Completion(
        model="drawn",
        text=json.dumps({"turn": observation.turn, "turns": turns, "sample": sample_index}),
        completion_ids=ids,
        logprobs=tuple(-0.5 for _ in ids),
        policy_version=1,
    )


def calls_in(text: str) -> tuple[ToolCall, ...]:
    """What a completion's text asks for."""
    said = json.loads(text)
    turn, turns = said["turn"], said["turns"]
    if turn == turns:
        return (call_to("submit"),)
    lucky = "+" if turn == turns - 1 and said["sample"] % 2 else ""
    if turn % 4 == 3:
        return (call_to("python", code=f"open('{WORK}', 'a').write('{turn}{lucky}\\n')"),)
    return (call_to("bash", command=f"echo {turn}{lucky} >> {WORK}"),)


class Policy:
    """Plays a rollout to its drawn length."""

    name = "drawn"

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        await asyncio.sleep(think_s(task.task_id, sample_index, observation.turn))
        completion = sampled(task.task_id, sample_index, observation)
        calls = calls_in(completion.text)
        return Step(tool_calls=calls, completion=completion, is_last=calls[0].name == "submit")


def think_s(task_id: str, sample_index: int, turn: int) -> float:
    """How long the model takes for a step, the same in every run."""
    return random.Random(f"{task_id} {sample_index} {turn} s").expovariate(1 / THINK_S_MEAN)
