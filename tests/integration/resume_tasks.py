"""A task whose every command says once that it ran, and a policy that never samples the same twice.

Each line of the work file is `LABEL NONCE`: written by the command itself, with a nonce that was drawn when the step
was sampled. So the file tells whether a command ran twice, and whether a step that was sampled was sampled again.
"""

import json
import secrets
from collections.abc import Callable
from pathlib import Path

from barchan.rollout.calls import Observation, ToolCall, call_to
from barchan.rollout.policies import Step
from barchan.rollout.record import Completion
from barchan.rollout.task import FileArtifact, ScriptGrader, Task

WORK = "/tmp/work"
NONCE = r"\b[0-9a-f]{12}\b"
LABELS = ("T0", "T1", "T2a", "T2b", "T5")
# Programs that can be seen from the host while they run, each by its own argument.
SLOW_PYTHON, SLOW_SHELL, SLOW_GRADER = "0.2000001", "0.2000002", "0.2000003"
_GRADE = (
    f"sleep {SLOW_GRADER}; mkdir -p /logs/verifier; labels=$(cut -d' ' -f1 {WORK} | tr '\\n' ' '); "
    f'if [ "$labels" = "{" ".join(LABELS)} " ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'
)

TASK = Task(
    task_id="counted",
    instruction="Write down each step that you take.",
    grader=ScriptGrader(command=_GRADE),
    artifact=FileArtifact(path=WORK),
    oracle=(call_to("bash", command=f"printf '%s x\\n' {' '.join(LABELS)} > {WORK}"), call_to("submit")),
)


def tasks() -> list[Task]:
    return [TASK]


def labels_of(sample_index: int) -> tuple[str, ...]:
    """What a rollout writes down, once each: every other one leaves the last out, and so is worth 0."""
    return LABELS[:-1] if sample_index % 2 else LABELS


def reward_of(sample_index: int) -> float:
    return float(labels_of(sample_index) == LABELS)


def calls_of(sample_index: int, turn: int, nonce: str) -> list[ToolCall]:
    """The calls of a turn: a shell that stays, a program of its own, two calls at once, and a tool that reads a file
    before it writes it.
    """
    last = f"echo T5 {nonce} >> work; " if sample_index % 2 == 0 else ""
    turns = [
        [call_to("bash", command=f"cd /tmp; mark=kept; echo T0 {nonce} >> work; echo $$ > shell")],
        [
            call_to(
                "python",
                code=f"open('{WORK}', 'a').write('T1 {nonce}\\n')\n"
                f"import subprocess\nsubprocess.run(['sleep', '{SLOW_PYTHON}'])\nprint('T1 said')",
            )
        ],
        [
            call_to("bash", command=f"echo T2a {nonce} >> work"),
            call_to("bash", command=f"echo T2b {nonce} >> work; sleep {SLOW_SHELL}; pwd; echo $mark"),
        ],
        [call_to("edit", command="create", path="/tmp/note", file_text="one\n")],
        [call_to("edit", command="str_replace", path="/tmp/note", old_str="one", new_str="two")],
        [call_to("bash", command=f"{last}cat note; [ $$ = $(cat shell) ] && echo one shell")],
        [call_to("submit")],
    ]
    return turns[turn]


TURNS = 7
samples = Path("/dev/null")  # where the policy says that it was asked, a line each


def idle(turn: int) -> None:
    """Nothing more happens while the model is asked."""


asked: Callable[[int], None] = idle  # a process that ends at its step has its own


def sampled(sample_index: int, turn: int) -> Completion:
    """Ask the model: its text is the calls as JSON, its tokens are drawn anew each time."""
    nonce = secrets.token_hex(6)
    with samples.open("a") as file:
        file.write(f"{sample_index} {turn} {nonce}\n")
    asked(turn)
    calls = [{"name": call.name, "arguments": call.arguments} for call in calls_of(sample_index, turn, nonce)]
    ids = tuple(secrets.randbelow(50_000) for _ in range(3 + secrets.randbelow(5)))
    return Completion(
        model="drawn",
        text=json.dumps({"turn": turn, "nonce": nonce, "calls": calls}),
        completion_ids=ids,
        logprobs=tuple(-0.1 for _ in ids),
        policy_version=1 + turn // 4,
    )


def calls_in(text: str) -> tuple[ToolCall, ...]:
    """The calls that a completion's text holds."""
    return tuple(ToolCall(name=call["name"], arguments=call["arguments"]) for call in json.loads(text)["calls"])


class Policy:
    """Takes the task's turns, one after the other."""

    name = "drawn"

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        completion = sampled(sample_index, observation.turn)
        calls = calls_in(completion.text)
        return Step(tool_calls=calls, completion=completion, is_last=observation.turn == TURNS - 1)
