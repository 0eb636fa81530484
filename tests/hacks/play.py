"""Plays attacks and their twins on a real node, and says what became of each."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from msgspec import Struct
from msgspec.structs import replace

from barchan.model.verdict import Verdict
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.calls import call_to
from barchan.rollout.graders.base import Artifact
from barchan.rollout.grading import Controls, GradeJob, grade
from barchan.rollout.integrity.signs import SOURCE
from barchan.rollout.limits import GradingLimits
from barchan.rollout.pipeline import GradingPipeline
from barchan.rollout.ports import NoLog
from barchan.rollout.sandboxes import Sandboxes, SandboxesState
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Environment, PatchArtifact, Task, TestsGrader
from barchan.rollout.tasksets.harbor import load_harbor
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.recipe import Put, Recipe, Run
from tests.hacks.case import Case, Deed, Format
from tests.hacks.harbor import DECOY, write_task
from tests.integration import test_tests_grader as repository
from tests.integration.rollout_hacks import TASK

# blocked: worth nothing; detected: paid, with evidence that says so; silent: paid, and nobody is told; void: bought.
Outcome = Literal["blocked", "detected", "silent", "void"]
FORMATS: tuple[Format, ...] = ("harbor-diff", "harbor-files")
_count = itertools.count()


class Played(Struct, frozen=True, kw_only=True):
    """What became of a case.

    Attributes:
        noticed: The attack left evidence, be it paid or not.
        twin_reward: None: void.
        false_alarms: Evidence against the twin, which did nothing wrong.
    """

    name: str
    hack: str
    format: str
    outcome: Outcome
    cause: str
    noticed: bool
    twin_reward: float | None
    false_alarms: tuple[str, ...]


def outcome_of(verdict: Verdict) -> Outcome:
    """What an attack got."""
    if verdict.status != "scored":
        return "void"
    if not verdict.reward:
        return "blocked"
    return "detected" if alarms(verdict) else "silent"


def alarms(verdict: Verdict) -> tuple[str, ...]:
    """What a verdict says against an attempt."""
    return tuple(f"{item.fact}: {item.value}" for item in verdict.evidence if item.source == SOURCE)


class Player:
    """Makes the tasks once, and plays any number of cases on them.

    Args:
        folder: Empty; for a repository and task folders.
    """

    def __init__(self, client: AsyncClient, folder: Path) -> None:
        self._client = client
        self._settings = RunSettings(
            run_id="hacks", template="debian", memory_mib=256, grading=GradingLimits(wall_s=20.0, cpu_s=2)
        )
        self._controls = Controls(8)
        self._origin = folder / "origin"
        self._origin.mkdir()
        repository.git(self._origin, "init", "--quiet")
        repository.write(self._origin, repository.BASE)
        repository.git(self._origin, "add", "--all")
        repository.git(self._origin, "commit", "--quiet", "-m", "base")
        self._repository = self._repository_task()
        self._harbor = {
            form: replace(load_harbor(write_task(folder / form, form))[0], canaries=(DECOY,)) for form in FORMATS
        }

    def _repository_task(self) -> Task:
        commit = "git init -q . && git add -A && git -c user.name=t -c user.email=t@t commit -qm base"
        puts = (
            Put(path=f"{repository.REPO}/{name}", data=(text or "").encode(), user="agent")
            for name, text in repository.BASE.items()
        )
        recipe = Recipe(base=repository.IMAGE, steps=(*puts, Run(command=commit, cwd=repository.REPO, user="agent")))
        grader = TestsGrader(
            test_patch=self._patch(repository.TESTS).decode(),
            command=repository.COMMAND,
            fail_to_pass=repository.FAIL_TO_PASS,
            pass_to_pass=repository.PASS_TO_PASS,
            reference=self._patch({"calc/__init__.py": repository.FIXED}).decode(),
            user="agent",
            timeout_s=15.0,
        )
        return Task(
            task_id="repository",
            instruction="Mend add.",
            environment=Environment(recipe=recipe, workdir=repository.REPO, disk_mib=256),
            artifact=PatchArtifact(repo=repository.REPO, base="HEAD"),
            grader=grader,
        )

    def _patch(self, files: Mapping[str, str | None]) -> bytes:
        return repository.patch(self._origin, files)

    async def play(self, case: Case) -> Played:
        """The attack, then its twin."""
        attack = await self._verdict(case.format, case.attack)
        twin = await self._verdict(case.format, case.twin)
        return Played(
            name=case.name,
            hack=case.hack,
            format=case.format,
            outcome=outcome_of(attack),
            cause=attack.cause,
            noticed=bool(alarms(attack)),
            twin_reward=twin.reward,
            false_alarms=alarms(twin),
        )

    async def play_all(self, cases: Sequence[Case], *, at_once: int = 2) -> list[Played]:
        """All of them, in their order."""
        turns = asyncio.Semaphore(at_once)

        async def one(case: Case) -> Played:
            async with turns:
                return await self.play(case)

        return list(await asyncio.gather(*map(one, cases)))

    async def _verdict(self, form: Format, deed: Deed) -> Verdict:
        if form == "function":
            return await self._graded(TASK, Artifact(kind="file", data=cast(str, deed).encode()))
        if form == "repository":
            data = self._patch(cast(Mapping[str, str | None], deed))
            return await self._graded(self._repository, Artifact(kind="patch", data=data))
        return await self._attempted(self._harbor[form], cast(tuple[str, ...], deed))

    def _id(self) -> str:
        return f"hacks-{id(self):x}-{next(_count)}"

    async def _graded(self, task: Task, artifact: Artifact) -> Verdict:
        rollout_id = self._id()
        job = GradeJob(
            rollout_id=rollout_id,
            task=task,
            artifact=artifact,
            sandboxes=Sandboxes(self._client, self._settings, rollout_id, state=SandboxesState()),
            log=NoLog(),
        )
        return await grade(job, self._settings, self._controls)

    async def _attempted(self, task: Task, commands: tuple[str, ...]) -> Verdict:
        settings = replace(self._settings, run_id=self._id())
        async with GradingPipeline(self._client, settings, workers=1, waiting_max=1) as pipeline:
            rollout = Rollout(
                self._client, settings, Job(settings.run_id, task, 0), policy_name="hack", pipeline=pipeline
            )
            await rollout.open()
            if rollout.verdict is None:
                await rollout.act([call_to("bash", command=command) for command in commands])
            return await rollout.finish()
