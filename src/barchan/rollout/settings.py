"""How a run is carried out."""

from msgspec import Struct

from barchan.model.sandbox import BackendName
from barchan.rollout.breaker import BreakerTerms
from barchan.rollout.limits import GradingLimits


class RunSettings(Struct, frozen=True, kw_only=True):
    """The same for every rollout of a run.

    Attributes:
        backend: What the sandboxes of agents and graders are made by; `auto`: the node chooses.
        group: Scored attempts that are wanted at each task.
        over_sample: Attempts more than that are started; what is not among the first `group` scored is cancelled.
        refill: Times that a void attempt is tried again, in each group together, where it would else fall short.
        concurrency: Agents at once; a place is free again when the artifact has left the agent's sandbox.
        graders: Gradings at once.
        gradings: Times that each artifact is graded, but for a `shared` one; docs/verdicts.md says what becomes of
            rewards that disagree.
        capacity_wait_s: How long a rollout waits, in total, for a node that has no room; then it is void.
        lease_id: That of every sandbox; None: the client's own.
        snapshot_every: Turns from one snapshot of an agent's sandbox to the next, from which a rollout can go on where
            its sandbox is lost; 0: none.
        keep_images: Images that hold a `diff` artifact stay on the node after the grading, so that it can be repeated.
        grading: What a candidate may use while it is graded.
        breaker: When so many voids have something in common that no further rollout is begun.
    """

    run_id: str
    template: str
    backend: BackendName = "container"
    group: int = 1
    over_sample: int = 0
    refill: int = 0
    concurrency: int = 16
    graders: int = 8
    gradings: int = 1
    memory_mib: int = 512
    pids_max: int = 128
    capacity_wait_s: float = 300.0
    lease_id: str | None = None
    snapshot_every: int = 0
    keep_images: bool = False
    grading: GradingLimits = GradingLimits()
    breaker: BreakerTerms = BreakerTerms()
