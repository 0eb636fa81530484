"""A run that stops by itself: voids that pile up, a group that is of no use any more, a budget that is spent."""

import asyncio
from typing import Any

import pytest

from barchan.errors import QuotaExceeded, SandboxExpired, SandboxLost
from barchan.rollout.breaker import BreakerTerms
from barchan.rollout.calls import Observation
from barchan.rollout.policies import OraclePolicy, Policy, Step
from barchan.rollout.record import Completion, RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Task
from tests.unit.rollout.fakes import FakeClient, submit, task

pytestmark = pytest.mark.timeout(60)


class Run:
    """One that has been run."""

    def __init__(self, client: FakeClient, policy: Policy, tasks: list[Task], **settings: Any) -> None:
        self.rows: list[RolloutRecord] = []
        self.said: list[str] = []
        terms = {"run_id": "run", "template": "t", "concurrency": 2, **settings}
        self.runner = Runner(client, tasks, policy, RunSettings(**terms), self.rows.append, notice=self.said.append)

    async def to_its_end(self) -> "Run":
        await self.runner.run()
        return self


class Lossy(FakeClient):
    """Loses the sandboxes of some tasks as they are made."""

    def __init__(self, lost: set[str]) -> None:
        super().__init__()
        self.lost = lost

    async def create(self, template: str, /, **options: Any) -> Any:
        rollout = options["labels"]["rollout"]
        if not self.lost or any(rollout.startswith(prefix) for prefix in self.lost):
            raise SandboxLost("the node is broken", sandbox_id="sb_1")
        return await super().create(template, **options)


async def test_a_broken_node_stops_the_run() -> None:
    """After a dozen voids, not after all; what was not begun has no record, so that a resumed run begins it."""
    ran = await Run(Lossy(set()), OraclePolicy(), [task(number) for number in range(50)], group=4).to_its_end()
    assert 12 <= len(ran.rows) <= 14
    assert {row.verdict.status for row in ran.rows} == {"void"}
    stopped = ran.runner.stopped
    assert stopped is not None and (stopped.cause, stopped.task_id) == ("sandbox_lost", None)
    assert len(ran.said) == 1 and "the run is stopped" in ran.said[0] and "rollouts are not begun" in ran.said[0]


async def test_it_goes_on_when_told_to() -> None:
    """Without a breaker all are tried."""
    tasks = [task(number) for number in range(10)]
    ran = await Run(Lossy(set()), OraclePolicy(), tasks, group=4, breaker=BreakerTerms(share=0.0)).to_its_end()
    assert ran.runner.stopped is None
    assert [row.verdict.cause for row in ran.rows] == ["sandbox_lost"] * 40


async def test_a_bad_task_is_quarantined_alone() -> None:
    """The others are scored to the last, and the rest of it is told as not begun."""
    tasks = [task(number) for number in range(6)]
    client = Lossy({f"run-{number:06d}" for number in range(2 * 30, 3 * 30)})
    ran = await Run(client, OraclePolicy(), tasks, group=30).to_its_end()
    causes = [row.verdict.cause for row in ran.rows if row.task_id == tasks[2].task_id]
    assert causes.count("sandbox_lost") < 10
    assert causes.count("sandbox_lost") + causes.count("task_quarantined") == 30
    assert sum(row.verdict.reward == 1.0 for row in ran.rows) == 5 * 30
    assert ran.runner.stopped is None


async def test_a_group_of_no_use_is_given_up() -> None:
    """Once too few of it can still be scored, its last members are not begun, and say why."""
    client = Lossy({f"run-{number:06d}" for number in range(5)})
    ran = await Run(client, OraclePolicy(), [task(number) for number in range(2)], group=8, concurrency=1).to_its_end()
    causes = [row.verdict.cause for row in ran.rows if row.group_index == 0]
    assert causes == ["sandbox_lost"] * 5 + ["cancelled_group"] * 3
    assert [row.verdict.reward for row in ran.rows if row.group_index == 1] == [1.0] * 8
    assert "given up, 3 of its rollouts are not begun" in ran.said[0]


async def test_a_cancelled_run_gives_no_group_up() -> None:
    """Most of a group is cancelled with it, and the rest, which a resumed run begins, has no record."""
    started: list[int] = []

    class Stuck:
        name = "stuck"

        async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
            started.append(sample_index)
            await asyncio.sleep(3600)
            raise AssertionError("not reached")

    run = Run(FakeClient(), Stuck(), [task()], group=8, concurrency=6)
    running = asyncio.create_task(run.to_its_end())
    while len(started) < 6:
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ([row.verdict.cause for row in run.rows], run.said) == (["cancelled_user"] * 6, [])


@pytest.mark.parametrize(
    "error",
    [
        QuotaExceeded("the lease has used up its budget of 10 tokens", budget="tokens_max"),
        SandboxExpired("sandbox sb_1 has ended: budget", cause="budget"),
    ],
)
async def test_a_spent_budget_is_nobodys_zero(error: Exception) -> None:
    """Void, by the caller, and nothing more is begun: where a budget ends says nothing of an attempt."""
    client = FakeClient()
    client.create_errors = [error]
    ran = await Run(
        client, OraclePolicy(), [task(number) for number in range(20)], concurrency=1, refill=3
    ).to_its_end()
    assert [(row.verdict.status, row.verdict.fault, row.verdict.cause) for row in ran.rows] == [
        ("void", "caller", "budget_spent")
    ]
    assert ran.runner.stopped is not None


async def test_a_task_that_is_larger_than_the_budget_stops_nobody() -> None:
    """It asks for more memory than the whole run may use; the others are scored."""
    client = FakeClient()
    client.create_errors = [QuotaExceeded("memory_mib=2048 is more than the budget", budget="memory_mib_max")]
    ran = await Run(client, OraclePolicy(), [task(number) for number in range(4)], concurrency=1).to_its_end()
    assert [(row.verdict.fault, row.verdict.cause) for row in ran.rows] == [
        ("task", "task_invalid"),
        *[("none", "completed")] * 3,
    ]
    assert ran.runner.stopped is None


class Sampled:
    """Answers at once, and says what that took."""

    name = "sampled"

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        completion = Completion(model="m", text="", prompt_tokens=7, completion_tokens=5)
        return submit("right", completion=completion)


async def test_tokens_are_told_to_the_lease() -> None:
    """Those of the prompt and of the completion."""
    client = FakeClient()
    await Run(client, Sampled(), [task(number) for number in range(3)]).to_its_end()
    assert client.tokens == 3 * 12
