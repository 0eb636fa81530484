"""The phase table: complete, final states final, illegal changes refused."""

from typing import get_args

import pytest

from barchan.core.lifecycle import TRANSITIONS, Fact, next_phase
from barchan.errors import Conflict
from barchan.model.sandbox import Phase


def test_every_phase_has_a_row() -> None:
    """A phase without a row would make `next_phase` fail with a KeyError in production."""
    assert set(get_args(Phase)) == set(TRANSITIONS)


def test_stopped_and_lost_are_final() -> None:
    """What has ended never comes back."""
    assert [TRANSITIONS["stopped"], TRANSITIONS["lost"]] == [{}, {}]


@pytest.mark.parametrize("phase", ["pending", "booting", "ready", "paused", "hibernated"])
def test_everything_alive_can_be_ended(phase: Phase) -> None:
    """A user can end a sandbox in any phase."""
    assert next_phase(phase, Fact.ENDED) == "stopped"


@pytest.mark.parametrize(
    ("phase", "fact"), [("stopped", Fact.INIT_UP), ("ready", Fact.PLACED), ("paused", Fact.FROZEN)]
)
def test_an_illegal_change_is_a_conflict(phase: Phase, fact: Fact) -> None:
    """A fact that can't happen in a phase is refused, not ignored."""
    with pytest.raises(Conflict):
        next_phase(phase, fact)


def test_only_the_platform_loses_a_sandbox() -> None:
    """`lost` follows from a failed boot, a dead init or a lost node, never from a caller's kill."""
    causes = {fact for row in TRANSITIONS.values() for fact, after in row.items() if after == "lost"}
    assert causes == {Fact.BOOT_FAILED, Fact.INIT_DIED, Fact.NODE_LOST}
