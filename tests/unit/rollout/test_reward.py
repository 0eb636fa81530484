"""What a grader may give as a reward, and what is none."""

from typing import Any

import pytest

from barchan.rollout.graders.reward import reward_of

pytestmark = pytest.mark.timeout(30)


class Scalar:
    """As numpy and torch have them."""

    def __float__(self) -> float:
        return 0.25


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, (1.0, {})),
        (True, (1.0, {})),
        (-0.5, (-0.5, {})),
        (Scalar(), (0.25, {})),
        ({"reward": 0.5, "speed": 3, "ok": False}, (0.5, {"speed": 3.0, "ok": 0.0})),
        ({"score": 0.75}, (0.75, {})),
    ],
)
def test_rewards(value: Any, expected: tuple[float, dict[str, float]]) -> None:
    """Numbers, what can be one, and objects of them with the reward apart from the metrics."""
    assert reward_of(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1.0",
        b"1",
        [1.0],
        {},
        {"a": 1, "b": 2},
        {"reward": "1"},
        {"reward": 1, "note": "good"},
        {"reward": {"reward": 1}},
        float("nan"),
        float("inf"),
        10**400,
    ],
)
def test_no_rewards(value: Any) -> None:
    """Texts, nothing, several candidates and what is not finite are refused with a reason."""
    with pytest.raises(ValueError) as refused:
        reward_of(value)
    assert str(refused.value)
