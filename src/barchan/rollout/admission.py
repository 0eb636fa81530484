"""Which tasks can be trusted: the oracle scores 1, doing nothing and handing in nothing score less, every time.

All of it goes the way that rollouts go, so what is checked is what will be used.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import BarchanError
from barchan.model.verdict import Evidence, Verdict
from barchan.rollout.artifact import nothing, ungraded
from barchan.rollout.calls import Observation
from barchan.rollout.pipeline import GradingPipeline
from barchan.rollout.policies.base import Policy, Step
from barchan.rollout.policies.canned import NopPolicy, OraclePolicy
from barchan.rollout.ports import Client
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import DiffArtifact, FunctionGrader, SharedArtifact, Task
from barchan.rollout.verdict import verdict_of_error

NOT_PASSED = "not passed"  # what a test's evidence begins with


class Admission(Struct, frozen=True, kw_only=True):
    """What became of one task. Rewards are in the order of the rounds; None is void.

    Attributes:
        seconds: What its rollouts took, one after the other.
        why: What keeps it out; empty where it is admitted.
        unstable: Tests, or whole scores, that were not the same in each round.
    """

    task_id: str
    admitted: bool
    oracle: tuple[float | None, ...]
    nop: tuple[float | None, ...]
    empty: tuple[float | None, ...]
    seconds: float = 0.0
    why: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()


class EmptyPolicy:
    """Leaves the sandbox as it is."""

    name = "empty"

    async def step(self, task: Task, sample_index: int, observation: Observation) -> Step:
        return Step(is_last=True)


async def check(
    client: Client,
    tasks: Sequence[Task],
    settings: RunSettings,
    *,
    rounds: int = 2,
    done: Callable[[str, str], None] = lambda task_id, what: None,
) -> list[Admission]:
    """Try every task, in order.

    Args:
        settings: `concurrency` and `graders` bound what goes on at once.
        done: Told of each attempt when it is over: the task, and what was tried.
    """
    settings = replace(settings, group=rounds, over_sample=0, refill=0)
    verdicts: dict[str, dict[str, list[Verdict]]] = defaultdict(lambda: defaultdict(list))
    seconds: dict[str, float] = defaultdict(float)

    async def play(policy: Policy, chosen: Sequence[Task]) -> None:
        def keep(record: RolloutRecord) -> None:
            verdicts[record.task_id][policy.name].append(record.verdict)
            seconds[record.task_id] += (record.timings.total_ms or 0.0) / 1e3
            done(record.task_id, policy.name)

        own = replace(settings, run_id=f"{settings.run_id}-{policy.name}")
        if chosen:
            await Runner(client, chosen, policy, own, keep).run()

    await play(OraclePolicy(), [task for task in tasks if task.oracle])
    await play(NopPolicy(), tasks)
    untouched = [task for task in tasks if isinstance(task.artifact, DiffArtifact | SharedArtifact)]
    await play(EmptyPolicy(), [task for task in untouched if task.nop])
    for task in untouched:
        if not task.nop:  # the same thing under another name
            verdicts[task.task_id]["empty"] = verdicts[task.task_id]["nop"]
    graders = GradingPipeline(client, settings, workers=settings.graders, waiting_max=len(tasks) * rounds)
    async with graders, asyncio.TaskGroup() as group:
        for task in tasks:
            for index in range(0 if isinstance(task.artifact, DiffArtifact | SharedArtifact) else rounds):
                name = f"{settings.run_id}-empty-{task.task_id}-{index}"
                group.create_task(_grade_nothing(graders, task, name, verdicts[task.task_id]["empty"], done))
    return [admission(task, verdicts[task.task_id], seconds[task.task_id]) for task in tasks]


async def _grade_nothing(
    graders: GradingPipeline, task: Task, name: str, verdicts: list[Verdict], done: Callable[[str, str], None]
) -> None:
    try:
        verdicts.append(await _verdict_on_nothing(graders, task, name))
    except BarchanError as error:
        verdicts.append(verdict_of_error(error, "grade"))
    done(task.task_id, "empty")


async def _verdict_on_nothing(graders: GradingPipeline, task: Task, name: str) -> Verdict:
    """An artifact without content. A rollout's would not even be graded; here it is, to see what the checks say."""
    if isinstance(task.grader, FunctionGrader):  # there is nothing that could be called
        return ungraded(Evidence(source="artifact", fact="empty, of bytes", value=0), "completed")
    return await graders.grade(graders.job(name, task, nothing(task)))


def admission(task: Task, verdicts: dict[str, list[Verdict]], seconds: float) -> Admission:
    """What the verdicts of all rounds say about a task."""
    why = [] if task.oracle else ["it has no known-good attempt"]
    same: dict[str, dict[str, list[int]]] = {}  # what is told, and of which rounds of what
    for what in ("oracle", "nop", "empty"):
        for index, verdict in enumerate(verdicts.get(what, ()), 1):
            if verdict.reward is None or (verdict.reward < 1.0) == (what == "oracle"):
                same.setdefault(_told(verdict), {}).setdefault(what, []).append(index)
    why += [f"{' and '.join(_rounds(what, at) for what, at in where.items())}: {told}" for told, where in same.items()]
    rewards = {what: tuple(verdict.reward for verdict in verdicts.get(what, ())) for what in ("oracle", "nop", "empty")}
    unstable = [f"{what}: its score" for what, given in rewards.items() if len(set(given)) > 1]
    unstable += _unstable_tests(verdicts.get("oracle", ()))
    if unstable:
        why.append(f"unstable: {', '.join(unstable)}")
    return Admission(
        task_id=task.task_id,
        admitted=not why,
        oracle=rewards["oracle"],
        nop=rewards["nop"],
        empty=rewards["empty"],
        seconds=round(seconds, 3),
        why=tuple(why),
        unstable=tuple(unstable),
    )


def _rounds(what: str, rounds: list[int]) -> str:
    return f"{what}, round{'s' if len(rounds) > 1 else ''} {', '.join(map(str, rounds))}"


def _told(verdict: Verdict) -> str:
    """A verdict in a line, with the first of what is behind it."""
    first = "; ".join(f"{item.source}: {item.fact}: {item.value}" for item in verdict.evidence[:3])
    how = f"reward {verdict.reward:g}" if verdict.reward is not None else f"{verdict.status} by {verdict.fault}"
    return f"{how}, {verdict.cause}{f' ({first})' if first else ''}"


def _unstable_tests(verdicts: Sequence[Verdict]) -> list[str]:
    """Tests that failed in one round and passed in another. One that always fails is no flake, it is broken."""
    failed: list[set[str]] = [
        {str(item.value) for item in verdict.evidence if item.fact.startswith(NOT_PASSED)}
        for verdict in verdicts
        if verdict.status == "scored"
    ]
    everywhere = failed[0].intersection(*failed) if failed else set[str]()
    return sorted(set[str]().union(*failed) - everywhere)
