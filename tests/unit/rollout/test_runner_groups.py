"""How a run fills its groups, and what it waits for."""

import asyncio
from collections import Counter, defaultdict

import pytest

from barchan.errors import BarchanError, ModelError, TaskError
from barchan.model.verdict import Verdict
from barchan.rollout.attempt import Rollout
from barchan.rollout.calls import Observation
from barchan.rollout.policies import OraclePolicy, Step
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Earlier, Runner
from barchan.rollout.task import Environment, PythonGrader, Task
from barchan.sdk.recipe import Recipe
from tests.unit.rollout.fakes import FakeClient, right_or_wrong, submit, task
from tests.unit.rollout.test_runner import Scripted, run, set_to, until

pytestmark = pytest.mark.timeout(60)

# groups


class Sampled:
    """Answers with what a plan says of each try at a place: `right`, `wrong`, `down` (no model), `stuck`."""

    name = "sampled"

    def __init__(self, plan: dict[int, list[str]]) -> None:
        self._plan = plan
        self.tries: Counter[int] = Counter()
        self.stuck = 0
        self.go = asyncio.Event()

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        does = self._plan[sample_index][self.tries[sample_index]]
        self.tries[sample_index] += 1
        if does == "down":
            raise ModelError("refused", cause="model_unreachable")
        if does == "stuck":
            self.stuck += 1
            await self.go.wait()
        return submit(task.grader.reference if does != "wrong" else "def f():\n    pass\n")


async def test_the_first_scored_are_kept_and_the_rest_is_surplus() -> None:
    """Started are more than wanted; those that are not among the first scored are cancelled, with their sandboxes
    freed, and recorded, whether they had begun or not.
    """
    client = FakeClient(right_or_wrong)
    policy = Sampled({0: ["stuck"], 1: ["right"], 2: ["stuck"], 3: ["wrong"], 4: ["right"]})
    records = await run(client, policy, group=2, over_sample=3, concurrency=3)
    by_place = {record.sample_index: record for record in records}
    assert len(records) == len(by_place) == 5
    assert {place for place, record in by_place.items() if record.verdict.status == "scored"} == {1, 3}
    assert {record.verdict.cause for place, record in by_place.items() if place not in (1, 3)} == {"cancelled_surplus"}
    assert policy.tries[4] == 0 or by_place[4].verdict.status == "cancelled"
    assert client.live == set()


async def test_a_group_never_has_more_scores_than_wanted() -> None:
    """However close together they come, and in whatever stage the others are: the rest is surplus."""
    client = FakeClient(right_or_wrong)
    client.exec_s = 0.001
    records = await run(client, OraclePolicy(), tasks=6, group=3, over_sample=4, concurrency=7, graders=7)
    statuses: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        statuses[record.task_id][record.verdict.status] += 1
    assert set(map(str, statuses.values())) == {str(Counter({"cancelled": 4, "scored": 3}))}
    assert client.live == set()


async def test_a_surplus_one_that_is_just_failing_has_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is at its end already when its group fills up: what it was stands, and its log is closed."""
    is_failing, goes_on = asyncio.Event(), asyncio.Event()
    fail = Rollout.fail

    async def slowly(rollout: Rollout, error: Exception) -> Verdict:
        is_failing.set()
        await goes_on.wait()
        return await fail(rollout, error)

    class Plan(Sampled):
        async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
            if sample_index == 1:
                await is_failing.wait()
                asyncio.get_running_loop().call_later(0.2, goes_on.set)
            return await super().step(task, sample_index, observation)

    monkeypatch.setattr(Rollout, "fail", slowly)
    records = await run(FakeClient(right_or_wrong), Plan({0: ["down"], 1: ["right"]}), group=1, over_sample=1)
    assert sorted((row.sample_index, row.verdict.cause) for row in records) == [
        (0, "model_unreachable"),
        (1, "completed"),
    ]


async def test_a_void_rollout_is_tried_again_in_its_place() -> None:
    """As the next attempt, with an id and sandboxes of its own; the void ones stay in the results."""
    client = FakeClient(right_or_wrong)
    policy = Sampled({0: ["down", "down", "right"], 1: ["right"]})
    records = await run(client, policy, group=2, refill=2)
    assert sorted((row.sample_index, row.attempt, row.verdict.status) for row in records) == [
        (0, 0, "void"),
        (0, 1, "void"),
        (0, 2, "scored"),
        (1, 0, "scored"),
    ]
    assert len({row.rollout_id for row in records}) == 4
    assert len(set(client.create_ids)) == len(client.create_ids)


async def test_trying_again_has_its_bound_and_its_reasons() -> None:
    """No more than asked for; never for a policy that raises."""
    rows = await run(FakeClient(), Sampled({0: ["down"] * 9}), refill=3)
    assert [(row.attempt, row.verdict.status) for row in rows] == [(0, "void"), (1, "void"), (2, "void"), (3, "void")]

    def broken(task: Task, sample_index: int) -> Step:
        raise ZeroDivisionError("surprise")

    assert len(await run(FakeClient(), Scripted(broken), refill=3)) == 1


async def test_a_spare_sibling_is_better_than_another_try() -> None:
    """With more started than wanted, a void one is not tried again as long as the group can fill up without it."""
    rows = await run(
        FakeClient(right_or_wrong),
        Sampled({0: ["down"], 1: ["right"]}),
        group=1,
        over_sample=1,
        refill=1,
        concurrency=1,
    )
    assert [(row.sample_index, row.verdict.status) for row in rows] == [(0, "void"), (1, "scored")]


async def test_a_resumed_run_does_what_is_missing() -> None:
    """Scored places are left alone; the others run under ids that were not used."""
    records: list[RolloutRecord] = []
    earlier = Earlier(
        frozenset({(0, 0), (1, 1)}), frozenset({"run-000000", "run-000001", "run-000003", "run-000001-1"})
    )
    runner = Runner(
        FakeClient(right_or_wrong),
        [task(0), task(1)],
        OraclePolicy(),
        set_to(group=2),
        records.append,
        earlier=earlier,
    )
    await runner.run()
    assert sorted((row.rollout_id, row.group_index, row.sample_index, row.attempt) for row in records) == [
        ("run-000001-2", 0, 1, 2),
        ("run-000002", 1, 0, 0),
    ]
    assert runner.rollouts_total == 4


# graders and environments


async def test_slow_graders_hold_no_agent_and_stop_the_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is graded, agents end and are not held; no more rollouts are opened than may wait, and all is
    scored once the graders go on.
    """
    go = asyncio.Event()

    async def slow(task: Task, artifact: object) -> float:
        await go.wait()
        return 1.0

    client, records = FakeClient(), list[RolloutRecord]()
    tasks = [task(number, grader=PythonGrader(function="mine:slow", timeout_s=1000.0)) for number in range(20)]
    monkeypatch.setattr("barchan.rollout.graders.python.load_function", lambda name, what: slow)
    runner = Runner(client, tasks, OraclePolicy(), set_to(concurrency=2, graders=1), records.append)
    running = asyncio.create_task(runner.run())
    # One in grading, one that waits, and the agents that were at work when that was reached.
    await until(lambda: "0 at work, 1 wait for grading, 1 in grading" in runner.activity)
    assert client.live == set()
    opened = len(client.create_ids)
    assert 2 <= opened <= 4
    await asyncio.sleep(0.05)
    assert (len(client.create_ids), records) == (opened, [])
    go.set()
    await running
    assert [row.verdict.reward for row in records] == [1.0] * 20
    assert runner.waits.graders_s > 0


async def test_an_environment_that_can_not_be_made_voids_its_task_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once; its rollouts are void, by the task's fault; others went on before it was known."""
    client, records, said = FakeClient(right_or_wrong), list[RolloutRecord](), list[str]()
    built: list[Recipe] = []

    async def build(client: FakeClient, recipe: Recipe) -> str:
        if recipe.base == "broken":
            await until(lambda: any(row.task_id == "Fake/1" for row in records))
            raise TaskError("step 2 failed")
        built.append(recipe)
        return f"made-of-{recipe.base}"

    monkeypatch.setattr("barchan.sdk.build.build", build)
    tasks = [
        task(0, environment=Environment(recipe=Recipe(base="broken"))),
        task(1),
        task(2, environment=Environment(recipe=Recipe(base="good"))),
    ]
    await Runner(client, tasks, OraclePolicy(), set_to(group=3, refill=2), records.append, notice=said.append).run()
    verdicts = {row.task_id: (row.verdict.status, row.verdict.cause) for row in records}
    assert verdicts == {
        "Fake/0": ("void", "task_invalid"),
        "Fake/1": ("scored", "completed"),
        "Fake/2": ("scored", "completed"),
    }
    assert (len(records), len(said)) == (9, 1)
    assert "Fake/0" in said[0] and "step 2 failed" in said[0]
    assert "made-of-good" in client.templates and client.live == set()


async def test_an_environment_that_is_not_ready_holds_no_agents_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one place only, the tasks behind it run first."""
    records = list[RolloutRecord]()

    async def build(client: FakeClient, recipe: Recipe) -> str:
        await until(lambda: len(records) == 2)
        await asyncio.sleep(0.02)
        return "made"

    monkeypatch.setattr("barchan.sdk.build.build", build)
    tasks = [task(0, environment=Environment(recipe=Recipe(base="b"))), task(1), task(2)]
    runner = Runner(FakeClient(right_or_wrong), tasks, OraclePolicy(), set_to(concurrency=1), records.append)
    await runner.run()
    assert [row.task_id for row in records] == ["Fake/1", "Fake/2", "Fake/0"]
    assert runner.waits.environments_s > 0


def test_a_tool_or_grader_that_is_not_there_is_told_before_anything_starts() -> None:
    """Making the runner is enough."""
    for broken in (task(tools=("no.such:Tool",)), task(grader=PythonGrader(function="no.such:grader"))):
        with pytest.raises(BarchanError, match=r"no\.such"):
            Runner(FakeClient(), [broken], OraclePolicy(), set_to(), lambda record: None)
