"""Baselines of groups, for lists, arrays and tensors: void rows have no vote."""

import math
import sys
from types import ModuleType
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.errors import InvalidSpec
from barchan.rollout.baselines import group_advantages

pytestmark = pytest.mark.timeout(30)


def test_a_void_row_has_no_vote() -> None:
    """1, void, 0, 0: two thirds and a third below; the void row, whatever its reward says, has nothing."""
    for rewards, valid in (([1.0, None, 0.0, 0.0], None), ([1.0, 1.0, 0.0, 0.0], [True, False, True, True])):
        found = group_advantages(rewards, ["g"] * 4, valid, normalize="none")
        assert found.advantages == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3])
        assert found.mask == [True, False, True, True]
        assert found.means == pytest.approx([1 / 3] * 4)
        assert found.stds == pytest.approx([math.sqrt(1 / 3)] * 4)


def test_arrays_stay_arrays() -> None:
    """numpy in, numpy out, with groups and validity as arrays, too; NaN is void."""
    rewards = numpy.array([1.0, numpy.nan, 0.0, 0.0, 1.0, 1.0])
    groups = numpy.array([0, 0, 0, 0, 1, 1])
    found = group_advantages(rewards, groups, numpy.array([True] * 6), normalize="none")
    assert all(isinstance(column, numpy.ndarray) for column in found)
    assert found.mask.dtype == bool
    assert found.advantages == pytest.approx(numpy.array([2 / 3, 0, -1 / 3, -1 / 3, 0, 0]))
    assert found.informative.tolist() == [True, False, True, True, False, False]


class Tensor(list[Any]):
    """As much of a tensor as is asked for."""

    def __init__(self, values: list[Any], dtype: str = "float32", device: str = "cpu") -> None:
        super().__init__(values)
        self.dtype, self.device = dtype, device

    def tolist(self) -> list[Any]:
        return list(self)

    def is_floating_point(self) -> bool:
        return self.dtype.startswith("float") or self.dtype == "bfloat16"


def test_tensors_stay_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same type and on the same device; torch is only looked for where the caller has imported it."""
    torch = ModuleType("torch")
    vars(torch).update(
        Tensor=Tensor, tensor=lambda values, **how: Tensor(values, **how), float32="float32", bool="bool"
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = group_advantages(Tensor([1.0, 0.0], "float64", "cuda:1"), Tensor([3, 3], "int64"), normalize="none")
    assert (found.advantages, found.advantages.dtype, found.advantages.device) == ([0.5, -0.5], "float64", "cuda:1")
    assert (found.mask, found.mask.dtype) == ([True, True], "bool")
    assert group_advantages(Tensor([1, 0], "int64"), [3, 3]).stds.dtype == "float32"


def test_lengths_and_bounds_are_checked() -> None:
    """Columns of different lengths, and a bound below which there is no baseline."""
    with pytest.raises(InvalidSpec, match="2 rewards, 1 groups"):
        group_advantages([1.0, 0.0], ["g"])
    with pytest.raises(InvalidSpec, match="at least 2"):
        group_advantages([1.0], ["g"], leave_one_out=True, min_valid=1)


ROWS = st.lists(st.tuples(st.integers(0, 2), st.none() | st.floats(-5, 5)), max_size=20)


@given(ROWS, st.booleans())
def test_void_rows_change_nothing(rows: list[tuple[int, float | None]], leave_one_out: bool) -> None:
    """With and without the void rows, the others have the same advantages; those of a group add up to nothing."""
    asked: dict[str, Any] = {"leave_one_out": leave_one_out, "min_valid": 2}
    found = group_advantages([reward for _, reward in rows], [group for group, _ in rows], **asked)
    kept = [row for row in rows if row[1] is not None]
    alone = group_advantages([reward for _, reward in kept], [group for group, _ in kept], **asked)
    assert [value for value, row in zip(found.advantages, rows, strict=True) if row[1] is not None] == alone.advantages
    for group in range(3):
        values = [value for value, row in zip(found.advantages, rows, strict=True) if row[0] == group]
        assert math.fsum(values) == pytest.approx(0.0, abs=1e-6)
