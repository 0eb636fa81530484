"""The contract of a policy, and what it does in a turn."""

from typing import Protocol

from msgspec import Struct

from barchan.model.verdict import Cause
from barchan.rollout.calls import Observation, ToolCall
from barchan.rollout.record import Completion
from barchan.rollout.task import Task


class Step(Struct, frozen=True, kw_only=True):
    """One turn of a policy.

    Attributes:
        tool_calls: What it wants done, in this order.
        completion: The model call behind it.
        is_last: It wants no further turn, submitted or not.
        cause: How its part ended, if not as the rollout says: `refusal`, or what cut its answer short. The last turn's
            counts.
    """

    tool_calls: tuple[ToolCall, ...] = ()
    completion: Completion | None = None
    is_last: bool = False
    cause: Cause | None = None


class Policy(Protocol):
    """Plays rollouts. It keeps nothing between turns: all it needs is in the observation. Several calls run at once."""

    @property
    def name(self) -> str: ...

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        """The next turn. What it raises voids the rollout, and is never a zero.

        Raises:
            ModelError: The model could not be asked, or did not answer as a model server does; `details["cause"]`
                is one of the model's causes of `barchan.rollout.verdict`. Any other error is the caller's fault.
        """
        ...
