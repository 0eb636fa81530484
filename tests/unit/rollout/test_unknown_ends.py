"""Operations of which nobody knows at first what came of them: whatever a tool makes of it, each is asked for again by
its own id, ran once, and has its result in the log before the rollout goes on.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from barchan.errors import BarchanError, ConnectionLost, Preempted, SandboxLost
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.calls import call_to
from barchan.rollout.ports import Log
from barchan.rollout.task import PatchArtifact, Task
from barchan.rollout.tools import ToolOutput, Workspace, toolbox
from barchan.sdk.aio.shell import NotBegun
from barchan.trajectory.format import log_path
from barchan.trajectory.reader import load
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.rollout.fakes import FakeClient, FakeSandbox, task
from tests.unit.rollout.test_attempt import SETTINGS
from tests.unit.rollout.test_attempt_log import logs_in
from tests.unit.rollout.test_resuming import Killed, OnceClient, rollout_in

pytestmark = pytest.mark.timeout(30)


class Nothing(Struct):
    """No arguments."""


class Trying:
    """Takes the platform's failure for the agent's, and tries something else."""

    name, description, arguments, keeps_time = "trying", "Tries.", Nothing, True

    async def call(self, workspace: Workspace, arguments: Any, /, *, timeout_s: float) -> ToolOutput:
        for program in (b"first", b"second"):
            try:
                await workspace.exec(("tool",), stdin=program, timeout_s=timeout_s)
            except BarchanError:
                continue
            return ToolOutput(content=f"{program.decode()} did it")
        return ToolOutput(content="no program did it", status="failed")


class Renaming(Trying):
    """Makes it a failure of its own."""

    name = "renaming"

    async def call(self, workspace: Workspace, arguments: Any, /, *, timeout_s: float) -> ToolOutput:
        try:
            await workspace.exec(("tool",), stdin=b"first", timeout_s=timeout_s)
        except BarchanError as error:
            raise ValueError("the tool is broken") from error
        return ToolOutput(content="first did it")


class Asking(Trying):
    """Asks for a file, and takes whatever is raised for an answer."""

    name = "asking"

    async def call(self, workspace: Workspace, arguments: Any, /, *, timeout_s: float) -> ToolOutput:
        try:
            await workspace.sandbox.files.stat("solution.py")
        except BarchanError as error:
            return ToolOutput(content=type(error).__name__)
        return ToolOutput(content="found")


def of(of_task: Task, folder: Path, client: FakeClient) -> Rollout:
    """A rollout with its log, begun or gone on with."""

    async def open_log(job: Job) -> Log:
        path = log_path(folder, job.rollout_id)
        return TrajectoryWriter.reopen(path) if path.exists() else await logs_in(folder)(job)

    return Rollout(client, SETTINGS, Job("r-0", of_task, 0), policy_name="p", open_log=open_log)


@pytest.mark.parametrize("tool", [Trying, Renaming])
async def test_a_tool_hides_no_lost_answer(tmp_path: Path, tool: type[Trying]) -> None:
    """Neither by trying something else, which is not begun, nor by an error of its own: the program is asked for again
    by its id, and the call gives what it gave.
    """
    client = OnceClient()
    client.breaks = {"first": ConnectionLost("cut")}
    rollout = of(task(tools=(f"{__name__}:{tool.__name__}",)), tmp_path, client)
    await rollout.open()
    observation = await rollout.act([call_to(tool.name)])
    assert (rollout.verdict, observation.results[0].content) == (None, "first did it")
    assert client.ran == Counter({"first": 1})
    assert load(log_path(tmp_path, "r-0")).open_intents == ()
    await rollout.cancel()


async def test_a_tool_hides_no_preemption_and_no_failed_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no operation of the log counts as well; a rollout that is put aside has no result for its call."""
    client, lost = OnceClient(), [ConnectionLost("cut")]

    async def stat(path: str, /) -> Any:
        raise lost.pop() if lost else Preempted("put aside", lease_id="l")

    rollout = of(task(tools=(f"{__name__}:Asking",)), tmp_path, client)
    await rollout.open()
    monkeypatch.setattr(client.sandboxes[0].files, "stat", stat)
    with pytest.raises(Preempted):
        await rollout.act([call_to("asking")])
    last = load(log_path(tmp_path, "r-0")).entries[-1]
    assert (last.part, last.kind, lost, client.live) == ("intent", "tool_call", [], {"sb_1"})


@pytest.mark.parametrize("error", [ConnectionLost("cut"), Killed()], ids=["cut", "killed"])
async def test_a_patch_is_taken_by_one_program(tmp_path: Path, error: BaseException) -> None:
    """Where its answer was lost, or its driver killed: the program that was begun gives the artifact."""
    client = OnceClient()
    client.breaks = {"": error}  # type: ignore[dict-item]
    patched = task(artifact=PatchArtifact(repo="/repo", base="HEAD"))
    rollout = of(patched, tmp_path, client)
    await rollout.open()
    if isinstance(error, Killed):
        with pytest.raises(Killed):
            await rollout.hand_in()
        rollout = of(patched, tmp_path, client)
        await rollout.open()
    await rollout.hand_in()
    assert (rollout.artifact and rollout.artifact.data, client.ran) == (b"three said", Counter({"": 1}))
    assert load(log_path(tmp_path, "r-0")).open_intents == ()
    await rollout.cancel()


async def test_what_our_own_limit_has_killed_is_not_the_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose end its tool did not see in time is killed as it is given up: asked for again, that end would
    pass for the command's own.
    """
    monkeypatch.setattr(toolbox, "PLATFORM_SLACK_S", 0.05)
    client = FakeClient()
    client.exec_s = 60.0
    rollout = of(task(), tmp_path, client)
    await rollout.open()
    await rollout.act([call_to("bash", command="make")], timeout_s=0.05)
    assert rollout.verdict is not None
    assert (rollout.verdict.status, rollout.verdict.cause) == ("void", "transport")
    assert [shell.commands for shell in client.sandboxes[0].shells] == [["make"]]


class Gated(OnceClient):
    """Makes no second sandbox before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def create(self, template: str, /, **options: Any) -> FakeSandbox:
        if self.sandboxes and options["create_id"] not in self.create_ids:
            self.asked.set()
            await self.may.wait()
        return await super().create(template, **options)


async def test_a_sandbox_that_is_made_while_the_rollout_is_given_up_is_ended(tmp_path: Path) -> None:
    """Whoever cancels it does not wait for the restore that is under way."""
    client = Gated()
    client.breaks = {"one": SandboxLost("gone", sandbox_id="sb_1")}
    rollout = rollout_in(tmp_path, client)
    await rollout.open()
    acting = asyncio.create_task(rollout.act([call_to("bash", command="one")]))
    await client.asked.wait()
    await rollout.cancel()
    client.may.set()
    await acting
    assert (len(client.sandboxes), client.live) == (2, set())


async def test_a_restore_that_was_taken_over_ends_no_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that stood still just before it began: what another one has made meanwhile is that one's."""
    client, held, may = OnceClient(), asyncio.Event(), asyncio.Event()
    client.breaks = {"one": SandboxLost("gone", sandbox_id="sb_1")}
    committed = TrajectoryWriter.committed
    first = rollout_in(tmp_path, client)
    await first.open()
    client.live.discard("sb_1")

    async def slow(self: TrajectoryWriter, seq: int | None = None) -> None:
        is_restore = self.open_intents and self.open_intents[-1].kind == "restore"
        await committed(self, seq)
        if is_restore and not held.is_set():
            held.set()
            await may.wait()

    monkeypatch.setattr(TrajectoryWriter, "committed", slow)
    acting = asyncio.create_task(first.act([call_to("bash", command="one")]))
    await held.wait()
    second = rollout_in(tmp_path, client)
    await second.open()
    may.set()
    await acting
    assert (first.is_relieved, second.verdict) == (True, None)
    assert second.state.sandbox_id is not None and client.live == {second.state.sandbox_id}
    await second.cancel()


async def test_a_command_in_a_shell_that_has_ended_is_told_as_not_begun(tmp_path: Path) -> None:
    """It runs in the next shell under another intent, and the first one has its result."""
    client = OnceClient()
    client.breaks = {"two": NotBegun("ended")}
    rollout = rollout_in(tmp_path, client)
    await rollout.open()
    await rollout.act([call_to("bash", command="two")])
    log = load(log_path(tmp_path, "r-0"))
    told = [entry.body.get("not_begun") for entry in log.entries if entry.kind == "exec" and entry.part == "result"]
    assert (told, log.open_intents, rollout.verdict) == ([True, None], (), None)
    await rollout.cancel()
