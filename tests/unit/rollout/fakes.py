"""An in-memory sandbox client and small tasks, for rollouts without a node. Nothing of a candidate is run here."""

import asyncio
from collections.abc import Callable, Sequence

from barchan.model.sandbox import ExecResult, Usage
from barchan.rollout.graders.functions import CHECKER_USER
from barchan.rollout.graders.guest import codec
from barchan.rollout.ports import RLimits
from barchan.rollout.task import Task

# From the candidate's source to what the checker says of it: outcome, checks that held, calls made, detail.
Checking = Callable[[str], tuple[str, int, int, str]]


def task(number: int = 0) -> Task:
    return Task(
        task_id=f"Fake/{number}",
        prompt="def f():\n",
        entry_point="f",
        reference=f"def f():\n    return {number}\n",
        checks=f"def check(candidate):\n    assert candidate() == {number}\n    __passed__(0)\n",
        checks_total=1,
    )


def result(
    exit_code: int = 0,
    stdout: bytes = b"",
    signal: int | None = None,
    cpu_s: float = 0.01,
    timed_out: bool = False,
    oom_killed: bool = False,
) -> ExecResult:
    return ExecResult(
        process_id="p",
        exit_code=exit_code,
        signal=signal,
        timed_out=timed_out,
        oom_killed=oom_killed,
        stdout=stdout,
        usage=Usage(user_s=cpu_s, wall_s=0.001),
    )


def right_or_wrong(source: str) -> tuple[str, int, int, str]:
    """What an honest checker says: passes solutions that return a number."""
    return ("passed", 1, 1, "") if "return" in source else ("failed", 0, 1, "an assertion did not hold")


class FakeFiles:
    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    async def read(self, path: str, /, *, length: int | None = None) -> bytes:
        return self.content[path][:length]


class FakeSandbox:
    """Keeps what a shell's `cat` is given; answers as the checker and the candidate's process would."""

    def __init__(self, client: "FakeClient", number: int) -> None:
        self.id = f"sb_{number}"
        self.files = FakeFiles()
        self._client = client

    async def exec(
        self,
        command: str | Sequence[str],
        /,
        *,
        stdin: bytes = b"",
        user: str | None = None,
        cwd: str | None = None,
        rlimits: RLimits = {},  # noqa: B006 (never changed)
        timeout_s: float = 0,
        max_output_bytes: int = 0,
    ) -> ExecResult:
        await asyncio.sleep(self._client.exec_s)
        if self._client.exec_error is not None:
            raise self._client.exec_error
        if user is None:
            self.files.content["solution.py"] = stdin
            return result()
        if user == CHECKER_USER:
            return self._client.checked(codec.decode(stdin))
        return self._client.candidate_end

    async def kill(self) -> bool:
        self._client.live.discard(self.id)
        if self._client.kill_error is not None:
            raise self._client.kill_error
        return True


class FakeClient:
    """Creates sandboxes, or raises what `create_errors` holds first."""

    def __init__(self, check: Checking = right_or_wrong) -> None:
        self.check = check
        self.create_errors: list[Exception] = []
        self.exec_error: Exception | None = None
        self.kill_error: Exception | None = None
        self.exec_s = 0.0
        self.candidate_end = result()
        self.checker_end = result()
        self.labels: list[dict[str, str]] = []
        self.create_ids: list[str] = []
        self.live: set[str] = set()
        self.live_max = 0

    def checked(self, job: dict[str, str]) -> ExecResult:
        outcome, passed, calls, detail = self.check(job["source"])
        if not outcome:
            return self.checker_end
        return result(stdout=f"{job['nonce']} {outcome} {passed} {calls} {detail!a}\n".encode())

    async def create(
        self,
        template: str,
        /,
        *,
        memory_mib: int,
        pids_max: int,
        ttl_s: float,
        labels: dict[str, str],
        create_id: str,
    ) -> FakeSandbox:
        await asyncio.sleep(0)
        if self.create_errors:
            raise self.create_errors.pop(0)
        self.labels.append(labels)
        self.create_ids.append(create_id)
        sandbox = FakeSandbox(self, len(self.create_ids))
        self.live.add(sandbox.id)
        self.live_max = max(self.live_max, len(self.live))
        return sandbox
