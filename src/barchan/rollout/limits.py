"""How far an attempt may go, and how far it has come. Pure: whoever meters passes what was used."""

from msgspec import Struct

from barchan.model.verdict import Cause


class Limits(Struct, frozen=True, kw_only=True):
    """The task's bounds on one attempt. Running into one ends the attempt, which is graded all the same.

    Attributes:
        turns_max: Turns; one is a model's message and the calls in it.
        tokens_max: Completion tokens, of all turns together.
        agent_s_max: Seconds in which the agent's tools run. Waiting for the model takes none, nor do the platform's own
            parts of a call where they are known.
        call_s_max: Seconds of one tool call; beyond them it is ended, and the policy is told.
        output_chars_max: Characters of one call's result; beyond them head and tail are kept.
    """

    turns_max: int = 50
    tokens_max: int = 65536
    agent_s_max: float = 1800.0
    call_s_max: float = 120.0
    output_chars_max: int = 16384


class Left(Struct, frozen=True, kw_only=True):
    """What the limits still allow."""

    turns: int
    tokens: int
    agent_s: float


class Meter:
    """Counts what an attempt uses."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.turns = 0
        self.tokens = 0
        self.agent_s = 0.0

    @property
    def left(self) -> Left:
        limits = self.limits
        return Left(
            turns=max(0, limits.turns_max - self.turns),
            tokens=max(0, limits.tokens_max - self.tokens),
            agent_s=max(0.0, limits.agent_s_max - self.agent_s),
        )

    @property
    def reached(self) -> Cause | None:
        """The limit that was run into, if any."""
        left = self.left
        if left.agent_s == 0.0:
            return "agent_timeout"
        if left.tokens == 0:
            return "context_limit"
        return "turn_limit" if left.turns == 0 else None
