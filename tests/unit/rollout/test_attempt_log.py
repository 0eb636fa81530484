"""A rollout and its log: what is in it, who goes on with it, and what a log that fails means."""

import pickle
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from barchan.errors import (
    BackendError,
    Conflict,
    SandboxExpired,
)
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.calls import call_to
from barchan.rollout.policies import OraclePolicy
from barchan.rollout.ports import Log, NoLog
from barchan.rollout.runner import play
from barchan.trajectory.format import Header, Kind, log_path
from barchan.trajectory.reader import read, verify
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.rollout.fakes import FakeClient, task
from tests.unit.rollout.test_attempt import GOOD, SETTINGS, opened, rollout_of

pytestmark = pytest.mark.timeout(30)


def logs_in(folder: Path) -> Callable[[Job], Awaitable[Log]]:
    """Opens real logs."""

    async def open_log(job: Job) -> Log:
        header = Header(
            rollout_id=job.rollout_id,
            run_id="run",
            task_id=job.task.task_id,
            group_index=job.group_index,
            sample_index=job.sample_index,
            epoch=0,
            created_unix_s=1.0,
            barchan_version="0",
        )
        return TrajectoryWriter.create(log_path(folder, job.rollout_id), header)

    return open_log


async def test_its_way_is_in_the_log(tmp_path: Path) -> None:
    """Calls, execs and files with their results, the model calls, the grading and the verdict, chained and checked."""
    rollout = rollout_of(FakeClient(), open_log=logs_in(tmp_path))
    await rollout.open()
    await rollout.record(
        text="so", completion_ids=[5], logprobs=[-0.5], policy_version="v1", prompt_ids=[1, 2], wait_ms=7.5
    )
    await rollout.act(
        [
            call_to("bash", command="ls"),
            call_to("edit", command="create", path="a", file_text="b"),
            {"function": {"name": "bash", "arguments": "{"}},
        ]
    )
    await rollout.act([call_to("submit", solution=GOOD)])
    await rollout.finish()
    entries = list(read(log_path(tmp_path, "run-000000")))
    assert [(entry.part, entry.kind) for entry in entries if entry.part != "result"] == [
        ("header", None),
        ("entry", "message"),
        ("entry", "sandbox"),
        ("entry", "model_call"),
        ("entry", "turn"),
        ("intent", "tool_call"),
        ("intent", "exec"),
        ("intent", "tool_call"),
        ("intent", "file_write"),
        ("intent", "tool_call"),
        ("entry", "turn"),
        ("intent", "tool_call"),
        ("intent", "exec"),
        ("entry", "hand_in"),
        ("intent", "file_read"),
        ("entry", "artifact"),
        ("intent", "grade"),
        ("entry", "verdict"),
    ]
    intents = {entry.seq for entry in entries if entry.part == "intent"}
    assert {entry.of for entry in entries if entry.part == "result"} == intents
    sampled = next(entry.body for entry in entries if entry.kind == "model_call")
    assert (sampled["completion_ids"], sampled["policy_version"], sampled["text"]) == ([5], "v1", "so")
    assert (sampled["wait_ms"], rollout.row().completions[0].wait_ms) == (7.5, 7.5)
    assert entries[-1].body["reward"] == 1.0
    assert verify(log_path(tmp_path, "run-000000"), head_hash=rollout.row().head_hash).ok


async def test_a_rollout_goes_on_from_its_state(tmp_path: Path) -> None:
    """Between two calls its state pickles; who takes it up has the conversation, the limits and the log. The first one
    is relieved: it ends nothing any more.
    """
    client = FakeClient()
    first = rollout_of(client, open_log=logs_in(tmp_path))
    await first.open()
    await first.record(completion_ids=[1, 2])
    await first.act([call_to("edit", command="create", path="solution.py", file_text=GOOD)])
    state = pickle.loads(pickle.dumps(first.state))

    async def reopened(job: Job) -> Log:
        return TrajectoryWriter.reopen(log_path(tmp_path, job.rollout_id))

    second = Rollout(client, SETTINGS, Job("run-000000", task(), 0), policy_name="p", open_log=reopened, state=state)
    await second.resume()
    assert first.is_relieved is False
    await first.act([call_to("bash", command="ls")])
    assert first.is_relieved is True
    await first.cancel()
    with pytest.raises(Conflict):
        await first.finish()
    assert (first.verdict, len(client.live)) == (None, 1)
    assert (await second.act([call_to("submit")])).over == "completed"
    assert ((await second.finish()).reward, client.live) == (1.0, set())
    row = second.row()
    assert (row.turns, row.completion_tokens, row.tool_calls) == (2, 2, {"edit": 1, "submit": 1})


async def test_a_state_whose_sandbox_is_gone_can_not_go_on() -> None:
    """It is told as one that has ended."""
    client = FakeClient()
    first = await opened(client)
    client.live.clear()
    second = Rollout(client, SETTINGS, Job("run-000000", task(), 0), policy_name="p", state=first.state)
    with pytest.raises(SandboxExpired):
        await second.resume()


class FullLog(NoLog):
    """Fails at one kind of entry."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def entry(self, kind: Kind, body: Mapping[str, Any], /) -> int:
        if kind == self._kind:
            raise BackendError("no space")
        return 0


@pytest.mark.parametrize("kind", ["message", "model_call"])
async def test_a_log_that_can_not_be_written_voids(kind: Kind) -> None:
    """A rollout whose way is not on record is the platform's fault, at whatever entry."""
    client = FakeClient()

    async def full(job: Job) -> Log:
        return FullLog(kind)

    rollout = rollout_of(client, open_log=full)
    await rollout.open()
    if (await rollout.observe()).over is None:
        await rollout.record(text="x")
        await rollout.act([call_to("bash", command="ls")])
    verdict = await rollout.finish()
    assert (verdict.status, verdict.fault) == ("void", "platform")
    assert client.live == set()


async def test_a_verdict_that_the_log_misses_says_so() -> None:
    """The reward stands, and its evidence tells that the log is not whole."""

    async def full(job: Job) -> Log:
        return FullLog("verdict")

    rollout = rollout_of(FakeClient(), open_log=full)
    await rollout.open()
    await play(rollout, OraclePolicy())
    verdict = rollout.row().verdict
    assert (verdict.reward, verdict.evidence[-1].source) == (1.0, "trajectory")
