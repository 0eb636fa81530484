"""What is known of a run's rollouts for its circuit breaker: which image, endpoint and node each has."""

import time
from collections.abc import Iterator, Mapping

from barchan.rollout.breaker import Breaker, BreakerTerms, Factor, Outcome, Running, Trip
from barchan.rollout.record import RolloutRecord
from barchan.rollout.task import Task


class Watch:
    """Looks at the rollouts of one run, of this process, as they begin and end.

    Args:
        template: The image of tasks that bring none.
        endpoint: The model's server; empty: it is not known.
    """

    def __init__(self, terms: BreakerTerms, template: str, endpoint: str = "") -> None:
        self._breaker = Breaker(terms)
        self._template = template
        self._endpoint = endpoint
        self._node = ""
        self._began: dict[str, tuple[float, Task]] = {}

    def began(self, rollout_id: str, task: Task) -> None:
        """A rollout is under way."""
        self._began[rollout_id] = time.monotonic(), task

    def ended(self, row: RolloutRecord, task: Task) -> Trip | None:
        """One is over: what has to stop now, if anything."""
        now = time.monotonic()
        began, _ = self._began.pop(row.rollout_id, (now, task))
        if row.agent_sandbox_id is not None:
            self._node = f"node_{row.agent_sandbox_id.split('_')[1]}"
        ended = Outcome(row.rollout_id, row.task_id, row.verdict, self._factors(task), now - began)
        return self._breaker.add(ended, self._running)

    def forget(self, rollout_id: str) -> None:
        """It goes on elsewhere."""
        self._began.pop(rollout_id, None)

    def _running(self) -> Iterator[Running]:
        now = time.monotonic()
        for began, task in self._began.values():
            yield Running(task.task_id, self._factors(task), now - began)

    def _factors(self, task: Task) -> Mapping[Factor, str]:
        recipe = task.environment.recipe  # what lies above the image that it begins with is each task's own
        image = recipe.origin if recipe is not None else self._template
        return {"image": image, "endpoint": self._endpoint, "node": self._node}
