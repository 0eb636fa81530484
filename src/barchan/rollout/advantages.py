"""Group-relative advantages from a run's records. Pure, and plain lists: any array library takes them as they are."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from barchan.errors import InvalidSpec
from barchan.rollout.record import RolloutRecord

# Rewards closer together than this (times the largest, where that is above 1) are the same: they differ by arithmetic.
SAME_REWARD = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """One place per record, in the records' order.

    Attributes:
        groups: The group that the record belongs to.
        rewards: NaN where nothing was scored.
        advantages: 0 where masked.
        mask: Whether the record may be trained on: scored, in a group with enough that are.
        informative: Whether the rewards of its group differ; where they do not, all its advantages are 0.
    """

    rollout_ids: list[str]
    groups: list[str]
    rewards: list[float]
    advantages: list[float]
    mask: list[bool]
    informative: list[bool]


def group_of(record: RolloutRecord) -> str:
    """The group that a record belongs to, as text."""
    return f"{record.run_id}/{record.group_index}/{record.task_id}"


def advantages(
    records: Iterable[RolloutRecord],
    *,
    normalize: Literal["std", "none"] = "std",
    leave_one_out: bool = False,
    min_valid: int | None = None,
) -> Advantages:
    """How much better each rollout was than its group, over the scored ones alone: what is void or cancelled has no
    advantage, and no vote in the baseline of its siblings.

    Args:
        normalize: `std` divides by the standard deviation of the group's scored rewards (that of a sample: n - 1).
        leave_one_out: The baseline of each is the mean of the others, not of all.
        min_valid: A group with fewer scored members is masked whole. None: half of its members, and at least 2. Members
            are the attempts that were wanted: surplus ones and earlier tries of the same place do not count.

    Raises:
        InvalidSpec: `min_valid` is below 1, or below 2 with `leave_one_out`.
    """
    least = 2 if leave_one_out else 1
    if min_valid is not None and min_valid < least:
        raise InvalidSpec(f"min_valid={min_valid}: it is at least {least}")
    rollout_ids: list[str] = []
    groups: list[str] = []
    rewards: list[float] = []
    scored: defaultdict[str, list[int]] = defaultdict(list)
    places: defaultdict[str, set[int]] = defaultdict(set)
    for index, record in enumerate(records):
        key = group_of(record)
        rollout_ids.append(record.rollout_id)
        groups.append(key)
        rewards.append(math.nan if record.verdict.reward is None else record.verdict.reward)
        if record.verdict.reward is not None:
            scored[key].append(index)
        if record.verdict.cause != "cancelled_surplus":
            places[key].add(record.sample_index)
    found = Advantages(
        rollout_ids=rollout_ids,
        groups=groups,
        rewards=rewards,
        advantages=[0.0] * len(groups),
        mask=[False] * len(groups),
        informative=[False] * len(groups),
    )
    for key, members in scored.items():
        if len(members) < (max(2, math.ceil(len(places[key]) / 2)) if min_valid is None else min_valid):
            continue
        values = _of_group([rewards[index] for index in members], normalize, leave_one_out)
        for place, index in enumerate(members):
            found.mask[index] = True
            found.informative[index] = values is not None
            found.advantages[index] = values[place] if values is not None else 0.0
    return found


def _of_group(rewards: Sequence[float], normalize: Literal["std", "none"], leave_one_out: bool) -> list[float] | None:
    """The advantages within one group; None where its rewards are all the same."""
    if max(rewards) - min(rewards) <= SAME_REWARD * max(1.0, *map(abs, rewards)):
        return None
    count = len(rewards)
    mean = math.fsum(rewards) / count
    # The mean of the others is as far from the reward as the mean of all, times n / (n - 1).
    scale = count / (count - 1) if leave_one_out else 1.0
    if normalize == "std":
        scale /= math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1))
    return [(reward - mean) * scale for reward in rewards]
