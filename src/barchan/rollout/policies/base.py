"""The contract of a policy, and what it answers with."""

from typing import Protocol

from msgspec import Struct

from barchan.model.verdict import Cause
from barchan.rollout.task import Task


class Completion(Struct, frozen=True, kw_only=True):
    """One model call, kept for training: what was sampled and how likely the sampler found it.

    `tokens`, `token_ids` and `logprobs` run in parallel where the server gave them, and are empty where it did not.
    """

    model: str
    text: str
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    requests: int = 1


class Answer(Struct, frozen=True, kw_only=True):
    """A policy's attempt: the whole text of `solution.py`, and how the attempt ended.

    `cause` is `completed`, or what cut the answer short by the policy's own doing (`output_limit`, `refusal`); it is
    scored all the same.
    """

    solution: str
    cause: Cause = "completed"
    truncated: bool = False
    completion: Completion | None = None


class Policy(Protocol):
    """Answers tasks. Several calls run at once."""

    @property
    def name(self) -> str: ...

    async def answer(self, task: Task, sample_index: int) -> Answer:
        """Attempt a task.

        Raises:
            ModelError: The model could not be asked, or did not answer as a model server does; `details["cause"]`
                is one of the model's causes of `barchan.rollout.verdict`.
        """
        ...
