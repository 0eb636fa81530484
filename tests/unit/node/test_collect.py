"""Head and tail of a long output."""

from hypothesis import given
from hypothesis import strategies as st

from barchan.node.collect import HeadTail


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=20), st.integers(0, 200))
def test_head_and_tail_are_kept(pieces: list[bytes], bytes_max: int) -> None:
    """Everything if it fits; else the first and the last half of the bound, and the flag says so."""
    kept = HeadTail(bytes_max)
    whole = b"".join(pieces)
    at = 0
    for piece in pieces:
        kept.add(at, piece)
        at += len(piece)
    value, complete = kept.value()
    assert kept.end == len(whole)
    if len(whole) <= bytes_max:
        assert (whole, True) == (value, complete)
    else:
        tail = bytes_max // 2
        assert (whole[: bytes_max - tail] + whole[len(whole) - tail :], False) == (value, complete)


def test_a_gap_makes_it_incomplete() -> None:
    """Bytes that the spool dropped are not silently joined over."""
    kept = HeadTail(100)
    kept.add(0, b"abc")
    kept.add(10, b"xyz")
    assert kept.value() == (b"abcxyz", False)
