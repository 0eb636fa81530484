"""A rollout's state as bytes: it comes back as it was, and nothing else comes out of such bytes."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from barchan.errors import BlobCorrupt
from barchan.model.verdict import Evidence, Verdict
from barchan.rollout import carried
from barchan.rollout.graders.base import Artifact
from barchan.rollout.limits import Limits, Meter
from barchan.rollout.record import Completion
from barchan.rollout.state import AttemptState
from barchan.sdk.aio.shell import ShellPoint


def full_state() -> AttemptState:
    state = AttemptState(meter=Meter(Limits(turns_max=3)), messages=[{"role": "user", "content": "x"}])
    state.meter.turns, state.meter.agent_s = 2, 1.5
    state.enter("policy")
    state.completions.append(Completion(text="a", completion_ids=(1, 2), logprobs=(-0.5, -1.0)))
    state.calls["bash"] += 2
    state.shell = ShellPoint(process_id="p", stdout=3, stderr=4, last_code=1)
    state.facts = (Evidence(source="limits", fact="turns", value=2),)
    state.artifact = Artifact(kind="file", data=b"\xff")
    state.sandboxes.ids["agent"].append("sb_1")
    state.verdict = Verdict(status="void", reward=None, fault="platform", cause="sandbox_lost", evidence=state.facts)
    return state


def test_a_state_comes_back_as_it_was() -> None:
    """Every field, with its type: counters still count what they did not know."""
    state = full_state()
    back = carried.load(carried.dump(state))
    assert {name: value for name, value in vars(back).items() if name != "meter"} == {
        name: value for name, value in vars(state).items() if name != "meter"
    }
    assert (back.meter.turns, back.meter.agent_s, back.meter.limits) == (2, 1.5, state.meter.limits)
    back.calls["never seen"] += 1
    back.enter("exec")
    assert back.stage == "exec"


class Program:
    """A pickle of it runs a program."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made by a pickle",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        pickle.dumps({"not": "a state"}),
        pickle.dumps(Program()),
        carried.dump(full_state())[:-20],
        b"cbarchan.rollout.carried\nkeep\n.",
        b"cbarchan.rollout.carried\nos.system\n.",
    ],
    ids=["empty", "nonsense", "another value", "a program", "cut short", "a function of ours", "through a module"],
)
def test_anything_else_is_refused(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in a run's folder gives a state or an error; it runs nothing."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BlobCorrupt, match="state"):
        carried.load(data)
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_another_release_is_refused() -> None:
    """One that lacks a field, or has another: nobody guesses at what it would be."""
    older, newer = full_state(), full_state()
    del older.said
    setattr(newer, "extra", 1)  # noqa: B010 (no type checker would let it pass)
    for state in (older, newer):
        with pytest.raises(BlobCorrupt, match="release"):
            carried.load(carried.dump(state))
