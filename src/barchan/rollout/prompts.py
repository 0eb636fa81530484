"""What a policy is told at the start, and when it says nothing that can be carried out."""

from barchan.rollout.calls import Message
from barchan.rollout.task import Task

ANSWER_NOW = (
    "Complete the following Python function. Answer with one ```python code block that contains "
    "the whole function and whatever it needs.\n\n```python\n{prompt}```"
)
NO_CALL = "You called no tool. Go on with one, or call submit when you are done."


def opening(task: Task) -> tuple[Message, ...]:
    """The first messages. Who has one turn only sees no tool's result, and is asked for the answer itself."""
    text = task.instruction
    if task.limits.turns_max == 1 and task.stub is not None:
        text = ANSWER_NOW.format(prompt=task.stub.prompt)
    return ({"role": "user", "content": text},)
