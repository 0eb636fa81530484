"""What becomes of a lease while it lasts: beats of its holders, preemption, its end."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

BEAT_S = 5.0  # between two beats of a holder
SILENT_S = 30.0  # without a beat, a holder is taken for gone
KEEP_S = 4 * 3600.0
KEEP_S_MAX = 30 * 86_400.0

# held; nobody holds it, and its grace time runs; put aside by somebody, with its sandboxes; over
LeasePhase = Literal["held", "abandoned", "preempted", "ended"]
EndCause = Literal["ended", "abandoned", "preempted", "resumed"]
HolderId = Annotated[str, Meta(min_length=1, max_length=64)]


_ENDS: dict[EndCause, str] = {
    "ended": "ended by its client",
    "abandoned": "its client was gone for longer than its grace time",
    "preempted": "preempted, and not gone on with in time",
    "resumed": "preempted; went over to the run's next lease",
}


class LeaseBeat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A holder is alive.

    Attributes:
        holder: As it said when it began to hold the lease.
        tokens: Prompt and completion tokens that it has used since then, all added up.
    """

    holder: HolderId
    tokens: Annotated[int, Meta(ge=0)] = 0


class PreemptRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Put a lease's sandboxes aside.

    Attributes:
        keep_s: How long they are kept for whoever goes on with them; asked for again, the longer time counts.
        by: Who wants it, for those who are told.
    """

    keep_s: Annotated[float, Meta(gt=0, le=KEEP_S_MAX)] = KEEP_S
    by: Annotated[str, Meta(max_length=128)] = ""


class Preemption(Struct, frozen=True, kw_only=True):
    """By whom a lease was preempted, when, and until when its sandboxes are kept; wall time."""

    by: str
    at_unix_s: float
    until_unix_s: float


class LeaseEnd(Struct, frozen=True, kw_only=True):
    """How a lease ended.

    Attributes:
        cause: `ended` by its holder; `abandoned` beyond its grace time; `preempted`, and not gone on with in time;
            `resumed`: all of its sandboxes went over to other leases.
        sandboxes: How many it had then; they ended with it.
    """

    cause: EndCause
    at_unix_s: float
    sandboxes: int

    @property
    def why(self) -> str:
        """The cause in words."""
        return _ENDS[self.cause]
