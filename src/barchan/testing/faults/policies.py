"""A policy whose rewards are known before they are given, and what the true rewards of some policies are."""

import random

from barchan.rollout.calls import Observation, call_to
from barchan.rollout.policies.base import Step
from barchan.rollout.task import Task
from barchan.testing.faults.judge import Truth

NAME = "barchan.testing.faults.policies:HalfRight"  # on the command line
WORK = "sleep 0.2; date +%s%N >> attempts; wc -l < attempts"


class HalfRight:
    """Works a little; then does what is known to be good in about half of the attempts, and next to nothing else.

    Which, is said by `is_right`.
    """

    name = "half-right"

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        if observation.turn == 0:
            return Step(tool_calls=(call_to("bash", command=WORK),))
        script = task.oracle if is_right(task.task_id, sample_index) else task.nop
        at = observation.turn - 1
        return Step(tool_calls=tuple(script[at : at + 1]), is_last=at >= len(script) - 1)


def is_right(task_id: str, sample_index: int) -> bool:
    """Whether an attempt of `HalfRight` is a good one."""
    return random.Random(f"{task_id}/{sample_index}").random() < 0.5


def half_right(task_id: str, sample_index: int) -> float | None:
    """The true rewards of `HalfRight`."""
    return float(is_right(task_id, sample_index))


def always_right(task_id: str, sample_index: int) -> float | None:
    """The true rewards of the oracle."""
    return 1.0


def unknown(task_id: str, sample_index: int) -> float | None:
    """Those of any other policy."""
    return None


def truth_of(policy: str) -> Truth:
    """What is known of a policy's true rewards, by its name on the command line."""
    known: dict[str, Truth] = {"oracle": always_right, NAME: half_right}
    return known.get(policy, unknown)
