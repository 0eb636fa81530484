"""A sum that is kept while its parts change."""

from hypothesis import given
from hypothesis import strategies as st

from barchan.core.summed import Summed


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-9, 9) | st.none()), max_size=40))
def test_the_total_is_the_sum(changes: list[tuple[str, int | None]]) -> None:
    """After any sets and removals; None removes."""
    summed, plain = Summed(0), {}
    for name, number in changes:
        if number is None:
            assert summed.pop(name) == plain.pop(name, None)
        else:
            summed[name] = plain[name] = number
        assert (summed.total, len(summed)) == (sum(plain.values()), len(plain))
        assert [name in summed for name in "abcd"] == [name in plain for name in "abcd"]
        assert {name: summed[name] for name in plain} == plain


def test_rounding_does_not_add_up() -> None:
    """An empty one is exactly zero, whatever went through it."""
    summed = Summed(0.0)
    summed["a"] = 1e16
    summed["b"] = 0.1
    summed.pop("a")
    summed.pop("b")
    assert summed.total == 0.0
