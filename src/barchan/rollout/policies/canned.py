"""Policies that ask no model. The first two show, on every task, that the tasks, the sandboxes and the graders are
sound.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from barchan.errors import InvalidSpec, TaskError
from barchan.rollout.calls import Observation, ToolCall
from barchan.rollout.oracle import ORACLE
from barchan.rollout.policies.base import Step
from barchan.rollout.task import Task


class OraclePolicy:
    """Does what is known to be good: anything but 1.0 is our fault or the task's."""

    name = ORACLE

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        if not task.oracle:
            raise TaskError(f"task {task.task_id} has no known-good attempt for the oracle to play")
        return played(task.oracle, observation)


class NopPolicy:
    """Does nothing, or as little as the task says: anything but 0.0 means that the checks check nothing."""

    name = "nop"

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        return played(task.nop, observation)


class ScriptPolicy:
    """Makes the calls that a script holds, one a turn; whether the last one submits is up to the script.

    Args:
        scripts: By task id; the empty id is for every task that has none of its own.
    """

    name = "script"

    def __init__(self, scripts: Mapping[str, Sequence[ToolCall]]) -> None:
        self._scripts = scripts

    def script_of(self, task: Task) -> Sequence[ToolCall]:
        return self._scripts.get(task.task_id) or self._scripts.get("") or ()

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        return played(self.script_of(task), observation)


def played(script: Sequence[ToolCall], observation: Observation) -> Step:
    """The turn of a script that comes next."""
    return Step(
        tool_calls=tuple(script[observation.turn : observation.turn + 1]), is_last=observation.turn >= len(script) - 1
    )


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def read_scripts(path: Path) -> dict[str, tuple[ToolCall, ...]]:
    """Scripts from a JSON file: a list of `{"name": ..., "arguments": {...}}`, or such lists by task id.

    Raises:
        InvalidSpec: It can't be read, or holds something else; the message names the place.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[_Call] | dict[str, list[_Call]])
    except OSError as error:
        raise InvalidSpec(f"script {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidSpec(f"script {path}: {error}") from error
    scripts = found if isinstance(found, dict) else {"": found}
    return {
        task_id: tuple(ToolCall(name=call.name, arguments=bytes(call.arguments).decode()) for call in calls)
        for task_id, calls in scripts.items()
    }
