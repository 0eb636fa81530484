"""What a grader gave, as a reward and metrics. Pure."""

import math
from collections.abc import Mapping


def reward_of(value: object) -> tuple[float, dict[str, float]]:
    """A number (true and false are 1 and 0), or an object of numbers: its `reward`, or only member, is the reward, and
    the others are metrics.

    Raises:
        ValueError: It is something else, or not finite.
    """
    if not isinstance(value, Mapping):
        return _number("the reward", value), {}
    members = {str(name): _number(str(name)[:80], member) for name, member in value.items()}
    if "reward" in members:
        return members.pop("reward"), members
    if len(members) == 1:
        return members.popitem()[1], {}
    raise ValueError(f"no reward among {len(members)} members")


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float):
        try:
            value = float(value.__float__())  # type: ignore[attr-defined]  # numpy's and torch's scalars
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{name} is no number but {type(value).__name__}") from error
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is too large") from error
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number
