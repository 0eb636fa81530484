"""What a log's operations are, how two results are compared, and from where a rollout may be restored."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from barchan.errors import BackendError, BarchanError, LocalProtocolError, NotFound, NotSnapshotable
from barchan.model.verdict import Evidence
from barchan.rollout.limits import Limits, Meter
from barchan.rollout.ports import NoLog
from barchan.rollout.replay.full import tree_digest
from barchan.rollout.replay.logonly import LogOnly
from barchan.rollout.replay.operations import Operation, compare, digest, operations, why_not_again
from barchan.rollout.replay.restore import Restored, restored
from barchan.rollout.replay.snapshots import last_snapshot, remove_snapshots, snapshot_after
from barchan.rollout.resuming.forward import forward
from barchan.rollout.sandboxes import Sandboxes, SandboxesState
from barchan.rollout.settings import RunSettings
from barchan.rollout.state import AttemptState
from barchan.rollout.tars import Tree, packed
from barchan.rollout.task import Environment, Service
from barchan.rollout.tools import Workspace
from barchan.trajectory.format import Entry
from barchan.trajectory.reader import load
from barchan.trajectory.values import Cut
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.rollout.fakes import FakeClient, FakeSandbox, task
from tests.unit.trajectory.logs import new_log

pytestmark = pytest.mark.timeout(30)
SETTINGS = RunSettings(run_id="run", template="base", snapshot_every=2)


def operation(outcome: Mapping[str, Any], **args: Any) -> Operation:
    return Operation(seq=3, kind="exec", args={"command": "x", **args}, outcome=dict(outcome), text="exec: x")


def done(log: TrajectoryWriter, args: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
    """A tool call with one program in it."""
    call = log.intent("tool_call", {"id": "c", "name": "t", "arguments": "{}"})
    log.result(log.intent("exec", {"sandbox_id": "sb", "timeout_s": 5.0, **args}), outcome)
    log.result(call, {"content": "", "status": "ok"})


def taken(log: TrajectoryWriter, kind: str) -> None:
    seq = log.intent("snapshot", {"sandbox_id": "sb", "name": "n", "turn": 2})
    log.result(seq, {"snapshot_id": "snap_1", "snapshot_kind": kind})


def entries_of(log: TrajectoryWriter) -> list[Entry]:
    log.close()
    return load(log.path).entries


PYTHON = {"command": ["python3", "-"], "stdin": b"1"}  # what the fake client answers with exit code 0


def test_operations_are_the_agents_own_and_complete(tmp_path: Path) -> None:
    """Not those of the platform or a grader, nor what never began. What a tool has not waited for is told, and what an
    open call has not ended is left out.
    """
    log = new_log(tmp_path)
    log.result(log.intent("exec", {"command": "platform"}), {"exit_code": 0})
    done(log, {"command": "first"}, {"exit_code": 0})
    done(log, {"command": "second"}, {"not_begun": True})
    call = log.intent("tool_call", {"id": "c2"})
    log.result(log.intent("file_write", {"path": "p", "data": b"1"}), {})
    log.intent("exec", {"command": "open"})
    log.close()
    later = TrajectoryWriter.reopen(log.path)  # goes on with the same call
    log2 = later.intent("file_read", {"path": "p"})
    later.result(log2, {"data": b"1"})
    later.result(call, {"content": ""})
    later.intent("tool_call", {"id": "c3"})
    later.result(later.intent("exec", {"command": "third"}), {"exit_code": 0})
    later.intent("exec", {"command": "under way"})
    later.close()
    last = TrajectoryWriter.reopen(log.path)
    last.result(last.intent("exec", {"command": "of the same call"}), {"exit_code": 0})
    entries = load(log.path).entries
    last.result(last.intent("grade", {}), {})
    last.result(last.intent("exec", {"command": "grader's"}), {"exit_code": 0})
    found = operations(entries_of(last))
    assert found == operations(entries)
    assert [(item.text, item.is_left) for item in found] == [
        ("exec: first", False),
        ("file_write: p", False),
        ("exec: open", True),
        ("file_read: p", False),
        ("exec: third", False),
        ("exec: of the same call", False),
    ]
    assert why_not_again(found[2])


async def test_nothing_is_restored_without_what_was_left(tmp_path: Path) -> None:
    """A program that its tool has not waited for may have done more: nobody knows what state it has left."""
    log = new_log(tmp_path)
    call = log.intent("tool_call", {"id": "c", "name": "t", "arguments": "{}"})
    log.intent("exec", {"sandbox_id": "sb", "timeout_s": 100.0, **PYTHON})
    log.result(call, {"content": "[timed out after 1 s]", "status": "timed_out"})
    client = FakeClient()
    found = await found_of(client, entries_of(log))
    assert isinstance(found, Evidence)
    assert (found.fact, client.sandboxes) == ("not repeatable", [])


@pytest.mark.parametrize(
    ("was", "now", "why"),
    [
        ("at 2026-11-30T07:22:09Z", "at 2026-11-30T08:00:00Z", "times"),
        ("real 0m0.003s", "real 0m0.011s", "times"),
        ("pid 4711 of 12", "pid 4712 of 12", "numbers"),
        ("<object at 0x7f2a10203040>", "<object at 0x7f2a99203040>", "random"),
        ("12:00:01 pid 17", "12:00:02 pid 18", "times, numbers"),
        ("648368304", "898268610", "numbers"),
        ("id 9f8a3e0b12", "id 77a0c1de45", "random"),
        ("left", "right", "content"),
        (b"\xff\xfe\x01", b"\xfe", "random"),
    ],
)
def test_why_two_outputs_differ(was: str | bytes, now: str | bytes, why: str) -> None:
    """The least that has to be left out for them to be equal is named."""
    old, new = (text.encode() if isinstance(text, str) else text for text in (was, now))
    found = compare(operation({"exit_code": 0, "stdout": old}), {"exit_code": 0, "stdout": new})
    assert found is not None
    assert (found.members, found.why) == (("stdout",), why)


def test_what_says_nothing_of_the_operation_is_not_compared() -> None:
    """Times, ids and counters differ each time; missing and empty are the same; long outputs go by their digest."""
    long = b"x" * 200_000
    cut = Cut(size_bytes=len(long), sha256=hashlib.sha256(long).hexdigest(), head=b"", tail=b"", text=False)
    old = operation({"exit_code": 0, "stdout": cut, "usage": {"wall_s": 1.0}, "process_id": "a"})
    new = {"exit_code": 0, "stdout": long, "stderr": b"", "timed_out": False, "process_id": "b"}
    assert compare(old, new) is None
    assert digest(old.outcome) == digest(new)
    failed = operation({"error": {"type": "NotFound", "message": "no a", "code": "not_found"}})
    assert compare(failed, {"error": {"type": "NotFound", "message": "no b"}}) is None
    found = compare(failed, {"exit_code": 1})
    assert found is not None
    assert found.why == "content"


@pytest.mark.parametrize(
    ("args", "outcome", "why"),
    [
        ({}, {"exit_code": 0}, ""),
        ({"stdin": Cut(size_bytes=9, sha256="", head=b"", tail=b"", text=False)}, {}, "does not hold all"),
        ({"action": "upload"}, {}, "client's machine"),
        ({}, {"timed_out": True}, "time-out"),
        ({}, {"oom_killed": True}, "memory"),
    ],
)
def test_what_can_be_tried_again(args: dict[str, Any], outcome: dict[str, Any], why: str) -> None:
    """Only what is known whole, and came to an end that another sandbox can come to."""
    assert why in why_not_again(operation(outcome, **args))
    assert bool(why) == bool(why_not_again(operation(outcome, **args)))


async def found_of(client: FakeClient, entries: list[Entry], **environment: Any) -> Restored | Evidence:
    made = Sandboxes(client, SETTINGS, "r", state=SandboxesState())
    given = task(environment=Environment(**environment))
    return await restored(client, given, made, entries, log=NoLog(), policy_name="test")


async def test_where_it_begins(tmp_path: Path) -> None:
    """A snapshot with memory, and what came after; of files only where nothing could have been running; else all."""
    cases = [("memory", True, "snap_1", 1), ("fs", True, "base", 2), ("fs", False, "snap_1", 1)]
    for number, (kind, is_before, template, again) in enumerate(cases):
        log = new_log(tmp_path, f"r-{number}")
        if is_before:
            done(log, PYTHON, {"exit_code": 0})
        taken(log, kind)
        done(log, PYTHON, {"exit_code": 0})
        client = FakeClient()
        found = await found_of(client, entries_of(log))
        assert isinstance(found, Restored)
        assert (found.operations, client.templates) == (again, [template])


async def test_a_snapshot_that_is_gone(tmp_path: Path) -> None:
    """Then all is carried out again, from the start; any other failure is the platform's, and raised."""
    log = new_log(tmp_path)
    done(log, PYTHON, {"exit_code": 0})
    taken(log, "memory")
    entries = entries_of(log)
    client = FakeClient()
    client.create_errors = [NotFound("no snapshot")]
    found = await found_of(client, entries)
    assert isinstance(found, Restored)
    assert (found.operations, found.snapshot, client.templates) == (1, "", ["base"])
    client.create_errors = [BackendError("broken")]
    with pytest.raises(BackendError):
        await found_of(client, entries)


async def test_a_divergence_ends_the_new_sandbox(tmp_path: Path) -> None:
    """The first one is the evidence, and no sandbox is left; nor is there one where nothing may be repeated."""
    log = new_log(tmp_path)
    done(log, PYTHON, {"exit_code": 7})
    entries, client = entries_of(log), FakeClient()
    found = await found_of(client, entries)
    assert isinstance(found, Evidence)
    assert found.fact == "first divergence"
    assert "exit_code" in str(found.value)
    assert client.live == set()
    found = await found_of(client, entries, network="open")
    assert isinstance(found, Evidence)
    assert (found.fact, len(client.sandboxes)) == ("not repeatable", 1)


async def test_services_do_not_come_back_with_files(tmp_path: Path) -> None:
    """A task whose services ran is not restored from files alone."""
    log = new_log(tmp_path)
    taken(log, "fs")
    taken_only = entries_of(log)
    environment = Environment(services=(Service(name="db", command="db"),))
    client = FakeClient()
    client.create_errors = [BackendError("from the start")]
    made = Sandboxes(client, SETTINGS, "r", state=SandboxesState())
    with pytest.raises(BackendError, match="from the start"):
        await restored(client, task(environment=environment), made, taken_only, log=NoLog(), policy_name="test")
    assert client.templates == []


class Snapshotting(FakeSandbox):
    """Gives snapshots, or the error for a kind."""

    def __init__(self, client: FakeClient, **errors: BarchanError) -> None:
        super().__init__(client, 1)
        self.asked: list[tuple[str, str]] = []
        self.errors = errors

    async def snapshot(self, name: str, /, *, kind: str, metadata: Mapping[str, str]) -> Any:
        self.asked.append((name, kind))
        if kind in self.errors:
            raise self.errors[kind]
        return type("Made", (), {"name": name, "id": f"snap_{len(self.asked)}", "kind": kind})


async def after(log: TrajectoryWriter, sandbox: Snapshotting, made: Sandboxes, turn: int) -> None:
    workspace = Workspace(sandbox, Limits().output_chars_max)
    await snapshot_after(workspace, log, made, turn)


async def test_snapshots_as_it_goes(tmp_path: Path) -> None:
    """Every second turn, the one before removed; without memory where that can't be, which is said; a failure too."""
    log, client = new_log(tmp_path), FakeClient()
    sandbox, made = Snapshotting(client), Sandboxes(client, SETTINGS, "r", state=SandboxesState())
    for turn in range(1, 5):
        await after(log, sandbox, made, turn)
    assert sandbox.asked == [("rollout-r-turn-2", "memory"), ("rollout-r-turn-4", "memory")]
    assert client.removed_images == ["rollout-r-turn-2"]
    poor = Snapshotting(client, memory=NotSnapshotable("a socket"))
    await after(log, poor, made, 6)
    await after(log, Snapshotting(client, memory=BackendError("full")), made, 8)
    assert client.removed_images[1:] == ["rollout-r-turn-4"]
    assert made.state.snapshots == ["rollout-r-turn-6", "rollout-r-turn-8"]
    entries = entries_of(log)
    assert resumed(entries) == made.state.snapshots
    await remove_snapshots(made)
    assert (client.removed_images[2:], made.state.snapshots) == (["rollout-r-turn-6", "rollout-r-turn-8"], [])
    last = last_snapshot(entries)
    assert last is not None
    assert (last.snapshot_id, last.with_memory) == ("snap_2", False)
    results = [entry.body for entry in entries if entry.part == "result"]
    assert "a socket" in results[-2]["lost"]
    assert results[-1]["error"]["type"] == "BackendError"


def resumed(entries: list[Entry]) -> list[str]:
    """The snapshots that a log knows of, which may be there."""
    state = AttemptState(meter=Meter(Limits()), messages=[])
    forward(state, entries)
    return state.sandboxes.snapshots


def test_snapshots_that_a_killed_driver_has_left(tmp_path: Path) -> None:
    """Those before the last are removed once that is made, unless whoever was to do it was killed just then."""
    log = new_log(tmp_path)

    def took(log: TrajectoryWriter, turn: int, outcome: Mapping[str, Any] | None) -> None:
        seq = log.intent("snapshot", {"sandbox_id": "sb", "name": f"t-{turn}", "turn": turn})
        if outcome is not None:
            log.result(seq, outcome)

    made = {"snapshot_id": "snap", "snapshot_kind": "memory"}
    took(log, 2, made)
    took(log, 4, made)
    log.entry("model_call", {"text": ""})  # it went on, and so 2 was removed
    assert resumed(load(log.path).entries) == ["t-4"]
    took(log, 6, made)  # and is killed
    log.close()
    log = TrajectoryWriter.reopen(log.path)
    assert resumed(load(log.path).entries) == ["t-4", "t-6"]
    took(log, 8, None)  # killed in the making
    log.close()
    log = TrajectoryWriter.reopen(log.path)
    took(log, 10, {"error": {"type": "BackendError", "message": "full"}})
    assert resumed(load(log.path).entries) == ["t-4", "t-6", "t-8", "t-10"]
    took(log, 12, made)
    log.entry("model_call", {"text": ""})
    assert resumed(entries_of(log)) == ["t-12"]


def test_answers_from_the_log_alone(tmp_path: Path) -> None:
    """Each operation in its order; another one, other arguments, and one too many are refused with their place."""
    log = new_log(tmp_path)
    done(log, {"command": "a"}, {"exit_code": 3, "stdout": b"out"})
    done(log, {"command": "b"}, {"error": {"code": "not_found", "message": "no b", "details": {"errno": 2}}})
    answers = LogOnly(entries_of(log))
    assert answers.exec("a", timeout_s=5.0).outcome["stdout"] == b"out"
    with pytest.raises(LocalProtocolError, match="command differs"):
        answers.exec("c")
    with pytest.raises(LocalProtocolError, match="file_write p is asked"):
        answers.write("p", b"")
    with pytest.raises(NotFound, match="no b"):
        answers.exec("b")
    with pytest.raises(LocalProtocolError, match="no further operation"):
        answers.read("p")
    assert (answers.answered, answers.left) == (2, 0)


def test_the_digest_of_files_leaves_times_and_caches_out() -> None:
    """The same files at another time have it; another content, mode or name has not."""

    def tree(*files: tuple[str, bytes, int]) -> str:
        trees = [Tree(path=f"/w/{name}", is_folder=False, data=data, mode=mode) for name, data, mode in files]
        return tree_digest(packed(trees)[0])

    same = tree(("a", b"1", 0o644))
    assert same == tree(("a", b"1", 0o644), ("m.pyc", b"new", 0o644))
    others = [tree(("a", b"2", 0o644)), tree(("a", b"1", 0o755)), tree(("b", b"1", 0o644))]
    assert len({same, *others}) == 4
