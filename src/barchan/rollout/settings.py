"""How a run is carried out."""

from msgspec import Struct

from barchan.rollout.graders.functions import GradingLimits


class RunSettings(Struct, frozen=True, kw_only=True):
    """The same for every rollout of a run.

    Attributes:
        group: Attempts at each task.
        concurrency: Rollouts at once. Each holds one sandbox at a time: the agent's ends before the grader's begins.
        capacity_wait_s: How long a rollout waits, in total, for a node that has no room; then it is void.
        grading: What a candidate may use while it is graded.
    """

    run_id: str
    template: str
    group: int = 1
    concurrency: int = 16
    memory_mib: int = 512
    pids_max: int = 128
    capacity_wait_s: float = 300.0
    grading: GradingLimits = GradingLimits()
