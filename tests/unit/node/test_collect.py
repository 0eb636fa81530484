"""Head and tail of a long output."""

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from barchan.backends.guest import GuestConnection, GuestProcess
from barchan.node.collect import HELD_S, Collector, HeadTail
from barchan.wire import guest as wire


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


class _Connection:
    """What a process needs of its connection here: a loop, and somewhere to send ACKs."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.link = self

    def send(self, data: bytes) -> None:
        """Nobody reads them."""


def _exit(stdout_end: int) -> wire.Exit:
    fields: dict[str, Any] = dict.fromkeys(wire.Exit.__struct_fields__, 0)
    return wire.Exit(**{**fields, "handle": 1, "stdout_end": stdout_end})


async def test_an_exit_that_overtakes_output_does_not_end_the_collecting() -> None:
    """EXIT does not wait for ACKs: the rest of what the process wrote comes behind it."""
    process = GuestProcess(cast(GuestConnection, _Connection()), "p", wire.Started(1, 1, False))
    collector = Collector(100)
    process.readers.append(collector)
    process.take_output(wire.Output(1, wire.STDOUT, 0, b"abc"))
    process.take_exit(_exit(6))
    assert not collector.done.done()
    process.take_output(wire.Output(1, wire.STDOUT, 3, b"def"))
    assert collector.done.done()
    assert collector.streams[wire.STDOUT].value() == (b"abcdef", True)


async def test_a_loss_at_the_end_is_told_and_waits_for_nothing() -> None:
    """An empty OUTPUT frame at a later offset says that what was before it is gone."""
    process = GuestProcess(cast(GuestConnection, _Connection()), "p", wire.Started(1, 1, False))
    collector = Collector(100)
    process.readers.append(collector)
    process.take_exit(_exit(6))
    process.take_output(wire.Output(1, wire.STDOUT, 6, b""))
    assert collector.done.done()
    assert collector.streams[wire.STDOUT].value() == (b"", False)


async def test_more_than_is_kept_is_taken_at_a_bounded_rate() -> None:
    """Up to there at once, and from then on a window at a time: nobody floods the node."""
    connection = _Connection()
    process = GuestProcess(cast(GuestConnection, connection), "p", wire.Started(handle=1, pid=2, existing=False))
    collector = Collector(wire.WINDOW_BYTES)
    process.readers.append(collector)
    collector.process = process
    for index in range(8):
        offset = index * wire.WINDOW_BYTES // 4
        process.take_output(
            wire.Output(handle=1, stream=wire.STDOUT, offset=offset, data=bytes(wire.WINDOW_BYTES // 4))
        )
    assert collector.consumed[wire.STDOUT] == wire.WINDOW_BYTES
    await asyncio.sleep(2 * HELD_S)
    assert collector.consumed[wire.STDOUT] == 2 * wire.WINDOW_BYTES
