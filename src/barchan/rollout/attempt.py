"""One rollout, stage by stage: create, policy, exec, grade."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import BackendError, BarchanError, CapacityError
from barchan.model.verdict import Evidence, Verdict
from barchan.rollout.graders.functions import GradingLimits, grade, with_control
from barchan.rollout.policies.base import Completion, Policy
from barchan.rollout.ports import Client, Sandbox
from barchan.rollout.record import RolloutRecord, Timings
from barchan.rollout.task import Task
from barchan.rollout.verdict import Grading, judge, needs_control, scored

ARTIFACT = "solution.py"
ARTIFACT_BYTES_MAX = 1 << 20
SANDBOX_TTL_S = 3600.0  # only against leaks: far beyond a model call with all its retries
RETRY_MS_DEFAULT = 100
WRITE = ("sh", "-c", 'cat > "$0" && test -s "$0"', ARTIFACT)


class RunSettings(Struct, frozen=True, kw_only=True):
    """How a run is carried out.

    Attributes:
        group: Attempts at each task.
        concurrency: Rollouts at once. Each holds one sandbox at a time: the agent's ends before the grader's begins.
        capacity_wait_s: How long a rollout waits, in total, for a node that has no room; then it is void.
    """

    run_id: str
    template: str
    group: int = 1
    concurrency: int = 16
    memory_mib: int = 512
    pids_max: int = 128
    capacity_wait_s: float = 300.0
    limits: GradingLimits = GradingLimits()


class Job(NamedTuple):
    rollout_id: str
    task: Task
    sample_index: int


class Rollout:
    """One attempt. `stage` says how far it came; `record` can be made at any point."""

    def __init__(self, client: Client, policy: Policy, settings: RunSettings, job: Job) -> None:
        self._client = client
        self._policy = policy
        self._settings = settings
        self._job = job
        self._started = time.monotonic()
        self._started_unix_s = time.time()
        self._spent_s: dict[str, float] = {}
        self._queue_s = 0.0
        self._sandbox_ids: dict[str, list[str]] = {"agent": [], "grader": []}
        self._artifact: str | None = None
        self._completion: Completion | None = None
        self._notes: tuple[Evidence, ...] = ()
        self.stage = "create"

    async def run(self) -> Verdict:
        """Carry it out. What the platform, the model or the task fails to do is raised."""
        async with self._sandbox("agent", "create") as sandbox:
            self.stage, started = "policy", time.monotonic()
            answer = await self._policy.answer(self._job.task, self._job.sample_index)
            self._completion = answer.completion
            self._spent_s["policy"] = time.monotonic() - started
            self.stage, started = "exec", time.monotonic()
            data = await self._act(sandbox, answer.solution)
            self._spent_s["exec"] = time.monotonic() - started
        if len(data) > ARTIFACT_BYTES_MAX:
            fact = Evidence(source="artifact", fact="larger than bytes", value=ARTIFACT_BYTES_MAX)
            return scored(0.0, "output_limit", True, (fact,))
        self._artifact = data.decode("utf-8", "replace")
        self.stage, started, queued_s = "grade", time.monotonic(), self._queue_s
        try:
            grading = await self._grade_with_control(self._artifact)
        finally:
            self._spent_s["grade"] = time.monotonic() - started - (self._queue_s - queued_s)
        return judge(grading, cause=answer.cause, truncated=answer.truncated)

    async def _act(self, sandbox: Sandbox, solution: str) -> bytes:
        """Put the answer into the agent's sandbox, and take out the one file that may leave it.

        The reader takes regular files only, and one byte more than is allowed, to see whether there is more.
        """
        started = time.monotonic()
        result = await sandbox.exec(WRITE, stdin=solution.encode("utf-8", "replace"), timeout_s=60.0)
        spent_s = time.monotonic() - started
        self._spent_s["ttfi"] = self._spent_s["create"] + max(0.0, spent_s - result.usage.wall_s)
        if not result.ok:  # our own command in a fresh sandbox: no policy has run in it yet
            raise BackendError(f"writing {ARTIFACT} ended with {result.exit_code}: {result.error_text[-200:]}")
        return await sandbox.files.read(ARTIFACT, length=ARTIFACT_BYTES_MAX + 1)

    async def _grade_with_control(self, source: str) -> Grading:
        """Grade; where that leaves open whose doing it was, grade the known-good solution, and then the candidate
        once more.

        Each grading gets a sandbox of its own, so that a candidate can't spoil its control. The second look keeps a
        moment's stall of the host from becoming a zero.
        """
        grading = await self._grade(source)
        if not needs_control(grading):
            return grading
        control = judge(await self._grade(self._job.task.reference))
        if control.reward != 1.0:
            return with_control(grading, passed=False)
        return with_control(await self._grade(source), passed=True)

    async def _grade(self, source: str) -> Grading:
        async with self._sandbox("grader", "grader_create") as sandbox:
            return await grade(sandbox, self._job.task, source, self._settings.limits)

    @asynccontextmanager
    async def _sandbox(self, role: str, clock: str) -> AsyncIterator[Sandbox]:
        sandbox = await self._create(role, clock)
        ids = self._sandbox_ids[role]
        ids.append(sandbox.id)
        try:
            yield sandbox
        finally:
            await asyncio.shield(self._kill(sandbox, role))

    async def _kill(self, sandbox: Sandbox, role: str) -> None:
        """End a sandbox. A failure is noted, and changes no verdict: the lease and the ttl end what is left of it."""
        try:
            await sandbox.kill()
        except BarchanError as error:
            message = f"{type(error).__name__}: {error}"[:400]
            self._notes += (Evidence(source="cleanup", fact=f"kill of the {role}'s sandbox failed", value=message),)

    async def _create(self, role: str, clock: str) -> Sandbox:
        """A new sandbox; while the node has no room, ask again when it says, up to the bound."""
        settings = self._settings
        create_id = f"{self._job.rollout_id}-{role}-{len(self._sandbox_ids[role])}"
        while True:
            started = time.monotonic()
            try:
                sandbox = await self._client.create(
                    settings.template,
                    memory_mib=settings.memory_mib,
                    pids_max=settings.pids_max,
                    ttl_s=SANDBOX_TTL_S,
                    labels={"run": settings.run_id, "rollout": self._job.rollout_id, "role": role},
                    create_id=create_id,
                )
                self._spent_s[clock] = time.monotonic() - started
                return sandbox
            except CapacityError as refusal:
                retry_s = int(refusal.details.get("retry_after_ms", RETRY_MS_DEFAULT)) / 1e3
                pause_s = retry_s * random.uniform(1.0, 1.5)  # so that the refused do not all come back at once
                self._queue_s += time.monotonic() - started + pause_s
                if self._queue_s > settings.capacity_wait_s:
                    raise
                await asyncio.sleep(pause_s)

    def record(self, verdict: Verdict) -> RolloutRecord:
        spent_s = {**self._spent_s, "queue": self._queue_s, "total": time.monotonic() - self._started}
        spent_s.pop("grader_create", None)
        agent = self._sandbox_ids["agent"]
        return RolloutRecord(
            run_id=self._settings.run_id,
            rollout_id=self._job.rollout_id,
            task_id=self._job.task.task_id,
            sample_index=self._job.sample_index,
            policy=self._policy.name,
            verdict=replace(verdict, evidence=verdict.evidence + self._notes),
            timings=Timings(**{f"{stage}_ms": round(seconds * 1e3, 3) for stage, seconds in spent_s.items()}),
            started_unix_s=round(self._started_unix_s, 3),
            agent_sandbox_id=agent[0] if agent else None,
            grader_sandbox_ids=tuple(self._sandbox_ids["grader"]),
            artifact=self._artifact,
            completion=self._completion,
        )
