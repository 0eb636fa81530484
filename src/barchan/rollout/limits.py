"""How far an attempt may go, and how far it has come. Pure: whoever meters passes what was used."""

from dataclasses import dataclass

from msgspec import Struct

from barchan.model.verdict import Cause, Evidence


class Limits(Struct, frozen=True, kw_only=True):
    """The task's bounds on one attempt. Running into one ends the attempt, which is graded all the same.

    Attributes:
        turns_max: Turns; one is a model's message and the calls in it.
        tokens_max: Completion tokens, of all turns together.
        agent_s_max: Seconds in which the agent's tools run, of the sandbox's own time: waiting for the model takes
            none, nor does a sandbox that sleeps or is woken, nor do the platform's own parts of a call where they are
            known.
        call_s_max: Seconds of one tool call, of the same time; beyond them it is ended, and the policy is told.
        output_chars_max: Characters of one call's result; beyond them head and tail are kept.
    """

    turns_max: int = 50
    tokens_max: int = 65536
    agent_s_max: float = 1800.0
    call_s_max: float = 120.0
    output_chars_max: int = 16384


class GradingLimits(Struct, frozen=True, kw_only=True):
    """What one candidate of a `FunctionGrader` may use, over all its calls."""

    cpu_s: int = 5
    wall_s: float = 30.0
    processes: int = 32
    file_bytes: int = 16 << 20


class Left(Struct, frozen=True, kw_only=True):
    """What the limits still allow."""

    turns: int
    tokens: int
    agent_s: float


@dataclass
class Meter:
    """Counts what an attempt uses."""

    limits: Limits
    turns: int = 0
    tokens: int = 0
    agent_s: float = 0.0

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

    def facts(self, ended: Cause) -> tuple[Evidence, ...]:
        """How far the attempt came, where a limit ended it."""
        used: dict[Cause, tuple[str, float]] = {
            "turn_limit": ("turns", self.turns),
            "context_limit": ("completion tokens", self.tokens),
            "agent_timeout": ("seconds of the agent's programs", round(self.agent_s, 3)),
        }
        if ended not in used:
            return ()
        fact, value = used[ended]
        return (Evidence(source="limits", fact=fact, value=value),)
