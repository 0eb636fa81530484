"""What each treatment of void rollouts reports, and does to a batch, where the truth is known.

    python -m bench.bias
    python -m bench.bias --groups 200000 --flat 0.05

Tasks have a true pass rate p ~ Beta(1.2, 1.8); a group has 8 attempts, each of which passes with p, and is hit by the
infrastructure with 0.02 + 0.25 (1 - p): harder tasks run longer, and so are hit more often. A second part is about
length: successes are longer than failures, and an interruption hits with a hazard per unit of length.
"""

import argparse
import math
import random
from collections.abc import Sequence

from msgspec import Struct

from barchan.rollout.baselines import group_advantages
from barchan.rollout.bias import Bias, BiasRow, bias_of

SIZE = 8
HAZARD = 0.01


class Treatment(Struct, frozen=True, kw_only=True):
    """What one treatment of void rows does.

    Attributes:
        reported: The mean reward that it reports.
        pushed_down: Share of the true successes whose advantage is negative.
        advantage: Mean of those that are trained on.
        informative: Share of all rollouts that are trained on with an advantage other than 0.
        true_p: Mean true pass rate of the tasks of what is trained on.
    """

    name: str
    reported: float
    pushed_down: float
    advantage: float
    informative: float
    true_p: float


class Groups(Struct, frozen=True, kw_only=True):
    """One row per rollout: its group, its task's true pass rate, whether it passed, whether it was hit."""

    group: list[int]
    p: list[float]
    passed: list[bool]
    void: list[bool]


class Lengths(Struct, frozen=True, kw_only=True):
    """Pass rate and mean length of what is left after interruptions; `work` is what it took, over its own length."""

    name: str
    reported: float
    length: float
    work: float


def groups_of(count: int, seed: int, flat: float | None = None) -> Groups:
    """Groups with a known truth.

    Args:
        flat: The same failure rate for all, in place of one that rises with difficulty.
    """
    rng = random.Random(f"{seed}/groups")
    made = Groups(group=[], p=[], passed=[], void=[])
    for group in range(count):
        p = rng.betavariate(1.2, 1.8)
        fails = 0.02 + 0.25 * (1 - p) if flat is None else flat
        for _ in range(SIZE):
            made.group.append(group)
            made.p.append(p)
            made.passed.append(rng.random() < p)
            made.void.append(rng.random() < fails)
    return made


def treatments(made: Groups) -> list[Treatment]:
    """Each treatment on the same groups. Only `exclude` is what a run does."""
    zeros = [float(passed and not void) for passed, void in zip(made.passed, made.void, strict=True)]
    kept = [not void for void in made.void]
    whole: dict[int, bool] = {}
    for group, is_kept in zip(made.group, kept, strict=True):
        whole[group] = whole.get(group, True) and is_kept
    everything = [True] * len(zeros)
    return [
        _treated("truth", made, [float(passed) for passed in made.passed], everything, everything),
        _treated("score as 0", made, zeros, everything, everything),
        _treated("mask the loss only", made, zeros, everything, kept),
        _treated("exclude", made, zeros, kept, kept),
        _treated("drop the group", made, zeros, groups := [whole[group] for group in made.group], groups),
    ]


def _treated(
    name: str, made: Groups, rewards: Sequence[float], votes: Sequence[bool], trained: Sequence[bool]
) -> Treatment:
    """A treatment is who votes in the baseline, and who is trained on."""
    found = group_advantages(rewards, made.group, votes, min_valid=1)
    rows = [index for index, is_trained in enumerate(trained) if is_trained]
    successes = sum(made.passed)
    is_masked_only = votes != trained
    reported = [reward for reward, vote in zip(rewards, votes, strict=True) if vote]
    return Treatment(
        name=name,
        reported=_mean(reported),
        pushed_down=sum(made.passed[index] and found.advantages[index] < 0 for index in rows) / successes,
        advantage=_mean([found.advantages[index] for index in rows]) if is_masked_only else _mean(found.advantages),
        informative=sum(found.advantages[index] != 0.0 for index in rows) / len(rewards),
        true_p=_mean([made.p[index] for index in rows]),
    )


def bias_report(made: Groups) -> Bias:
    """What `barchan rollout` would report of these groups, each of a task of its own."""
    rows = [
        BiasRow(f"g{group}", f"t{group}", 1.0, "void" if void else "scored", None if void else float(passed))
        for group, passed, void in zip(made.group, made.passed, made.void, strict=True)
    ]
    return bias_of(rows)


def lengths_of(count: int, seed: int) -> list[Lengths]:
    """Interruptions with a hazard per unit of length: dropped, tried again from scratch, or resumed."""
    rng = random.Random(f"{seed}/lengths")

    def drawn() -> tuple[bool, float]:
        passed = rng.random() < 0.4
        return passed, rng.lognormvariate(3.4, 0.6) if passed else rng.lognormvariate(3.0, 0.7)

    true, dropped, again, work = [], [], [], 0.0
    for _ in range(count):
        first = drawn()
        true.append(first)
        tried, cut = first, rng.expovariate(HAZARD)
        if cut >= first[1]:
            dropped.append(first)
        while cut < tried[1]:
            work += cut
            tried, cut = drawn(), rng.expovariate(HAZARD)
        work += tried[1]
        again.append(tried)
    return [
        _lengths("truth", true, 1.0),
        _lengths("drop", dropped, 1.0),
        _lengths("from scratch", again, work / sum(length for _, length in again)),
        _lengths("resume", true, 1.0),
    ]


def _lengths(name: str, rows: Sequence[tuple[bool, float]], work: float) -> Lengths:
    return Lengths(
        name=name,
        reported=_mean([passed for passed, _ in rows]),
        length=_mean([length for _, length in rows]),
        work=work,
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flat", type=float, help="one failure rate for all tasks")
    args = parser.parse_args()
    made = groups_of(args.groups, args.seed, args.flat)
    print(f"{args.groups} groups of {SIZE}, seed {args.seed}, {_mean(made.void):.1%} void")
    print(f"{'void rows':20} {'reported':>9} {'pushed down':>12} {'advantage':>10} {'with signal':>12} {'true p':>7}")
    for row in treatments(made):
        print(
            f"{row.name:20} {row.reported:9.3f} {row.pushed_down:12.1%} {row.advantage:+10.3f} "
            f"{row.informative:12.2f} {row.true_p:7.3f}"
        )
    found = bias_report(made)
    print(
        f"as a run reports it: mean {found.reward_mean:.3f}, by task {found.reward_by_task:.3f}, "
        f"voids as 0 {found.reward_if_zero:.3f}, "
        f"{found.groups_dropped} of {found.groups} groups dropped {found.reward_if_dropped:.3f}"
    )
    for share in found.by_difficulty:
        print(f"  {share.name:10} {share.void_rate:6.1%} void of {share.rollouts}")
    print(f"\n{'interrupted':20} {'reported':>9} {'length':>8} {'work':>6}")
    for left in lengths_of(args.groups, args.seed):
        print(f"{left.name:20} {left.reported:9.3f} {left.length:8.1f} {left.work:6.2f}")


if __name__ == "__main__":
    main()
