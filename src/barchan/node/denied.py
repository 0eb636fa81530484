"""Counts what one sandbox was refused, over all of its stays on disk."""

import os
import signal
from collections.abc import Iterable

from barchan.backends.guest import GuestProcess
from barchan.core.egress import EgressEvent
from barchan.model.denials import Denials

PLACES_MAX = 100


class Denied:
    """Of one sandbox. A guest that names ever other hosts makes the total grow, and nothing else."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._total = 0

    def note(self, event: EgressEvent) -> None:
        """What the proxy has decided."""
        if event.outcome != "denied":
            return
        self._total += 1
        place = f"{event.host}:{event.port}"
        if place in self._places or len(self._places) < PLACES_MAX:
            self._places[place] = self._places.get(place, 0) + 1

    def told(self, processes: Iterable[GuestProcess]) -> Denials:
        """With what the wait statuses of its programs tell."""
        statuses = [process.exit.wstatus for process in processes if process.exit is not None]
        sigsys = sum(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS for status in statuses)
        return Denials(egress=dict(self._places), egress_total=self._total, sigsys=sigsys)
