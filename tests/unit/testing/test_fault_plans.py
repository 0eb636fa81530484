"""Plans of faults: what can be said, and that a seed decides all."""

import itertools
from pathlib import Path

import pytest

from barchan.errors import InvalidSpec
from barchan.testing.faults.plan import DELAY_S_MAX, KINDS, Fault, read_plan


def test_words_are_a_plan() -> None:
    """Times have units, shares may be in percent, and what is not said is the kind's own."""
    plan = read_plan(
        ["node-kill:every=2m,times=3", "init-kill:share=25%,role=grader", "oom-host:after=500ms,for=1s"], 7
    )
    assert plan.seed == 7
    assert plan.faults == (
        Fault(kind="node-kill", for_s=KINDS["node-kill"].for_s, every_s=120.0, times=3),
        Fault(kind="init-kill", for_s=0.0, share=0.25, role="grader"),
        Fault(kind="oom-host", for_s=1.0, after_s=0.5),
    )


def test_a_file_is_a_plan(tmp_path: Path) -> None:
    """With a seed of its own, which the command line's replaces."""
    path = tmp_path / "plan.toml"
    path.write_text(
        'seed = 3\n[[fault]]\nkind = "node-stop"\nevery = "20s"\n[[fault]]\nkind = "grader-kill"\nshare = 0.5\n'
    )
    plan = read_plan([str(path), "connection-cut"])
    assert (plan.seed, [fault.kind for fault in plan.faults]) == (3, ["node-stop", "grader-kill", "connection-cut"])
    assert plan.faults[1].share == 0.5
    assert read_plan([str(path)], 9).seed == 9


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("node-melt", "no fault 'node-melt'; there are: node-kill"),
        ("node-kill:share=10%", "has no 'share'; it may have for, times, every, after, each"),
        ("init-kill:every=2s", "has no 'every'; it may have for, times, share, role"),
        ("node-kill:every=soon", "every=soon: a time is a number"),
        ("node-kill:every=0", "leaves no time between"),
        ("node-kill:times=0", "a whole number, at least 1"),
        ("init-kill:share=120%", "more than 0, at most 1"),
        ("init-kill:role=boss", "a role is one of agent, grader, control"),
        ("node-kill:every", "write KIND:NAME=VALUE"),
        ("nowhere.toml", "nowhere.toml"),
    ],
)
def test_what_is_wrong_is_named(word: str, said: str) -> None:
    """A plan that can't be read is refused, with the words that can't and what would do."""
    with pytest.raises(InvalidSpec) as raised:
        read_plan([word])
    assert said in str(raised.value)


def test_no_fault_is_no_plan(tmp_path: Path) -> None:
    """An empty file injects nothing, which nobody can have meant; nor can an unknown member."""
    path = tmp_path / "empty.toml"
    path.write_text("seed = 1\n")
    with pytest.raises(InvalidSpec, match="without faults"):
        read_plan([str(path)])
    path.write_text("speed = 1\n")
    with pytest.raises(InvalidSpec, match="no 'speed' here"):
        read_plan([str(path)])


def test_moments_repeat_with_their_seed() -> None:
    """The same seed gives the same moments, around their mean; another gives others; `times` ends them."""
    plan, other = read_plan(["node-kill:every=10s,times=200"], 1), read_plan(["node-kill:every=10s,times=200"], 2)
    moments = list(plan.moments(0))
    assert moments == list(plan.moments(0)) != list(other.moments(0))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *moments])]
    assert len(gaps) == 200
    assert all(5.0 <= gap <= 15.0 for gap in gaps)
    assert 9.0 < sum(gaps) / len(gaps) < 11.0


def test_one_fault_comes_once() -> None:
    """Without `every` there is one, at once or when it is said."""
    assert list(read_plan(["node-kill"]).moments(0)) == [0.0]
    assert list(read_plan(["node-kill:after=3s"]).moments(0)) == [3.0]


def test_rollouts_are_chosen_by_seed_and_place() -> None:
    """As many as the share says, the same ones each time, each soon after it is seen."""
    plan = read_plan(["init-kill:share=20%,times=2"], 5)
    choices = [plan.chosen(0, f"-{count:06d}") for count in range(1000)]
    assert choices == [plan.chosen(0, f"-{count:06d}") for count in range(1000)]
    assert 150 < sum(choice.times == 2 for choice in choices) < 250
    assert {choice.times for choice in choices} == {0, 2}
    assert all(0.0 <= choice.delay_s <= DELAY_S_MAX for choice in choices)
    assert {choice.who for choice in choices} == {"all", "first", "last"}


def test_faults_by_how_far_a_run_is() -> None:
    """The first comes early in a run of any size, the others after about as many rollouts as is said."""
    plan = read_plan(["node-kill:each=16,times=100"], 1)
    counts = list(plan.counts(0))
    assert counts == list(plan.counts(0))
    assert len(counts) == 100
    assert counts[0] < 8
    assert 14 < (counts[-1] - counts[0]) / 99 < 18
    with pytest.raises(InvalidSpec, match="goes with no time"):
        read_plan(["node-kill:each=16,every=2s"])
