"""Rewards that are written when nobody grades any more, however their writer hides it."""

from typing import Any

import pytest

from barchan.rollout.graders.script import NoReward, _one_of
from barchan.rollout.integrity import leftovers
from barchan.rollout.integrity.leftovers import rewritten
from tests.unit.rollout.fakes import FakeFiles

pytestmark = pytest.mark.timeout(30)


class Sandbox:
    """One whose reward is another at each look; times stand still, as a guest that puts them back has it."""

    def __init__(self, *contents: bytes) -> None:
        self.files = FakeFiles()
        self._contents = list(contents)
        self.files.content["/r"] = self._contents.pop(0)

    async def sleep(self, _s: float) -> None:
        self.files.content["/r"] = self._contents.pop(0)


@pytest.mark.parametrize(
    ("contents", "is_proof"),
    [
        ((b"0", b"1", b"0", b"1", b"0"), True),
        ((b"0", b"1", b"1", b"", b"2"), True),
        ((b"0", b"0", b"1", b"1", b"1"), False),
        ((b"0", b"", b"1", b"1", b"1"), False),
        ((b"", b"", b"1", b"1", b"1"), False),
    ],
    ids=["to and fro", "twice", "a last word", "emptied and written", "a first word"],
)
async def test_what_is_written_again_and_again_is_proof(
    monkeypatch: pytest.MonkeyPatch, contents: tuple[bytes, ...], is_proof: bool
) -> None:
    """Once is none: a grader's own last word may come late."""
    sandbox: Any = Sandbox(*contents)
    monkeypatch.setattr(leftovers.asyncio, "sleep", sandbox.sleep)
    assert bool(await rewritten(sandbox, ("/r", "/missing"))) == is_proof


def test_two_rewards_are_none() -> None:
    """The one as the command had ended, and another one a moment later; a first one may come late."""
    missing = NoReward("reward_missing", "none")
    assert _one_of(missing, (1.0, {})) == (1.0, {})
    assert _one_of((1.0, {}), (1.0, {"m": 2.0})) == (1.0, {"m": 2.0})
    found = _one_of((0.0, {}), (1.0, {}))
    assert isinstance(found, NoReward) and (found.cause, "0 when" in found.why) == ("reward_malformed", True)
    assert _one_of((0.0, {}), missing) == missing
