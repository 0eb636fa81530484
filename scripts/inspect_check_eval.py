"""A small evaluation: a scripted model that uses inspect_ai's tools in sandboxes of ours, found by their entry point.

`python scripts/inspect_check_eval.py BACKEND STATE_DIR IMAGE`, run by `scripts/inspect_check.py`.
"""

import sys
import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash, python, text_editor
from inspect_ai.util import SandboxEnvironmentSpec

from barchan.compat.inspect_ai.config import BarchanConfig

MODEL = "mockllm/model"
SAMPLES = 4
ANSWER = "42 from the file"
CALLS = (
    ("bash", {"command": "cat given.txt && id -un && test -x done.sh"}),
    ("python", {"code": "print(open('given.txt').read().strip() + ' from the file', file=open('out.txt', 'w'))"}),
    ("text_editor", {"command": "view", "path": "/home/agent/out.txt"}),
    ("bash", {"command": "echo said; exit 3"}),
)
EXPECTED = ("42\nagent\n", "", ANSWER, "said")


def scripted() -> list[ModelOutput]:
    """The same turns for every sample: they play one after the other."""
    turns = [ModelOutput.for_tool_call(MODEL, name, arguments) for name, arguments in CALLS]
    turns.append(ModelOutput.from_content(MODEL, f"The answer is {ANSWER}."))
    for turn in turns:
        turn.usage = ModelUsage()  # which would else be counted by a tokenizer from the network
    return turns


def main() -> None:
    backend, state_dir, image = sys.argv[1:]
    task = Task(
        dataset=[
            Sample(
                input="What is in the file?",
                target=ANSWER,
                files={"given.txt": "42\n"},
                setup="#!/bin/sh\ntouch done.sh; chmod +x done.sh\n",
            )
            for _ in range(SAMPLES)
        ],
        solver=[use_tools(bash(timeout=30), python(timeout=30), text_editor()), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("barchan", BarchanConfig(template=image, backend=backend, state_dir=state_dir)),
    )
    model = get_model(MODEL, custom_outputs=scripted() * SAMPLES)
    with tempfile.TemporaryDirectory(prefix="inspect-check-") as logs:
        (log,) = eval(task, model=model, max_samples=1, log_dir=logs, display="none")
        judge(log)  # which reads samples from that folder


def judge(log: EvalLog) -> None:
    """Exit with what is wrong."""
    if log.status != "success" or not log.results or not log.samples:
        sys.exit(f"the evaluation ended as {log.status}: {log.error.message if log.error else ''}")
    for sample in log.samples:
        tools = [message for message in sample.messages if message.role == "tool"]
        said = [message.error.type if message.error else message.text for message in tools]
        if len(said) != len(EXPECTED) or any(want not in got for want, got in zip(EXPECTED, said, strict=True)):
            sys.exit(f"the tools said {said}, not {EXPECTED}")
    accuracy = log.results.scores[0].metrics["accuracy"].value
    if accuracy != 1:
        sys.exit(f"accuracy {accuracy}")


if __name__ == "__main__":
    main()
