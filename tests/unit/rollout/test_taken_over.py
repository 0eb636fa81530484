"""A rollout that somebody else goes on with, is ended twice at once, or is cut short in the middle of a restore."""

import asyncio
import fcntl
import os
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from barchan.errors import Conflict, ConnectionLost, Preempted, SandboxExpired
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.calls import call_to
from barchan.rollout.environments import prepare
from barchan.rollout.group import AsyncGroup
from barchan.rollout.limits import Limits
from barchan.rollout.ports import Log
from barchan.rollout.run import AsyncRun
from barchan.rollout.sandboxes import Sandboxes
from barchan.rollout.shared import member_id
from barchan.rollout.store import begun_log, opened_log
from barchan.rollout.task import Environment
from barchan.sdk.aio.shell import ShellResult
from barchan.sdk.recipe import Recipe
from barchan.trajectory.format import log_path
from barchan.trajectory.reader import load, verify
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.rollout.fakes import FakeClient, FakeClock, FakeSandbox, task
from tests.unit.rollout.test_attempt import SETTINGS
from tests.unit.rollout.test_attempt_log import logs_in
from tests.unit.rollout.test_resuming import Killed, OnceClient, OnceSandbox, OnceShell, rollout_in
from tests.unit.trajectory.logs import header, new_log

pytestmark = pytest.mark.timeout(60)


async def ended_by_nobody(self: Sandboxes, *given: Any) -> None:
    """As a process that is killed leaves them."""


async def test_a_restore_that_is_killed_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another sandbox: the half-restored one has run commands already, and is ended."""
    client = OnceClient()
    first = rollout_in(tmp_path, client)
    await first.open()
    for command in ("one", "two", "three"):
        await first.act([call_to("bash", command=command)])
    client.live.discard("sb_1")
    carried_out = OnceSandbox.run_once

    def killed_in_two(self: OnceSandbox, process_id: str, command: str) -> None:
        carried_out(self, process_id, command)
        if (self.id, command) == ("sb_2", "two"):
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(OnceSandbox, "run_once", killed_in_two)
        patched.setattr(Sandboxes, "end", ended_by_nobody)
        with pytest.raises(Killed):
            await rollout_in(tmp_path, client).open()
    assert client.live == {"sb_2"}
    third = rollout_in(tmp_path, client)
    await third.open()
    assert (third.verdict, third.state.sandbox_id, client.live) == (None, "sb_3", {"sb_3"})
    last = client.sandboxes[-1]
    assert isinstance(last, OnceSandbox)
    assert last.ran == Counter({"one": 1, "two": 1, "three": 1})
    await third.cancel()
    assert third.row().agent_sandbox_id == "sb_3"


async def test_what_a_later_life_did_in_a_call_is_restored(tmp_path: Path) -> None:
    """A call whose driver was killed before its first command, and the next driver after it: the command is done again
    in the sandbox that takes the lost one's place, and is not only told of.
    """
    client = OnceClient()
    for _ in range(2):
        life = rollout_in(tmp_path, client, 2, is_before=False)
        await _killed(life, client)
    entries = load(log_path(tmp_path, "r-0")).entries
    while not any(entry.kind == "exec" and entry.part == "result" for entry in entries):
        await _killed(rollout_in(tmp_path, client, 2, is_before=False), client)
        entries = load(log_path(tmp_path, "r-0")).entries
    assert not any(entry.kind == "tool_call" and entry.part == "result" for entry in entries)
    client.live.discard("sb_1")
    last = rollout_in(tmp_path, client)
    await last.open()
    made = client.sandboxes[-1]
    assert isinstance(made, OnceSandbox)
    assert (last.verdict, made.id, made.ran) == (None, "sb_2", Counter({"one": 1}))


async def _killed(rollout: Rollout, client: FakeClient) -> None:
    with pytest.raises(Killed):
        await rollout.open()
        await rollout.act([call_to("bash", command="one")])


class StalledOnce(FakeClock):
    """The node stands still in the first call."""

    used = 0

    async def __aenter__(self) -> "StalledOnce":
        type(self).used += 1
        self.number = self.used
        return self

    @property
    def stalled_s(self) -> float:
        return 30.0 if self.number == 1 else 0.0


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_stall_of_the_platform_is_no_time_out_of_the_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Also where the driver is killed between the command's result and the call's: the next finds it in the log."""
    client = FakeClient()
    client.shell_result = ShellResult(exit_code=137, stdout=b"", stderr=b"", timed_out=True)
    StalledOnce.used = 0
    monkeypatch.setattr(FakeSandbox, "clock", lambda self: StalledOnce(client))
    limits = Limits(agent_s_max=40.0, call_s_max=60.0)
    job = Job("r-0", task(limits=limits), 0)
    first = Rollout(client, SETTINGS, job, policy_name="p", open_log=logs_in(tmp_path))
    await first.open()
    if is_killed:
        monkeypatch.setattr("barchan.rollout.tools.toolbox._check_stall", _killed_then)
        with pytest.raises(Killed):
            await first.act([call_to("bash", command="make")])
        monkeypatch.undo()

        async def again(job: Job) -> Log:
            return TrajectoryWriter.reopen(log_path(tmp_path, job.rollout_id))

        first = Rollout(client, SETTINGS, job, policy_name="p", open_log=again)
        await first.open()
    else:
        await first.act([call_to("bash", command="make")])
    assert first.verdict is not None
    assert (first.verdict.status, first.verdict.cause) == ("void", "transport")


def _killed_then(*given: object) -> None:
    raise Killed


async def test_who_was_relieved_ends_no_sandbox(tmp_path: Path) -> None:
    """Neither by an error in a call that somebody else has finished meanwhile, nor by giving the rollout up."""
    client = OnceClient()
    first = rollout_in(tmp_path, client)
    await first.open()
    box, cut = client.sandboxes[0], asyncio.Event()

    class Cut(FakeClock):
        async def __aenter__(self) -> "Cut":
            await cut.wait()
            raise ConnectionLost("cut")

    box.clock = lambda: Cut(client)  # type: ignore[method-assign]
    acting = asyncio.create_task(first.act([call_to("bash", command="one")]))
    while not any(entry.kind == "tool_call" for entry in load(log_path(tmp_path, "r-0")).entries):
        await asyncio.sleep(0.01)
    del box.clock  # type: ignore[method-assign]
    second = rollout_in(tmp_path, client)
    await second.open()
    cut.set()
    await acting
    await first.cancel()
    assert (client.live, first.verdict, first.is_relieved, second.verdict) == ({"sb_1"}, None, True, None)


async def test_a_log_that_somebody_holds_is_his(tmp_path: Path) -> None:
    """Whoever wants to go on with it is refused, and makes no verdict; the owner goes on."""
    client = OnceClient()
    first = rollout_in(tmp_path, client)
    await first.open()
    path = log_path(tmp_path, "r-0")
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)

    async def held(job: Job) -> Log:
        return await opened_log(lambda: begun_log(path, load(path).header))

    second = Rollout(client, SETTINGS, Job("r-0", task(), 0), policy_name="p", open_log=held)
    with pytest.raises(Conflict, match="holds"):
        await second.open()
    os.close(fd)
    assert (second.verdict, second.is_relieved, client.live) == (None, True, {"sb_1"})
    await first.act([call_to("bash", command="one")])
    assert (first.verdict, client.ran) == (None, Counter({"one": 1}))


async def test_who_ends_it_second_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails since the rollout is being cancelled: the verdict that it sees is whole, and in the log."""
    client = OnceClient()
    rollout = rollout_in(tmp_path, client)
    await rollout.open()
    begun, gone = asyncio.Event(), asyncio.Event()

    async def slow(self: OnceShell, command: str, /, **options: Any) -> ShellResult:
        begun.set()
        await gone.wait()
        raise SandboxExpired("ended", sandbox_id="sb_1")

    async def kill() -> bool:
        client.live.discard("sb_1")
        gone.set()
        await asyncio.sleep(0.05)
        return True

    monkeypatch.setattr(OnceShell, "run", slow)
    client.sandboxes[0].kill = kill  # type: ignore[method-assign]
    acting = asyncio.create_task(rollout.act([call_to("bash", command="one")]))
    await begun.wait()
    cancelling = asyncio.create_task(rollout.cancel())
    await acting
    row = rollout.row()
    assert verify(log_path(tmp_path, "r-0"), head_hash=row.head_hash).ok
    assert row.verdict == await cancelling


async def test_a_log_that_nobody_waits_for_is_closed(tmp_path: Path) -> None:
    """The thread that opens it can't be cancelled: what it has opened is closed again."""
    opening, going = threading.Event(), threading.Event()
    made: list[TrajectoryWriter] = []

    def slow() -> TrajectoryWriter:
        opening.set()
        going.wait(10.0)
        made.append(begun_log(tmp_path / "log", header()))
        return made[-1]

    waiting = asyncio.create_task(opened_log(slow))
    await asyncio.to_thread(opening.wait, 10.0)
    waiting.cancel()
    await asyncio.wait({waiting})
    going.set()
    assert waiting.cancelled()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait(others)
    await asyncio.sleep(0)
    assert [writer._fd for writer in made] == [-1]


async def test_no_task_is_at_fault_where_a_run_is_put_aside() -> None:
    """While images are made: nothing is void by it."""
    failed: list[int] = []

    async def build(recipe: Recipe) -> None:
        raise Preempted("put aside", lease_id="l")

    async def note(index: int, error: Exception) -> None:
        failed.append(index)

    wanted = task(environment=Environment(recipe=Recipe(base="base")))
    with pytest.raises(Preempted):
        await prepare([(0, wanted), (1, wanted)], build, failed.append, note)
    assert failed == []


def group_of(**part: Any) -> AsyncGroup:
    run = SimpleNamespace(_part=SimpleNamespace(**part))
    return AsyncGroup(cast(AsyncRun, run), "g", "key", task(), 1, 0)


async def test_a_group_of_a_run_that_is_put_aside() -> None:
    """Whoever waits for its members is told, and no member is void by it."""

    async def build(asked: object) -> None:
        pass

    def put_aside(*given: object) -> None:
        raise Preempted("put aside", lease_id="l")

    group = group_of(build=build, folder=None, live={}, job=put_aside)
    await group._begin()
    with pytest.raises(Preempted):
        async for _ in group:
            pass
    assert group._ready == []


async def test_a_group_has_what_its_process_drives_already() -> None:
    """A rollout that was taken over by itself is not taken from its own driver when its group is asked for."""
    driven = SimpleNamespace(is_elsewhere=False, _is_used_up=False)
    job = Job(member_id("g", 0, 0), task(), 0)
    group = group_of(folder=None, live={job.rollout_id: driven}, job=lambda *given: job)
    assert await group._latest(0) is driven


def test_a_row_is_written_once(tmp_path: Path) -> None:
    """Whoever ends it: one that was taken over just when it had its verdict has two drivers that want to tell."""
    from barchan.rollout.shared import SharedFolder

    log = new_log(tmp_path / "logs")
    log.close()
    one, two = (SharedFolder(tmp_path, "run", "1") for _ in range(2))
    client = FakeClient()

    async def row() -> Any:
        rollout = Rollout(client, SETTINGS, Job("r-0", task(), 0), policy_name="p")
        await rollout.cancel()
        return rollout.row()

    record = asyncio.run(row())
    one.add(record)
    two.add(record)
    assert len((tmp_path / "rollouts.jsonl").read_bytes().splitlines()) == 1
