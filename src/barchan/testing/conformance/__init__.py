"""The checks of the conformance suite, by area. `CHECKS` has them in the order in which they run."""

from typing import Final

from barchan.testing.check import Check, checks_of
from barchan.testing.conformance import (
    deaths,
    files,
    isolation,
    limits,
    lives,
    programs,
    signals,
    state,
    streams,
    terminals,
)

# Those that kill nodes come last, so that what is wrong with the rest is told first.
CHECKS: Final[tuple[Check, ...]] = checks_of(
    (programs, streams, terminals, signals, files, limits, isolation, lives, state, deaths)
)
