"""A rollout that is cut short at any line of its log goes on from that: what is complete is known, the rest is done."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from barchan.errors import ConnectionLost, SandboxLost, TrajectoryDiverged
from barchan.model.sandbox import ExecResult
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.calls import Observation, call_to
from barchan.rollout.limits import Meter
from barchan.rollout.policies import Step
from barchan.rollout.ports import Log
from barchan.rollout.record import Completion
from barchan.rollout.resuming.forward import forward
from barchan.rollout.resuming.operations import Operations, Recorded
from barchan.rollout.runner import play
from barchan.rollout.state import AttemptState
from barchan.rollout.task import Task
from barchan.sdk.aio.shell import ShellPoint, ShellResult, ShellRun
from barchan.trajectory.format import Entry, Kind, log_path
from barchan.trajectory.reader import load, verify
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.rollout.fakes import FakeClient, FakeSandbox, FakeShell, result, task
from tests.unit.rollout.test_attempt import GOOD, SETTINGS
from tests.unit.rollout.test_attempt_log import logs_in

pytestmark = pytest.mark.timeout(120)

TURNS = (
    (call_to("bash", command="one"),),
    (call_to("bash", command="two"), call_to("python", code="three")),
    (),
    (call_to("edit", command="create", path="solution.py", file_text="old\n"),),
    (call_to("edit", command="str_replace", path="solution.py", old_str="old\n", new_str=GOOD),),
    (call_to("bash", command="four"),),
    (call_to("submit"),),
)


class Killed(BaseException):
    """Nobody handles it: as if the process had ended here."""


class OnceShell(FakeShell):
    """Takes each command once, by its mark."""

    def __init__(self, sandbox: "OnceSandbox", client: FakeClient, point: ShellPoint | None) -> None:
        super().__init__(client)
        self._sandbox = sandbox
        self.point = point
        self._process_id = point.process_id if point is not None else f"shell-{next(sandbox.numbers)}"

    async def begin(self) -> ShellRun:
        mark = f"mark-{next(self._sandbox.numbers)}"
        return ShellRun(process_id=self._process_id, mark=mark, stdin=0, stdout=0, stderr=0)

    async def run(self, command: str, /, *, timeout_s: float = 0, begun: ShellRun | None = None) -> ShellResult:
        begun = begun or await self.begin()
        self._sandbox.run_once(begun.mark, command)
        self.point = ShellPoint(process_id=begun.process_id, stdout=1, stderr=0, last_code=0)
        return ShellResult(exit_code=0, stdout=f"did {command}".encode(), stderr=b"")


class OnceSandbox(FakeSandbox):
    """Runs each program once, by its id, and counts what it ran."""

    def __init__(self, client: "OnceClient", number: int) -> None:
        super().__init__(client, number)
        self.ran: Counter[str] = Counter()
        self.numbers = itertools.count()
        self._ids: set[str] = set()
        self._breaks = client.breaks
        self._says_its_id = client.sandboxes_differ

    def run_once(self, process_id: str, command: str) -> None:
        if process_id not in self._ids:
            self._ids.add(process_id)
            self.ran[command] += 1
        if command in self._breaks:
            raise self._breaks.pop(command)

    async def exec(self, command: str | Sequence[str], /, *, stdin: bytes = b"", **options: Any) -> ExecResult:
        if options.get("user") is not None:
            return await super().exec(command, stdin=stdin, **options)
        self.run_once(options.get("process_id") or f"p-{next(self.numbers)}", stdin.decode())
        return result(stdout=self.id.encode() if self._says_its_id else b"three said")

    async def shell(self, *, max_output_bytes: int = 0, point: ShellPoint | None = None) -> FakeShell:
        return OnceShell(self, self._client, point)


class OnceClient(FakeClient):
    """Its sandboxes outlive whoever made them. `breaks`: errors that follow the run of a command, once each.
    `sandboxes_differ`: a program tells one from the other.
    """

    def __init__(self, *, sandboxes_differ: bool = False) -> None:
        super().__init__()
        self.sandboxes_differ = sandboxes_differ
        self.breaks: dict[str, Exception] = {}

    def made(self, number: int) -> FakeSandbox:
        return OnceSandbox(self, number)

    @property
    def ran(self) -> Counter[str]:
        return sum((box.ran for box in self.sandboxes if isinstance(box, OnceSandbox)), Counter())


class Sampled:
    """Takes the turns, and never says the same twice. `asked` counts by turn."""

    name = "sampled"

    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        self.asked[observation.turn] += 1
        text = f"turn {observation.turn}, sampled {self.asked[observation.turn]} times"
        completion = Completion(text=text, completion_ids=(1, observation.turn), logprobs=(-0.5, -0.5))
        return Step(
            tool_calls=TURNS[observation.turn], completion=completion, is_last=observation.turn == len(TURNS) - 1
        )


class DyingLog:
    """A log whose writer ends at its `at`-th line: before it, or after."""

    def __init__(self, log: TrajectoryWriter, at: int, *, is_before: bool) -> None:
        self._log = log
        self._left = at
        self._is_before = is_before
        self.is_begun, self.epoch = log.is_begun, log.epoch

    @property
    def head_hash(self) -> str:
        return self._log.head_hash

    def intent(self, kind: Kind, args: Mapping[str, Any], /, *, op_id: str | None = None) -> int:
        with self:
            return self._log.intent(kind, args, op_id=op_id)

    def result(self, seq: int, outcome: Mapping[str, Any], /) -> int:
        with self:
            return self._log.result(seq, outcome)

    def entry(self, kind: Kind, body: Mapping[str, Any], /) -> int:
        with self:
            return self._log.entry(kind, body)

    async def committed(self, seq: int | None = None, /) -> None:
        pass

    def entries(self) -> list[Entry]:
        return self._log.entries()

    def check(self) -> None:
        self._log.check()

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> None:
        self._left -= 1
        if self._left == 0 and self._is_before:
            raise Killed

    def __exit__(self, *why: object) -> None:
        if self._left == 0 and why[0] is None:
            raise Killed


def rollout_in(folder: Path, client: FakeClient, at: int = 0, *, is_before: bool = True) -> Rollout:
    """A rollout with its log in a folder; with `at`, it ends at that line."""

    async def open_log(job: Job) -> Log:
        if log_path(folder, job.rollout_id).exists():
            writer: TrajectoryWriter = TrajectoryWriter.reopen(log_path(folder, job.rollout_id))
        else:
            made = await logs_in(folder)(job)
            assert isinstance(made, TrajectoryWriter)
            writer = made
        return DyingLog(writer, at, is_before=is_before) if at else writer

    return Rollout(client, SETTINGS, Job("r-0", task(), 0), policy_name="sampled", open_log=open_log)


async def driven(rollout: Rollout, policy: Sampled) -> None:
    await rollout.open()
    await play(rollout, policy)


async def lines_of(tmp_path: Path) -> int:
    """How many lines an undisturbed rollout writes, without its header."""
    await driven(rollout_in(tmp_path / "whole", OnceClient()), Sampled())
    return len(load(log_path(tmp_path / "whole", "r-0")).entries) - 1


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
async def test_it_goes_on_from_every_line(tmp_path: Path, is_before: bool) -> None:
    """Killed before or after each line that it writes, and gone on with by another: the same verdict and conversation,
    no command run twice, no step asked for again whose answer was on record.
    """
    count = await lines_of(tmp_path)
    assert count > 40
    for at in range(1, count + 1):
        folder, client, policy = tmp_path / str(at), OnceClient(), Sampled()
        with pytest.raises(Killed):
            await driven(rollout_in(folder, client, at, is_before=is_before), policy)
        kept = load(log_path(folder, "r-0")).entries
        sampled = [entry.body["text"] for entry in kept if entry.kind == "model_call"]
        rollout = rollout_in(folder, client)
        await driven(rollout, policy)
        row = rollout.row()
        assert (row.verdict.status, row.verdict.reward, row.turns) == ("scored", 1.0, len(TURNS)), at
        assert client.ran == Counter({"one": 1, "two": 1, "three": 1, "four": 1}), at
        assert [completion.text for completion in row.completions[: len(sampled)]] == sampled, at
        again = sum(policy.asked.values()) - len(TURNS)
        assert again <= 1
        told = [fact.value for fact in row.verdict.evidence if fact.source == "resume"]
        assert told == [1] if again else sum(map(int, map(str, told))) <= 1
        assert row.tool_calls == {"bash": 3, "python": 1, "edit": 2, "submit": 1}, at
        assert client.live == set(), at
        assert verify(log_path(folder, "r-0"), head_hash=row.head_hash).ok


async def test_it_may_be_killed_again_and_again(tmp_path: Path) -> None:
    """Each life comes four lines further than the one before: it ends all the same, with everything done once."""
    client, policy = OnceClient(), Sampled()
    for _ in range(300):
        try:
            rollout = rollout_in(tmp_path, client, 4, is_before=False)
            await driven(rollout, policy)
        except Killed:
            continue
        break
    row = rollout.row()
    assert (row.verdict.reward, client.ran) == (1.0, Counter({"one": 1, "two": 1, "three": 1, "four": 1}))
    assert max(policy.asked.values()) <= 2  # a life that ends before the answer is on record asks in vain


async def test_a_state_is_the_same_by_its_log(tmp_path: Path) -> None:
    """What a live rollout knows of its attempt is what its log gives."""
    rollout = rollout_in(tmp_path, OnceClient())
    await driven(rollout, Sampled())
    live = rollout.state
    again = AttemptState(meter=Meter(task().limits), messages=live.messages[:1])
    tail = forward(again, load(log_path(tmp_path, "r-0")).entries)
    same = ("completions", "messages", "calls", "malformed", "over", "facts", "is_last", "ended_by", "ended")
    assert {name: getattr(again, name) for name in same} == {name: getattr(live, name) for name in same}
    assert (again.meter.turns, again.meter.tokens) == (live.meter.turns, live.meter.tokens)
    assert again.meter.agent_s == pytest.approx(live.meter.agent_s)
    assert (again.artifact, again.verdict) == (live.artifact, live.verdict)
    assert (tail.is_open, tail.call, tail.untaken) == (True, None, None)


async def test_a_lost_way_to_the_sandbox_is_found_again(tmp_path: Path) -> None:
    """An answer that was lost after the command ran: asked again by its own id by the same driver, it ran once."""
    client = OnceClient()
    client.breaks = {"two": ConnectionLost("cut"), "three": ConnectionLost("cut")}
    rollout = rollout_in(tmp_path, client)
    await driven(rollout, Sampled())
    assert (rollout.row().verdict.reward, client.ran["two"], client.ran["three"]) == (1.0, 1, 1)
    assert load(log_path(tmp_path, "r-0")).open_intents == ()


async def test_a_lost_sandbox_is_made_again(tmp_path: Path) -> None:
    """In the middle of a command: what was complete is done again in another one, the command itself for the first time
    there, and the verdict's evidence tells.
    """
    client = OnceClient()
    client.breaks = {"four": SandboxLost("gone", sandbox_id="sb_1")}
    rollout = rollout_in(tmp_path, client)
    await driven(rollout, Sampled())
    row = rollout.row()
    assert (row.verdict.reward, row.turns) == (1.0, len(TURNS))
    assert [fact.value for fact in row.verdict.evidence if fact.source == "resume"] == [6]
    assert client.ran == Counter({"one": 2, "two": 2, "three": 2, "four": 2})
    assert load(log_path(tmp_path, "r-0")).open_intents == ()


async def test_a_sandbox_that_can_not_be_made_again_voids(tmp_path: Path) -> None:
    """Where what was complete gives something else in another sandbox, nobody guesses: void, and the evidence says
    what differed.
    """
    client = OnceClient(sandboxes_differ=True)
    client.breaks = {"four": SandboxLost("gone", sandbox_id="sb_1")}
    rollout = rollout_in(tmp_path, client)
    await driven(rollout, Sampled())
    verdict = rollout.row().verdict
    assert (verdict.status, verdict.cause) == ("void", "sandbox_lost")
    assert [fact for fact in verdict.evidence if fact.source == "replay"]


async def test_a_driver_of_its_own_is_told_what_it_had_sampled(tmp_path: Path) -> None:
    """A model call that was recorded and not acted on is there for whoever goes on. The node is told in which epoch
    files are changed from then on.
    """
    client = OnceClient()
    first = rollout_in(tmp_path, client)
    await first.open()
    await first.record(text="a", completion_ids=[1])
    await first.act([call_to("bash", command="one")])
    await first.record(text="b", completion_ids=[2])
    second = rollout_in(tmp_path, client)
    await second.open()
    assert ([completion.text for completion in second.pending], client.sandboxes[0].files.epoch) == (["b"], 1)
    observation = await second.act([call_to("bash", command="two")])
    assert (second.pending, observation.messages[-2]["content"], observation.turn) == ((), "b", 2)
    await first.act([call_to("bash", command="three")])
    assert (first.is_relieved, client.ran["three"]) == (True, 0)


def recorded(seq: int, **args: Any) -> Recorded:
    return Recorded(seq=seq, kind="file_write", op_id="", args=args, result={})


def test_operations_are_matched_by_what_they_ask() -> None:
    """In any order, each once; another one, or one that is not asked for any more, is no repetition."""
    made = [recorded(1, path="a", data=b"x", sandbox_id="sb_1"), recorded(2, path="b", data=b"y", sandbox_id="sb_1")]
    operations = Operations(made)
    assert operations.take("file_write", {"path": "b", "data": b"y", "sandbox_id": "sb_2"}) is made[1]
    with pytest.raises(TrajectoryDiverged, match="entry 1"):
        operations.end()
    with pytest.raises(TrajectoryDiverged, match="entry 1"):
        operations.take("file_write", {"path": "a", "data": b"z"})
    assert operations.take("file_write", {"path": "a", "data": b"x"}) is made[0]
    operations.end()
    assert (operations.take("file_write", {"path": "c"}), operations.answered) == (None, 2)
