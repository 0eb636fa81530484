"""What a policy is told at the start, and when it says nothing that can be carried out."""

from barchan.rollout.calls import Message
from barchan.rollout.task import Task

ANSWER_NOW = (
    "Complete the following Python function. Answer with one ```python code block that contains "
    "the whole function and whatever it needs.\n\n```python\n{prompt}```"
)
WORK_ON_IT = (
    "Complete the following Python function in the file solution.py: the whole function and whatever it needs. "
    "Use the tools to write it and to try it out, then call submit.\n\n```python\n{prompt}```"
)
NO_CALL = "You called no tool. Go on with one, or call submit when you are done."


def opening(task: Task) -> tuple[Message, ...]:
    """The first messages. Who has one turn only sees no tool's result, and is asked for the answer itself."""
    text = ANSWER_NOW if task.limits.turns_max == 1 else WORK_ON_IT
    return ({"role": "user", "content": text.format(prompt=task.prompt)},)
