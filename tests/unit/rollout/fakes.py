"""An in-memory sandbox client and small tasks, for rollouts without a node. Nothing of a candidate is run here."""

import asyncio
import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from barchan.errors import InvalidSpec, NotFound, SandboxExpired
from barchan.model.denials import Denials
from barchan.model.sandbox import ExecResult, FileInfo, ProcessInfo, Usage
from barchan.rollout.calls import call_to
from barchan.rollout.graders.functions import CHECKER_USER
from barchan.rollout.graders.guest import codec
from barchan.rollout.limits import Limits
from barchan.rollout.policies import Step
from barchan.rollout.ports import RLimits
from barchan.rollout.task import FunctionGrader, Stub, Task
from barchan.sdk.aio.shell import ShellPoint, ShellResult, ShellRun

# From the candidate's source to what the checker says of it: outcome, checks that held, calls made, detail.
Checking = Callable[[str], tuple[str, int, int, str]]


def submit(solution: str, **step: Any) -> Step:
    """The one turn of a policy that hands a solution in."""
    return Step(tool_calls=(call_to("submit", solution=solution),), is_last=True, **step)


def task(number: int = 0, limits: Limits = Limits(), **fields: Any) -> Task:  # noqa: B008 (frozen)
    reference = f"def f():\n    return {number}\n"
    given = {
        "task_id": f"Fake/{number}",
        "instruction": "Write f.",
        "grader": FunctionGrader(
            entry_point="f",
            reference=reference,
            checks=f"def check(candidate):\n    assert candidate() == {number}\n    __passed__(0)\n",
            checks_total=1,
        ),
        "oracle": (call_to("submit", solution=reference),),
        "nop": (call_to("submit", solution="def f():\n    pass\n"),),
        "stub": Stub(prompt="def f():\n", entry_point="f"),
    }
    return Task(limits=limits, **{**given, **fields})


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
    """Files by path; a directory is a prefix that other paths have."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.modes: dict[str, int] = {}
        self.links: dict[str, str] = {}
        self.error: Exception | None = None
        self.epoch = 0  # of whoever asked for them last

    def as_user(self, user: str | None) -> Self:
        return self

    def fenced(self, epoch: int, /) -> Self:
        self.epoch = epoch
        return self

    def _check(self, path: str) -> None:
        if self.error is not None:
            raise self.error
        if any(name.startswith(f"{path}/") for name in self.content):
            raise InvalidSpec(f"{path} is not a regular file", errno=errno.EISDIR)
        if path not in self.content:
            raise NotFound(f"no {path}", errno=errno.ENOENT)

    async def read(self, path: str, /, *, length: int | None = None) -> bytes:
        self._check(path)
        return self.content[path][:length]

    async def write(self, path: str, data: bytes, /, *, mode: int = 0o644) -> None:
        self.content[path], self.modes[path] = data, mode

    async def stat(self, path: str, /) -> FileInfo:
        target = self.links.get(path)
        if target is None:
            self._check(path)
        return FileInfo(
            path=path,
            kind="file" if target is None else "symlink",
            size=len(self.content.get(path, b"")),
            mode=self.modes.get(path, 0o644),
            uid=0,
            gid=0,
            mtime_unix_s=0.0,
            target=target or "",
        )

    async def list(self, path: str = ".", /) -> list[FileInfo]:
        return [await self.stat(name) for name in self.content if name.startswith(f"{path}/")]


class FakeShell:
    """Says what the client's `shell_result` is."""

    def __init__(self, client: "FakeClient") -> None:
        self._client = client
        self.commands: list[str] = []
        self.point: ShellPoint | None = None
        self.closed = False

    async def begin(self) -> ShellRun:
        return ShellRun(process_id="shell", mark="m", stdin=0, stdout=0, stderr=0)

    async def run(self, command: str, /, *, timeout_s: float = 0, begun: ShellRun | None = None) -> ShellResult:
        self.commands.append(command)
        await asyncio.sleep(self._client.exec_s)
        return self._client.shell_result

    async def close(self) -> None:
        self.closed = True


class FakeProcess:
    """Runs until it is killed."""

    def __init__(self, sandbox: "FakeSandbox", process_id: str) -> None:
        self._sandbox = sandbox
        self._id = process_id

    async def kill(self) -> int:
        if self._id not in self._sandbox.running:
            raise NotFound(f"no process {self._id}", process_id=self._id)
        self._sandbox.running.remove(self._id)
        return 1


class FakeClock:
    """Goes on all the time but for what it is told to have slept."""

    def __init__(self, client: "FakeClient") -> None:
        self._client = client

    async def __aenter__(self) -> Self:
        await asyncio.sleep(self._client.wake_s)
        return self

    async def __aexit__(self, *why: object) -> None:
        pass

    def time(self) -> float:
        return asyncio.get_running_loop().time() - self._client.slept_s - self._client.stalled_s

    @property
    def stalled_s(self) -> float:
        return self._client.stalled_s

    def timeout(self, delay_s: float | None, /) -> asyncio.Timeout:
        return asyncio.timeout(delay_s)


class FakeSandbox:
    """Keeps what a shell's `cat` is given; answers as the checker and the candidate's process would."""

    def __init__(self, client: "FakeClient", number: int) -> None:
        self.id = f"sb_{number}"
        self.files = FakeFiles()
        self.shells: list[FakeShell] = []
        self.running: list[str] = []
        self._client = client

    async def exec(
        self,
        command: str | Sequence[str],
        /,
        *,
        process_id: str | None = None,
        stdin: bytes = b"",
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] = {},
        rlimits: RLimits = {},  # noqa: B006 (never changed)
        restrained: bool = False,
        merge_stderr: bool = False,
        timeout_s: float = 0,
        max_output_bytes: int = 0,
    ) -> ExecResult:
        await asyncio.sleep(self._client.exec_s)
        if self._client.exec_error is not None:
            raise self._client.exec_error
        if command[0] == "python3" and user is None:
            return self._client.python_result
        if user is None:
            self.files.content["solution.py"] = stdin
            return self._client.write_result
        if user == CHECKER_USER:
            return self._client.checked(codec.decode(stdin))
        return self._client.candidate_end

    async def shell(self, *, max_output_bytes: int = 0, point: ShellPoint | None = None) -> FakeShell:
        self.shells.append(FakeShell(self._client))
        return self.shells[-1]

    def clock(self) -> FakeClock:
        return FakeClock(self._client)

    def process(self, process_id: str, /) -> "FakeProcess":
        return FakeProcess(self, process_id)

    async def processes(self) -> list[ProcessInfo]:
        return [ProcessInfo(process_id=process_id, pid=1, running=True) for process_id in self.running]

    def found(self) -> Self:
        """As a repeated create finds it."""
        if self.id not in self._client.live:
            raise SandboxExpired(f"sandbox {self.id} has ended", sandbox_id=self.id)
        return self

    async def denials(self) -> Denials:
        return self._client.denials

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
        self.tokens = 0
        self.denials = Denials()
        self.exec_error: Exception | None = None
        self.kill_error: Exception | None = None
        self.exec_s = 0.0
        self.wake_s = 0.0  # that its sandboxes take to wake
        self.slept_s = 0.0  # so far
        self.stalled_s = 0.0  # that its node has stood still
        self.candidate_end = result()
        self.checker_end = result()
        self.write_result = self.python_result = result()
        self.shell_result = ShellResult(exit_code=0, stdout=b"", stderr=b"")
        self.sandboxes: list[FakeSandbox] = []
        self.templates: list[str] = []
        self.options: list[dict[str, Any]] = []
        self.labels: list[dict[str, str]] = []
        self.removed_images: list[str] = []
        self.create_ids: list[str] = []
        self.live: set[str] = set()
        self.live_max = 0

    def checked(self, job: dict[str, str]) -> ExecResult:
        outcome, passed, calls, detail = self.check(job["source"])
        if not outcome:
            return self.checker_end
        return result(stdout=f"{job['nonce']} {outcome} {passed} {calls} {detail!a}\n".encode())

    async def create(self, template: str, /, **options: Any) -> FakeSandbox:
        await asyncio.sleep(0)
        if self.create_errors:
            raise self.create_errors.pop(0)
        if options["create_id"] in self.create_ids:
            return self.sandboxes[self.create_ids.index(options["create_id"])].found()
        self.templates.append(template)
        self.options.append(options)
        self.labels.append(options["labels"])
        self.create_ids.append(options["create_id"])
        sandbox = self.made(len(self.create_ids))
        self.sandboxes.append(sandbox)
        self.live.add(sandbox.id)
        self.live_max = max(self.live_max, len(self.live))
        return sandbox

    def made(self, number: int) -> FakeSandbox:
        return FakeSandbox(self, number)

    async def attach(self, sandbox_id: str, /) -> FakeSandbox:
        if sandbox_id not in self.live:
            raise NotFound(f"no sandbox {sandbox_id}", sandbox_id=sandbox_id)
        return next(sandbox for sandbox in self.sandboxes if sandbox.id == sandbox_id)

    def use_tokens(self, count: int, /) -> None:
        self.tokens += count

    async def kill(self, *, labels: Mapping[str, str]) -> int:
        found = {
            sandbox.id
            for sandbox, of in zip(self.sandboxes, self.labels, strict=True)
            if sandbox.id in self.live and labels.items() <= of.items()
        }
        self.live -= found
        return len(found)

    async def remove_image(self, name: str, /) -> None:
        self.removed_images.append(name)
