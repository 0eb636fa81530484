"""Rollouts as a run: each judged alone, bounded, cancellable, with its time accounted for."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from barchan.errors import (
    BackendError,
    BootFailed,
    CapacityError,
    ConnectionLost,
    Denied,
    ExecTimeout,
    ModelError,
    NotFound,
    SandboxExpired,
    SandboxLost,
)
from barchan.rollout.calls import Observation
from barchan.rollout.policies import NopPolicy, OraclePolicy, Policy, Step
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import FileArtifact, Task
from tests.unit.rollout.fakes import FakeClient, result, right_or_wrong, submit, task

pytestmark = pytest.mark.timeout(30)


async def run(client: FakeClient, policy: Policy, *, tasks: int = 1, **settings: Any) -> list[RolloutRecord]:
    records: list[RolloutRecord] = []
    await Runner(client, [task(number) for number in range(tasks)], policy, set_to(**settings), records.append).run()
    return records


def set_to(**settings: Any) -> RunSettings:
    return RunSettings(**{"run_id": "run", "template": "t", "concurrency": 4, "capacity_wait_s": 5.0, **settings})


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so; the test's own time-out is the bound."""
    while not is_so():
        await asyncio.sleep(0.001)


class Scripted:
    """Takes its turn by a function of the task, or raises."""

    name = "scripted"

    def __init__(self, script: Callable[[Task, int], Step]) -> None:
        self._script = script

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        return self._script(task, sample_index)


async def test_oracle_is_one_and_nop_is_zero() -> None:
    """Every rollout of the oracle is scored 1.0, of the empty answer 0.0, and no sandbox is left."""
    for policy, reward in ((OraclePolicy(), 1.0), (NopPolicy(), 0.0)):
        client = FakeClient()
        records = await run(client, policy, tasks=5, group=3)
        assert [record.verdict.reward for record in records] == [reward] * 15
        assert client.live == set()


async def test_each_rollout_has_its_own_ids() -> None:
    """Ids are unique; a sandbox's labels say run, rollout and role, its create id makes a repeat safe."""
    client = FakeClient()
    records = await run(client, OraclePolicy(), tasks=2, group=2)
    assert sorted((record.task_id, record.sample_index) for record in records) == [
        ("Fake/0", 0),
        ("Fake/0", 1),
        ("Fake/1", 0),
        ("Fake/1", 1),
    ]
    assert len({record.rollout_id for record in records}) == 4
    assert len(set(client.create_ids)) == 8
    assert {labels["role"] for labels in client.labels} == {"agent", "grader"}
    assert {labels["run"] for labels in client.labels} == {"run"}


async def test_the_agents_sandbox_is_gone_before_grading() -> None:
    """A rollout holds one sandbox at a time, and never grades where the agent was."""
    client = FakeClient()
    (record,) = await run(client, OraclePolicy())
    assert client.live_max == 1
    assert record.agent_sandbox_id not in record.grader_sandbox_ids
    assert len(record.grader_sandbox_ids) == 1


async def test_agents_and_gradings_are_bounded() -> None:
    """Never more agents at once than asked for, nor more gradings."""
    client = FakeClient()
    client.exec_s = 0.001
    live: dict[str, set[str]] = {"agent": set(), "grader": set()}
    most = {"agent": 0, "grader": 0}

    class Counting:
        name = "counting"

        async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
            for role in live:
                owned = zip(client.sandboxes, client.labels, strict=True)
                live[role] = {box.id for box, labels in owned if labels["role"] == role} & client.live
                most[role] = max(most[role], len(live[role]))
            return await OraclePolicy().step(task, sample_index, observation)

    records = await run(client, Counting(), tasks=20, concurrency=3, graders=2)
    assert len(records) == 20
    assert most["agent"] == 3 and 0 < most["grader"] <= 2
    assert client.live_max <= 5


async def test_one_that_fails_leaves_the_others_alone() -> None:
    """A lost sandbox voids its own rollout, with the error as evidence; its siblings are scored."""
    client = FakeClient()
    client.create_errors = [BootFailed("no boot")]
    records = await run(client, OraclePolicy(), group=4)
    assert sorted(record.verdict.status for record in records) == ["scored", "scored", "scored", "void"]
    (lost,) = [record.verdict for record in records if record.verdict.status == "void"]
    assert (lost.cause, lost.fault, lost.reward) == ("boot_failure", "platform", None)
    assert "BootFailed" in lost.evidence[0].source


async def test_no_room_is_waited_for_and_is_no_failure() -> None:
    """A refused create is repeated when the node asks for it; the wait is the queue's, the verdict a score."""
    client = FakeClient()
    client.create_errors = [CapacityError("full", retry_after_ms=20), CapacityError("full", retry_after_ms=20)]
    (record,) = await run(client, OraclePolicy())
    assert record.verdict.reward == 1.0
    assert record.timings.queue_ms is not None and record.timings.queue_ms >= 40
    assert record.timings.create_ms is not None and record.timings.create_ms < 20


async def test_waiting_for_room_has_a_bound() -> None:
    """A node that never has room voids the rollout for capacity, once its time to wait is over."""
    client = FakeClient()
    client.create_errors = [CapacityError("full", retry_after_ms=20) for _ in range(50)]
    (record,) = await run(client, OraclePolicy(), capacity_wait_s=0.1)
    assert (record.verdict.status, record.verdict.cause) == ("void", "capacity")


async def test_a_model_that_is_down_is_no_zero() -> None:
    """A policy that can't be asked voids the rollout as the model's fault, at the stage `policy`."""

    def down(task: Task, sample_index: int) -> Step:
        raise ModelError("refused", cause="model_unreachable")

    (record,) = await run(FakeClient(), Scripted(down))
    assert (record.verdict.status, record.verdict.fault, record.verdict.cause) == ("void", "model", "model_unreachable")
    assert record.verdict.evidence[0].source.startswith("policy: ")


@pytest.mark.parametrize("error", [ZeroDivisionError("surprise"), ExecTimeout("its own"), SandboxExpired("its own")])
async def test_a_policy_that_raises_is_the_callers_fault(error: Exception) -> None:
    """Whatever a policy raises but a fault of its model voids the rollout as the caller's, and is never a zero."""

    def broken(task: Task, sample_index: int) -> Step:
        raise error

    client = FakeClient()
    (record,) = await run(client, Scripted(broken))
    assert (record.verdict.status, record.verdict.fault, record.verdict.cause) == ("void", "caller", "policy_error")
    assert str(error) in str(record.verdict.evidence[0].value)
    assert client.live == set()


async def test_a_policy_that_gives_no_step_is_the_callers_fault() -> None:
    """A class of the user's that returns something else voids its rollouts, naming what came."""
    (record,) = await run(FakeClient(), Scripted(lambda task, sample_index: "code"))  # type: ignore[arg-type,return-value]
    assert (record.verdict.status, record.verdict.fault) == ("void", "caller")
    assert "gave a str" in str(record.verdict.evidence[0].value)


async def test_a_fault_of_our_own_is_void_and_unknown() -> None:
    """An exception that no one foresaw, in an exec, ends in a record of its own."""
    client = FakeClient()
    client.exec_error = ZeroDivisionError("surprise")
    (record,) = await run(client, OraclePolicy())
    assert (record.verdict.status, record.verdict.fault, record.verdict.cause) == ("void", "platform", "unknown")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SandboxExpired("gone", sandbox_id="sb_1"), "sandbox_expired"),
        (SandboxLost("gone", sandbox_id="sb_1"), "sandbox_lost"),
        (NotFound("no sandbox", sandbox_id="sb_1"), "sandbox_lost"),
        (Denied("this node wants its bearer token"), "unknown"),
    ],
)
async def test_a_sandbox_that_is_gone_is_void(error: Exception, cause: str) -> None:
    """A sandbox that ended under its rollout is never a result of the policy's."""
    client = FakeClient()
    client.exec_error = error
    (record,) = await run(client, OraclePolicy())
    assert (record.verdict.status, record.verdict.reward, record.verdict.cause) == ("void", None, cause)


async def test_a_connection_lost_in_mid_grading_is_void() -> None:
    """A transport fault during an exec never becomes a reward, and both sandboxes are freed."""
    client = FakeClient()
    client.exec_error = ConnectionLost("gone")
    (record,) = await run(client, OraclePolicy())
    assert (record.verdict.status, record.verdict.cause) == ("void", "transport")
    assert client.live == set()


async def test_a_failed_cleanup_is_noted_and_changes_no_verdict() -> None:
    """When a kill fails after the grading, the reward stands and the evidence tells."""
    client = FakeClient()
    client.kill_error = ConnectionLost("gone")
    (record,) = await run(client, OraclePolicy())
    assert record.verdict.reward == 1.0
    assert [item.source for item in record.verdict.evidence].count("cleanup") == 2


async def test_an_artifact_beyond_its_bound_is_scored_zero_ungraded() -> None:
    """Writing too much is the policy's doing; nothing of it reaches a grader."""
    client = FakeClient()
    answer = submit("#" * (FileArtifact().bytes_max + 1))
    (record,) = await run(client, Scripted(lambda task, sample_index: answer))
    assert (record.verdict.reward, record.verdict.cause) == (0.0, "output_limit")
    assert record.grader_sandbox_ids == ()


async def test_a_silent_grading_is_decided_by_its_control() -> None:
    """No report, and a control that passes, each in its own sandbox: the candidate broke it, which is a zero."""
    client = FakeClient(lambda source: ("", 0, 0, "") if "bomb" in source else ("passed", 1, 1, ""))
    client.checker_end = result(137, signal=9, oom_killed=True)
    answer = submit("bomb")
    (record,) = await run(client, Scripted(lambda task, sample_index: answer))
    assert (record.verdict.reward, record.verdict.cause) == (0.0, "oom_within_limit")
    assert len(set(record.grader_sandbox_ids)) == 3


async def test_a_grader_that_is_always_silent_is_the_platforms() -> None:
    """When the known-good solution gets no report either, the rollout is void."""
    client = FakeClient(lambda source: ("", 0, 0, ""))
    (record,) = await run(client, OraclePolicy())
    assert (record.verdict.status, record.verdict.fault, record.verdict.cause) == ("void", "platform", "reward_missing")


async def test_a_moments_stall_is_no_zero() -> None:
    """A grading that stalls once and answers the second time counts by its answer."""
    stalls = iter([True, False, False])

    def check(source: str) -> tuple[str, int, int, str]:
        return ("slow", 0, 1, "") if next(stalls) else ("passed", 1, 1, "")

    (record,) = await run(FakeClient(check), OraclePolicy())
    assert record.verdict.reward == 1.0


async def test_cancelling_keeps_what_is_finished_and_frees_the_rest() -> None:
    """The unfinished are recorded as cancelled, the finished stay, and no sandbox is left."""
    client = FakeClient(right_or_wrong)
    records: list[RolloutRecord] = []
    started = asyncio.Event()

    class Stuck:
        name = "stuck"

        async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
            if sample_index == 0:
                return submit(task.grader.reference)
            started.set()
            await asyncio.sleep(3600)
            raise AssertionError("not reached")

    settings = set_to(group=8, concurrency=2)
    running = asyncio.create_task(Runner(client, [task()], Stuck(), settings, records.append).run())
    await started.wait()
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(record.verdict.status for record in records) == ["cancelled", "cancelled", "scored"]
    assert {record.verdict.cause for record in records if record.verdict.status == "cancelled"} == {"cancelled_user"}
    assert client.live == set()


async def test_a_sink_that_fails_ends_the_run() -> None:
    """Results that can't be kept end the run with that error, and free every sandbox."""
    client = FakeClient()

    def full(record: RolloutRecord) -> None:
        raise BackendError("no space")

    settings = set_to(group=50, concurrency=2)
    with pytest.raises(BackendError, match="no space"):
        await Runner(client, [task()], OraclePolicy(), settings, full).run()
    assert client.live == set()
    assert len(client.create_ids) < 20


async def test_time_is_accounted_by_stage() -> None:
    """Each stage has its time; the first instruction lies between the create and the end of the first exec."""
    client = FakeClient()
    client.exec_s = 0.01
    (record,) = await run(client, OraclePolicy())
    timings = record.timings
    spent = [timings.create_ms, timings.policy_ms, timings.exec_ms, timings.grade_ms, timings.total_ms, timings.ttfi_ms]
    create, policy, execute, grading, total, first = [value for value in spent if value is not None]
    assert execute >= 10 and grading >= 10
    assert create <= first <= create + execute
    assert create + policy + execute + grading <= total + 0.01
