"""What a policy breaks within its limits scores, what others break is void, and what nobody can tell ends a task."""

import asyncio

import pytest

from barchan.backends.base import Ended
from barchan.backends.gvisor.handle import OUT_OF_MEMORY
from barchan.backends.qemu.machine import Machine
from barchan.errors import BarchanError, BlobUnavailable, InitDied, InvalidSpec, SandboxExpired, SandboxLost
from barchan.model.verdict import Cause, Verdict
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.graders.base import Artifact
from barchan.rollout.grading import Controls, grade
from barchan.rollout.pipeline import GradingPipeline
from barchan.rollout.policies import NopPolicy, OraclePolicy, Policy
from barchan.rollout.record import Resources, RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Environment, PythonGrader, Task
from barchan.rollout.verdict import verdict_of_error
from tests.unit.rollout.fakes import FakeClient, task
from tests.unit.rollout.test_runner import set_to

pytestmark = pytest.mark.timeout(30)

SELF = "tests.unit.rollout.test_ruin"
GIVEN: list[float] = []


def in_turns(task: Task, artifact: Artifact) -> float:
    """A flaky grader: the good artifact always passes, any other one gets the next of GIVEN."""
    return 1.0 if artifact.data.decode() == dict(task.labels)["good"] else GIVEN.pop(0)


def at_random(task: Task, artifact: Artifact) -> float:
    """A flaky grader for all."""
    return GIVEN.pop(0)


def breaks(task: Task, artifact: Artifact) -> float:
    raise KeyError("the grader's own")


def lost(why: str, wstatus: int = 0) -> SandboxLost:
    """As a node tells it of a machine whose end was heard so."""
    cause = f"init_died: {Ended(wstatus=wstatus, oom_kills=0, why=why).words}"
    return SandboxLost(f"sandbox sb_1 has ended: {cause}", sandbox_id="sb_1", cause=cause)


@pytest.mark.parametrize(
    ("event", "data"),
    [
        ("SHUTDOWN", {"guest": True, "reason": "guest-shutdown"}),
        ("SHUTDOWN", {"guest": True, "reason": "guest-reset"}),
        ("GUEST_PANICKED", {}),
    ],
)
async def test_a_machine_that_its_guest_ended_is_the_guests_doing(event: str, data: dict[str, object]) -> None:
    """Powered off, restarted, panicked: zero while the agent acts, undecided while its artifact is graded."""
    machine = Machine.__new__(Machine)
    machine.guest_ended = asyncio.get_running_loop().create_future()
    machine._hear(event, data)
    for why in (machine.why_ended, f"{machine.why_ended}: the guest's last words"):
        verdict = verdict_of_error(lost(why), "exec")
        assert (verdict.status, verdict.reward, verdict.cause) == ("scored", 0.0, "guest_wrecked")
        verdict = verdict_of_error(lost(why), "grade")
        assert (verdict.status, verdict.cause) == ("void", "grader_crash")


def test_a_guest_that_its_own_memory_limit_ended_is_the_guests_doing() -> None:
    """With the kernel of user space that it shares the limit with: zero while the agent acts."""
    told = f"init_died: {Ended(wstatus=9, oom_kills=30, why=f'{OUT_OF_MEMORY}: the sentry').words}"
    error = InitDied("the init of sb_1 ended by signal 9", wstatus=9, cause=told)
    verdict = verdict_of_error(error, "exec")
    assert (verdict.status, verdict.reward, verdict.cause) == ("scored", 0.0, "oom_within_limit")
    assert verdict.fault == "policy"
    assert verdict_of_error(error, "grade").cause == "grader_crash"
    assert verdict_of_error(error, "setup").cause == "sandbox_lost"


@pytest.mark.parametrize(
    ("error", "stage", "cause"),
    [
        (lost(OUT_OF_MEMORY), "exec", "sandbox_lost"),
        (lost("it was shut down from inside"), "create", "sandbox_lost"),
        (lost("QEMU reached the memory limit of the container around it"), "exec", "sandbox_lost"),
        (lost("x: it was shut down from inside"), "exec", "sandbox_lost"),
        (lost("it was shut down from inside", wstatus=9), "exec", "sandbox_lost"),
        (InitDied("the init of sb_1 ended by signal 9", wstatus=9), "exec", "sandbox_lost"),
        (SandboxLost("the host was out of memory, and its kernel killed a program of the sandbox"), "exec", "oom_host"),
        (SandboxLost("gone", sandbox_id="sb", cause="evicted: the host was out of memory, and"), "exec", "oom_host"),
        (SandboxExpired("gone", sandbox_id="sb", cause="killed"), "exec", "sandbox_expired"),
        (BlobUnavailable("slow", sandbox_id="sb"), "exec", "image_unavailable"),
    ],
)
def test_a_sandbox_that_others_ended_is_void(error: BarchanError, stage: str, cause: Cause) -> None:
    """Also where the guest's own words say otherwise, or nothing of the policy's had run."""
    verdict = verdict_of_error(error, stage)
    assert (verdict.status, verdict.fault, verdict.cause) == ("void", "platform", cause)


async def opened(given: Task) -> Rollout:
    rollout = Rollout(FakeClient(), set_to(), Job("r-0", given, 0), policy_name="p")
    await rollout.open()
    return rollout


async def test_no_driver_gives_a_rollout_a_cause_of_the_platforms() -> None:
    """`finish` takes how a policy's part can end, and nothing else."""
    rollout = await opened(task())
    for cause in ("sandbox_lost", "oom_within_limit", "cancelled_user"):
        with pytest.raises(InvalidSpec, match="none of ours"):
            await rollout.finish(cause)  # type: ignore[arg-type]
    assert (await rollout.finish("turn_limit")).truncated


async def test_what_is_declared_and_what_is_enforced_are_recorded() -> None:
    """A limit may be above what the task declares, and never below; the kernel is given the limit."""
    for limit, enforced in ((None, 256), (1024, 1024), (64, 256)):
        environment = Environment(memory_mib=256, memory_limit_mib=limit, cpus=2.0)
        client = FakeClient()
        rollout = Rollout(client, set_to(), Job("r-0", task(environment=environment), 0), policy_name="p")
        await rollout.open()
        assert client.options[0]["memory_mib"] == enforced
        await rollout.finish()
        assert rollout.row().resources == Resources(
            memory_mib=256, memory_limit_mib=enforced, pids_max=128, cpus=2.0, disk_mib=None
        )


def graded_by(function: str, **fields: object) -> Task:
    good = task()
    labels = {"good": str(good.grader.reference)}  # type: ignore[union-attr]
    return task(grader=PythonGrader(function=f"{SELF}:{function}"), labels=labels, **fields)


async def graded(given: Task, times: int) -> Verdict:
    settings = RunSettings(run_id="run", template="t", gradings=times)
    async with GradingPipeline(FakeClient(), settings, workers=1, waiting_max=1) as stage:
        return await grade(stage.job("r", given, Artifact(kind="file", data=b"mine")), settings, Controls(8))


@pytest.mark.parametrize(
    ("function", "rewards", "reward", "cause"),
    [
        ("in_turns", [1.0, 1.0, 1.0], 1.0, "completed"),
        ("in_turns", [1.0, 0.0, 1.0], 0.0, "completed"),
        ("at_random", [1.0, 0.0, 1.0, 1.0, 0.0, 1.0], None, "grader_nondeterministic"),
    ],
)
async def test_rewards_that_disagree(function: str, rewards: list[float], reward: float | None, cause: Cause) -> None:
    """Beside a known-good artifact that is stable the least stands; beside one that is not, nothing does."""
    GIVEN[:] = rewards
    verdict = await graded(graded_by(function), 3)
    assert (verdict.reward, verdict.cause, GIVEN) == (reward, cause, [])


async def run(given: list[Task], policy: Policy, told: list[str], **settings: int) -> list[RolloutRecord]:
    records: list[RolloutRecord] = []
    await Runner(FakeClient(), given, policy, set_to(**settings), records.append, notice=told.append).run()
    return records


async def test_a_task_whose_gradings_nothing_can_be_compared_with_is_quarantined() -> None:
    """What has begun is void and not tried again, the others are not begun, and the run says so; other tasks go on."""
    told: list[str] = []
    bad = graded_by("breaks", oracle=(), task_id="bad")
    records = await run([bad, task(1)], NopPolicy(), told, group=8, concurrency=1, refill=3)
    lost = [record for record in records if record.task_id == "bad"]
    skipped = sum(record.verdict.cause == "task_quarantined" for record in lost)
    begun = sum(record.verdict.cause == "grader_crash" for record in lost)
    assert (len(lost), begun + skipped, {record.verdict.status for record in lost}) == (8, 8, {"void"})
    assert {record.attempt for record in lost} == {0}
    assert skipped > 0 and begun > 0
    assert [record.verdict.reward for record in records if record.task_id != "bad"] == [0.0] * 8
    assert told == [
        f"task bad is quarantined, {skipped} rollouts are not begun: it has no known-good artifact to compare with"
    ]


async def test_a_task_with_a_control_is_not_quarantined() -> None:
    """Where the known-good artifact has no answer either, that moment's gradings are void, and the next are tried."""
    told: list[str] = []
    records = await run([graded_by("breaks")], OraclePolicy(), told, group=2, concurrency=1)
    assert [record.verdict.cause for record in records] == ["grader_crash"] * 2
    assert told == []
