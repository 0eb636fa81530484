"""A problem to attempt, as rollouts see it."""

from msgspec import Struct

from barchan.rollout.calls import ToolCall
from barchan.rollout.limits import Limits

TOOLS = ("bash", "python", "edit", "submit")


class Task(Struct, frozen=True, kw_only=True):
    """A function to write, and the trusted code that checks it.

    Attributes:
        prompt: What the policy is given: imports, helper functions, and the entry point's signature and docstring.
        entry_point: Name of the function that is called.
        reference: A known-good solution, whole: the oracle's answer and the grader's control.
        checks: Trusted Python source that defines `check(candidate)`; after each of its assertions it calls
            `__passed__(index)` with that assertion's index.
        checks_total: How many assertions `checks` has; a pass is all of them.
        tools: What the policy may call: names of our own tools, or `module:Class` for one of the task's
            (`barchan.rollout.tools`).
        limits: How far one attempt may go.
        script: A known-good attempt as tool calls, one a turn; the oracle plays it where there is one.
    """

    task_id: str
    prompt: str
    entry_point: str
    reference: str
    checks: str
    checks_total: int
    tools: tuple[str, ...] = TOOLS
    limits: Limits = Limits()
    script: tuple[ToolCall, ...] = ()
