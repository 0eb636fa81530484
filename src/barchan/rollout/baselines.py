"""What a group's rewards say of each of its members. Void rows are excluded: from the mean, the standard deviation, and
from what is trained on.

Lists in, lists out; numpy arrays and torch tensors in, the same out. Neither library is imported here.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from barchan.errors import InvalidSpec

# Rewards closer together than this (times the largest, where that is above 1) are the same: they differ by arithmetic.
SAME_REWARD = 1e-9
Normalize = Literal["std", "none"]


class GroupAdvantages(NamedTuple):
    """One place per row, in the rows' order: lists, or of the kind that the rewards were.

    Attributes:
        advantages: 0 where masked.
        mask: Whether the row may be trained on: valid, in a group with enough that are.
        informative: Whether the rewards of its group differ; where they do not, all its advantages are 0.
        means, stds: Of its group's valid rewards; NaN where there is none, or (stds, of a sample) fewer than two.
    """

    advantages: Any
    mask: Any
    informative: Any
    means: Any
    stds: Any


def group_advantages(
    rewards: Any,
    groups: Iterable[Hashable],
    valid: Any = None,
    *,
    normalize: Normalize = "std",
    leave_one_out: bool = False,
    min_valid: int | None = None,
    sizes: dict[Hashable, int] | None = None,
) -> GroupAdvantages:
    """How much better each row was than its group, over the valid ones alone.

    Args:
        rewards: A sequence, array or tensor of numbers. None and NaN are void.
        groups: The group of each row.
        valid: Whether each row is; beside void rewards, rows that are not have no vote.
        normalize: `std` divides by the standard deviation of the group's valid rewards (that of a sample: n - 1).
        leave_one_out: The baseline of each is the mean of the others, not of all.
        min_valid: A group with fewer valid rows is masked whole. None: half of its members, and at least 2.
        sizes: Members of each group, where they are not its rows.

    Raises:
        InvalidSpec: Lengths that differ; `min_valid` below 1, or below 2 with `leave_one_out`.
    """
    check_min_valid(min_valid, leave_one_out)
    given = [math.nan if reward is None else float(reward) for reward in _plain(rewards)]
    keys = list(_plain(groups))
    is_valid = [True] * len(given) if valid is None else [bool(one) for one in _plain(valid)]
    if not len(given) == len(keys) == len(is_valid):
        raise InvalidSpec(f"{len(given)} rewards, {len(keys)} groups, {len(is_valid)} marks of validity")
    rows: defaultdict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        rows[key].append(index)
    count = len(given)
    advantages, mask, informative = [0.0] * count, [False] * count, [False] * count
    means, stds = [math.nan] * count, [math.nan] * count
    for key, members in rows.items():
        scored = [index for index in members if is_valid[index] and not math.isnan(given[index])]
        values = [given[index] for index in scored]
        if values:
            mean, std = mean_and_std(values)
            for index in members:
                means[index], stds[index] = mean, std
        size = len(members) if sizes is None else sizes.get(key, len(members))
        if not values or len(values) < least_valid(size, min_valid):
            continue
        found = advantages_in(values, normalize, leave_one_out)
        for place, index in enumerate(scored):
            mask[index], informative[index] = True, found is not None
            advantages[index] = found[place] if found is not None else 0.0
    return GroupAdvantages(
        _like(rewards, advantages),
        _like(rewards, mask),
        _like(rewards, informative),
        _like(rewards, means),
        _like(rewards, stds),
    )


def least_valid(size: int, min_valid: int | None) -> int:
    """How many of a group's members must be scored for it to be used."""
    return max(2, math.ceil(size / 2)) if min_valid is None else min_valid


def check_min_valid(min_valid: int | None, leave_one_out: bool) -> None:
    """Refuse a bound under which there is no baseline.

    Raises:
        InvalidSpec: It is below 1, or below 2 with `leave_one_out`.
    """
    least = 2 if leave_one_out else 1
    if min_valid is not None and min_valid < least:
        raise InvalidSpec(f"min_valid={min_valid}: it is at least {least}")


def mean_and_std(rewards: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard deviation of a sample: NaN where there is only one."""
    mean = math.fsum(rewards) / len(rewards)
    if len(rewards) < 2:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def advantages_in(rewards: Sequence[float], normalize: Normalize, leave_one_out: bool) -> list[float] | None:
    """The advantages within one group; None where its rewards are all the same."""
    if max(rewards) - min(rewards) <= SAME_REWARD * max(1.0, *map(abs, rewards)):
        return None
    count = len(rewards)
    mean, std = mean_and_std(rewards)
    # The mean of the others is as far from the reward as the mean of all, times n / (n - 1).
    scale = count / (count - 1) if leave_one_out else 1.0
    if normalize == "std":
        scale /= std
    return [(reward - mean) * scale for reward in rewards]


def _plain(values: Any) -> Any:
    """Arrays and tensors as lists, wherever they lie."""
    return values.tolist() if hasattr(values, "tolist") else values


def _like(given: Any, values: list[Any]) -> Any:
    """Values of the kind that was given: its library, and, where it has one, its device."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(given, torch.Tensor):
        is_number = bool(values) and isinstance(values[0], float)
        dtype = (given.dtype if given.is_floating_point() else torch.float32) if is_number else torch.bool
        return torch.tensor(values, dtype=dtype, device=given.device)
    if numpy is not None and isinstance(given, numpy.ndarray):
        return numpy.asarray(values)
    return values
