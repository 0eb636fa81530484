"""Calls as they are asked for: what can't be is refused before anything is sent. And their results."""

import pytest

from barchan.errors import ExecFailed, ExecTimeout, GuestOutOfMemory, InvalidSpec
from barchan.model.calls import CallResult
from barchan.sdk.aio.calls import _request
from barchan.wire import calls as wire


def test_what_a_node_would_refuse_is_not_sent() -> None:
    """Output beyond the bound, and a kind of call that fits into no frame."""
    for output, said in ((wire.OUTPUT_BYTES_MAX + 1, "at most 16777216"), (1 << 40, "at most"), (-1, "0 or more")):
        with pytest.raises(InvalidSpec, match=said):
            _request("print(1)", (), {"max_output_bytes": output})
    _request("print(1)", (), {"max_output_bytes": wire.OUTPUT_BYTES_MAX})
    with pytest.raises(InvalidSpec, match="fewer imports"):
        _request("print(1)", (), {"imports": [f"package.module_{number}" for number in range(4000)]})


def test_a_call_that_ended_badly_has_no_value() -> None:
    """Whatever it has sent before: but output that was cut says nothing about the value."""
    for result, error in (
        (CallResult(exit_code=137, signal=9, timed_out=True, returned=True, given=1), ExecTimeout),
        (CallResult(exit_code=137, signal=9, oom_killed=True, returned=True, given=1), GuestOutOfMemory),
        (CallResult(exit_code=139, signal=11, returned=True, given=1), ExecFailed),
        (CallResult(exit_code=0), ExecFailed),
    ):
        with pytest.raises(error):
            _ = result.value
    assert CallResult(exit_code=0, truncated=True, returned=True, given=1).value == 1
