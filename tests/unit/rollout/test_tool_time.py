"""A tool's limit and what it is billed are of the sandbox's own time."""

import asyncio
from typing import Any

import pytest
from msgspec import Struct

from barchan.rollout.calls import call_to
from barchan.rollout.tools import Toolbox, ToolOutput, Workspace
from barchan.sdk.aio.shell import ShellResult
from tests.unit.rollout.fakes import FakeClient, FakeSandbox, task

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
