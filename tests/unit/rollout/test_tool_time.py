"""A tool's limit and what it is billed are of the sandbox's own time."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import Struct

from barchan.errors import ReadTimeout
from barchan.rollout.calls import call_to
from barchan.rollout.limits import Limits, Meter
from barchan.rollout.resuming.forward import forward
from barchan.rollout.state import AttemptState
from barchan.rollout.tools import Toolbox, ToolOutput, Workspace, spent
from barchan.sdk.aio.clock import AsyncSandboxClock
from barchan.sdk.aio.shell import ShellResult
from barchan.sdk.transport import Transport
from barchan.trajectory.reader import load
from barchan.wire.api import Awake
from tests.unit.rollout.fakes import FakeClient, FakeSandbox, task
from tests.unit.trajectory.logs import new_log

pytestmark = pytest.mark.timeout(30)
BOX = Toolbox(task())


class Nothing(Struct):
    """No arguments."""


class Quick:
    """A task's own tool that keeps no time."""

    name, description, arguments, keeps_time = "quick", "Is quick.", Nothing, False

    async def call(self, workspace: Workspace, arguments: Any, /, *, timeout_s: float) -> ToolOutput:
        return ToolOutput(content="done")


async def test_a_wake_is_no_time_of_the_tools() -> None:
    """However slow it is: neither a time-out nor a second of the agent's."""
    client = FakeClient()
    client.wake_s = 0.5
    workspace = Workspace(FakeSandbox(client, 1), 1000)
    for box, call in ((BOX, call_to("bash", command="true")), (Toolbox(task(tools=(f"{__name__}:Quick",))), "quick")):
        called = await box.call(workspace, call if not isinstance(call, str) else call_to(call), 0.3)
        assert called.result.status == "ok"
        assert called.agent_s < 0.4


async def test_a_sleep_in_the_middle_is_not_billed() -> None:
    """What the clock says is what counts, for a command of the shell, too."""
    client = FakeClient()
    client.exec_s = 0.5
    client.shell_result = ShellResult(exit_code=0, stdout=b"", stderr=b"")
    workspace = Workspace(FakeSandbox(client, 1), 1000)
    calling = asyncio.create_task(BOX.call(workspace, call_to("bash", command="true"), 5.0))
    await asyncio.sleep(0.1)
    client.slept_s = 0.4
    assert (await calling).agent_s < 0.4


async def test_a_call_that_was_cut_short_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had taken is noted now and then, and as it is cut; whoever goes on with it adds to that."""
    monkeypatch.setattr(spent, "NOTE_S", 0.05)
    client = FakeClient()
    client.exec_s = 0.3
    client.shell_result = ShellResult(exit_code=0, stdout=b"", stderr=b"")
    workspace, noted = Workspace(FakeSandbox(client, 1), 1000), list[float]()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.12):
            await BOX.call(workspace, call_to("bash", command="true"), 5.0, spent.Spent(0.0, noted.append))
    assert len(noted) >= 2
    assert noted == sorted(noted) and noted[-1] >= 0.1
    called = await BOX.call(workspace, call_to("bash", command="true"), 5.0, spent.Spent(100.0, noted.append))
    assert called.agent_s >= 100.25
    assert noted[-1] >= 100.0


def test_the_log_says_what_a_call_had_taken(tmp_path: Path) -> None:
    """The last note before it was cut short, and none of another call."""
    with new_log(tmp_path) as log:
        earlier = log.intent("tool_call", {"timeout_s": 5.0})
        call = log.intent("tool_call", {"timeout_s": 5.0})
        for of, agent_s in ((call, 1.5), (call, 3.5), (earlier, 9.0)):
            log.entry("note", {"of": of, "agent_s": agent_s})
    tail = forward(AttemptState(meter=Meter(Limits()), messages=[]), load(log.path).entries)
    assert tail.call is not None
    assert (tail.call.seq, tail.call.spent_s) == (call, 3.5)


async def test_a_time_out_while_the_node_stood_still_is_no_doing_of_the_agents() -> None:
    """Ended by its limit, though its programs could not run for so long: the platform's fault, and void. One that had
    all of its time is told as timed out, whatever stood still besides.
    """
    client = FakeClient()
    client.exec_s = 0.3
    client.shell_result = ShellResult(exit_code=137, stdout=b"", stderr=b"", timed_out=True)
    workspace = Workspace(FakeSandbox(client, 1), 1000)
    for limit_s, is_void in ((0.25, True), (0.05, False)):
        client.stalled_s = 0.0
        calling = asyncio.create_task(BOX.call(workspace, call_to("bash", command="sleep 60"), limit_s))
        await asyncio.sleep(0.05)
        client.stalled_s = 0.15
        if is_void:
            with pytest.raises(ReadTimeout, match="could run for"):
                await calling
        else:
            assert (await calling).result.status == "timed_out"


async def test_silence_of_the_node_stops_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time goes on for as long as the node may be silent, then stands still until its next word; sleeps count once."""
    now = 100.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    clock = AsyncSandboxClock(cast(Transport, None), "sb_1")
    assert (clock.time(), clock.stalled_s) == (100.0, 0.0)
    clock._take(Awake(is_awake=True, slept_s=3.0))
    for moment, seen, stalled in ((105.0, 105.0, 0.0), (107.0, 107.0, 0.0), (130.0, 107.0, 23.0)):
        now = moment
        assert (clock.time(), clock.stalled_s) == (seen, stalled)
    clock._take(Awake(is_awake=True, slept_s=3.0))
    now = 132.0
    assert (clock.time(), clock.stalled_s) == (109.0, 23.0)
    clock._take(Awake(is_awake=False, slept_s=3.0))
    now = 190.0
    assert (clock.time(), clock.stalled_s) == (109.0, 23.0)
    clock._take(Awake(is_awake=True, slept_s=61.0))
    now = 191.0
    assert (clock.time(), clock.stalled_s) == (110.0, 23.0)
