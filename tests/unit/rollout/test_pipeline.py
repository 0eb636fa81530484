"""Grading as a stage: bounded, fair to its callers, and with controls that are made once."""

import asyncio
import time

import pytest

from barchan.errors import Conflict, ConnectionLost, InvalidSpec
from barchan.model.verdict import Verdict
from barchan.rollout.graders.base import Artifact
from barchan.rollout.grading import CONTROL_AGE_S_MAX, Controls, GradeJob, is_valid
from barchan.rollout.pipeline import GradingPipeline
from barchan.rollout.settings import RunSettings
from barchan.rollout.verdict import Control
from tests.unit.rollout.fakes import FakeClient, right_or_wrong, task

pytestmark = pytest.mark.timeout(30)

SETTINGS = RunSettings(run_id="run", template="t")
GOOD = b"def f():\n    return 1\n"
HANGS = b"while True: pass\n"


def hanging(source: str) -> tuple[str, int, int, str]:
    """An honest checker, with a candidate that may never answer."""
    return ("slow", 0, 1, "no answer in time") if "while" in source else right_or_wrong(source)


def nobody_answers(source: str) -> tuple[str, int, int, str]:
    return ("slow", 0, 1, "no answer in time")


def pipeline(client: FakeClient, workers: int = 1, waiting_max: int = 1) -> GradingPipeline:
    return GradingPipeline(client, SETTINGS, workers=workers, waiting_max=waiting_max)


def job(stage: GradingPipeline, name: str, data: bytes = GOOD, number: int = 0) -> GradeJob:
    return stage.job(name, task(number), Artifact(kind="file", data=data))


async def until(is_so: object) -> None:
    """Give other tasks their turns until it is so."""
    assert callable(is_so)
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_so_many_are_graded_at_once_and_the_others_wait() -> None:
    """Two workers: two sandboxes at most, whatever comes; all are graded, and the times are kept."""
    client = FakeClient()
    client.exec_s = 0.02
    async with pipeline(client, workers=2, waiting_max=3) as stage:
        jobs = [job(stage, f"r{number}") for number in range(9)]
        verdicts = await asyncio.gather(*(stage.grade(each) for each in jobs))
        assert [verdict.reward for verdict in verdicts] == [1.0] * 9
        assert (client.live_max, client.live) == (2, set())
        told = stage.statistics()
        assert (told.waiting, told.grading, told.done) == (0, 0, 9)
        assert told.grade_ms.p50 is not None
        assert max(each.queue_s for each in jobs) > 0
        assert min(each.grade_s for each in jobs) > 0


async def test_room_is_there_when_fewer_wait() -> None:
    """Whoever opens rollouts is held while as many wait as may, and goes on when one is taken up."""
    client = FakeClient()
    client.exec_s = 3600
    async with pipeline(client) as stage:
        await stage.room()
        tasks = [asyncio.create_task(stage.grade(job(stage, f"r{number}"))) for number in range(3)]
        await until(lambda: stage.statistics().grading == 1)
        opener = asyncio.create_task(stage.room())
        await asyncio.sleep(0.05)
        assert (stage.statistics().waiting, opener.done()) == (1, False)
        for each in tasks[:2]:
            each.cancel()
        await until(lambda: stage.statistics().grading == 1 and stage.statistics().waiting == 0)
        await opener
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert client.live == set()


async def test_leaving_waits_for_what_is_graded_and_refuses_the_rest() -> None:
    """A grading that goes on is finished; one that waits, or comes later, is told."""
    client = FakeClient()
    client.exec_s = 0.1
    stage = pipeline(client, waiting_max=2)
    async with stage:
        first = asyncio.create_task(stage.grade(job(stage, "r1")))
        await until(lambda: stage.statistics().grading == 1)
        second = asyncio.create_task(stage.grade(job(stage, "r2")))
        await until(lambda: stage.statistics().waiting == 1)
    assert first.done()
    assert (await first).reward == 1.0
    for late in (second, stage.grade(job(stage, "r3"))):
        with pytest.raises(Conflict):
            await late


async def test_a_failure_frees_the_worker() -> None:
    """What the platform fails to do is raised, and the next one is graded."""
    client = FakeClient()
    async with pipeline(client) as stage:
        client.exec_error = ConnectionLost("gone")
        with pytest.raises(ConnectionLost):
            await stage.grade(job(stage, "r1"))
        client.exec_error = None
        assert (await stage.grade(job(stage, "r2"))).reward == 1.0


def test_no_workers_or_no_room_is_refused() -> None:
    """A pipeline that could never grade is the caller's mistake."""
    for numbers in ({"workers": 0}, {"waiting_max": 0}):
        with pytest.raises(InvalidSpec):
            pipeline(FakeClient(), **numbers)


async def test_hanging_is_zero_and_its_control_is_made_once() -> None:
    """The known-good solution passes on this node, so twice no answer is the submission's doing. Who hangs next, on the
    same task, is looked at twice and costs no control.
    """
    client = FakeClient(hanging)
    async with pipeline(client) as stage:
        jobs = [job(stage, "r1", HANGS), job(stage, "r2", HANGS), job(stage, "r3", HANGS, number=1)]
        verdicts = [await stage.grade(each) for each in jobs]
    assert [(verdict.reward, verdict.cause) for verdict in verdicts] == [(0.0, "exec_timeout")] * 3
    assert [len(each.sandboxes.state.ids["grader"]) for each in jobs] == [3, 2, 3]
    assert [item.value for item in verdicts[1].evidence if item.source == "control"] == ["good"]


async def test_those_who_hang_together_share_one_control() -> None:
    """The others wait for the control that the first one makes, and take it as it is, good or not."""
    for check, reward, sandboxes in ((hanging, 0.0, 2 * 8 + 1), (nobody_answers, None, 8 + 1)):
        client = FakeClient(check)
        client.exec_s = 0.02
        async with pipeline(client, workers=8, waiting_max=8) as stage:
            jobs = [job(stage, f"r{number}", HANGS) for number in range(8)]
            verdicts = await asyncio.gather(*(stage.grade(each) for each in jobs))
        assert [verdict.reward for verdict in verdicts] == [reward] * 8
        assert len(client.create_ids) == sandboxes


async def test_a_bad_moment_of_the_node_is_not_kept() -> None:
    """While not even the known-good solution is answered, hanging is void; later the control is made anew."""
    client = FakeClient(nobody_answers)
    async with pipeline(client) as stage:
        verdict: Verdict = await stage.grade(job(stage, "r1", HANGS))
        assert (verdict.status, verdict.fault, verdict.cause) == ("void", "platform", "grader_timeout")
        client.check = hanging
        assert (await stage.grade(job(stage, "r2", HANGS))).reward == 0.0


async def test_a_control_that_is_cancelled_is_made_by_the_next() -> None:
    """Those who waited for it make their own."""
    controls = Controls(10)
    begun = asyncio.Event()

    async def never() -> Control:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def good() -> Control:
        return Control(outcome="good")

    first = asyncio.create_task(controls.of(task(), never))
    await begun.wait()
    second = asyncio.create_task(controls.of(task(), good))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).outcome == "good"
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_controls_are_kept_for_a_bounded_number_of_tasks() -> None:
    """The one made longest ago is forgotten."""
    controls, made = Controls(2), []

    async def good() -> Control:
        made.append(1)
        return Control(outcome="good")

    for number in (0, 1, 2, 2, 1, 0):
        await controls.of(task(number), good)
    assert len(made) == 4


def test_how_long_a_control_counts() -> None:
    """A good one for a while; any other for those who asked before it was made, and nobody else."""
    good, bad = Control(outcome="good"), Control(outcome="undecided")
    assert is_valid(good, made=100.0, asked=150.0, now=150.0)
    assert not is_valid(good, made=100.0, asked=150.0, now=100.0 + CONTROL_AGE_S_MAX)
    assert not is_valid(bad, made=100.0, asked=101.0, now=101.0)
    assert is_valid(bad, made=100.0, asked=99.0, now=101.0)
