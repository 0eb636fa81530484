"""Group-relative advantages from a run's records. Pure, and plain lists: any array library takes them as they are."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from barchan.rollout.baselines import Normalize, group_advantages
from barchan.rollout.bias import Bias, Places
from barchan.rollout.record import RolloutRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """One place per record, in the records' order.

    Attributes:
        groups: The group that the record belongs to.
        rewards: NaN where nothing was scored.
        advantages: 0 where masked.
        mask: Whether the record may be trained on: scored, in a group with enough that are.
        informative: Whether the rewards of its group differ; where they do not, all its advantages are 0.
        bias: What voiding and cancelling did to the batch.
    """

    rollout_ids: list[str]
    groups: list[str]
    rewards: list[float]
    advantages: list[float]
    mask: list[bool]
    informative: list[bool]
    bias: Bias


def group_of(record: RolloutRecord) -> str:
    """The group that a record belongs to, as text."""
    return f"{record.run_id}/{record.group_index}/{record.task_id}"


def advantages(
    records: Iterable[RolloutRecord],
    *,
    normalize: Normalize = "std",
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
    rollout_ids: list[str] = []
    groups: list[str] = []
    rewards: list[float] = []
    places: defaultdict[str, set[int]] = defaultdict(set)
    batch = Places()
    for record in records:
        batch.add(record)
        key = group_of(record)
        rollout_ids.append(record.rollout_id)
        groups.append(key)
        rewards.append(math.nan if record.verdict.reward is None else record.verdict.reward)
        if record.verdict.cause != "cancelled_surplus":
            places[key].add(record.sample_index)
    found = group_advantages(
        rewards,
        groups,
        normalize=normalize,
        leave_one_out=leave_one_out,
        min_valid=min_valid,
        sizes={key: len(members) for key, members in places.items()},
    )
    return Advantages(
        rollout_ids=rollout_ids,
        groups=groups,
        rewards=rewards,
        advantages=found.advantages,
        mask=found.mask,
        informative=found.informative,
        bias=batch.bias,
    )
