"""A sandbox whose every program and file operation is in the rollout's trajectory log: intended before, told after."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from barchan.errors import Conflict, LocalProtocolError
from barchan.model.sandbox import DEFAULT_EXEC_TIMEOUT_S, DEFAULT_OUTPUT_BYTES, ExecResult, FileInfo, ProcessInfo
from barchan.rollout.ports import Clock, Files, Log, Named, Process, RLimits, Sandbox, Shell
from barchan.sdk.aio.shell import ShellPoint, ShellResult
from barchan.trajectory.format import Kind

T = TypeVar("T")


async def logged(
    log: Log,
    kind: Kind,
    args: Mapping[str, Any],
    work: Callable[[], Awaitable[T]],
    outcome: Callable[[T], Mapping[str, Any]],
) -> T:
    """Do the work between an INTENT and its RESULT. What it raises is a result, too; a cancelled one has none, for
    nobody knows how far it came.
    """
    seq = log.intent(kind, args)
    try:
        value = await work()
    except Exception as error:
        log.result(seq, {"error": {"type": type(error).__name__, "message": str(error)[:1000]}})
        raise
    log.result(seq, outcome(value))
    return value


class FencedLog:
    """A log that another process may take over.

    Attributes:
        is_relieved: It has been: what this process was doing is that one's now, and nothing more may be done here.
    """

    def __init__(self, log: Log) -> None:
        self.is_relieved = False
        self._log = log

    @property
    def head_hash(self) -> str:
        return self._log.head_hash

    def intent(self, kind: Kind, args: Mapping[str, Any], /) -> int:
        with self._fence():
            return self._log.intent(kind, args)

    def result(self, seq: int, outcome: Mapping[str, Any], /) -> int:
        with self._fence():
            return self._log.result(seq, outcome)

    def entry(self, kind: Kind, body: Mapping[str, Any], /) -> int:
        with self._fence():
            return self._log.entry(kind, body)

    def close(self) -> None:
        self._log.close()

    @contextmanager
    def _fence(self) -> Iterator[None]:
        try:
            yield
        except Conflict as error:
            self.is_relieved = True
            raise LocalProtocolError(str(error)) from error  # no tool takes it for a conflict in its sandbox


class LoggedSandbox:
    """The same sandbox, seen through a log."""

    def __init__(self, sandbox: Sandbox, log: Log) -> None:
        self.id = sandbox.id
        self.files: Files = LoggedFiles(sandbox.files, sandbox.id, log)
        self._sandbox = sandbox
        self._log = log

    async def exec(
        self,
        command: str | Sequence[str],
        /,
        *,
        stdin: bytes = b"",
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] = {},
        rlimits: RLimits = {},  # noqa: B006 (never changed)
        merge_stderr: bool = False,
        timeout_s: float = DEFAULT_EXEC_TIMEOUT_S,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> ExecResult:
        asked = {"stdin": stdin, "user": user, "cwd": cwd, "env": env}
        args = {"sandbox_id": self.id, "command": command, "timeout_s": timeout_s, **_given(asked)}

        async def work() -> ExecResult:
            return await self._sandbox.exec(
                command,
                stdin=stdin,
                user=user,
                cwd=cwd,
                env=env,
                rlimits=rlimits,
                merge_stderr=merge_stderr,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
            )

        return await logged(self._log, "exec", args, work, _whole)

    async def start(
        self,
        command: str,
        /,
        *,
        process_id: str,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] = {},
        stdin_open: bool = True,
        merge_stderr: bool = False,
    ) -> Process:
        asked = {"user": user, "cwd": cwd, "env": env, "background": True}
        args = {"sandbox_id": self.id, "command": command, "process_id": process_id, **_given(asked)}

        async def work() -> Process:
            return await self._sandbox.start(
                command,
                process_id=process_id,
                user=user,
                cwd=cwd,
                env=env,
                stdin_open=stdin_open,
                merge_stderr=merge_stderr,
            )

        return await logged(self._log, "exec", args, work, lambda process: {})

    async def shell(self, *, max_output_bytes: int = DEFAULT_OUTPUT_BYTES, point: ShellPoint | None = None) -> Shell:
        shell = await self._sandbox.shell(max_output_bytes=max_output_bytes, point=point)
        return LoggedShell(shell, self.id, self._log)

    def process(self, process_id: str, /) -> Process:
        return self._sandbox.process(process_id)

    def clock(self) -> Clock:
        return self._sandbox.clock()

    async def processes(self) -> list[ProcessInfo]:
        return await self._sandbox.processes()

    async def snapshot(self, name: str, /) -> Named:
        return await self._sandbox.snapshot(name)

    async def kill(self) -> object:
        return await self._sandbox.kill()


class LoggedFiles:
    """Reads and writes are logged, looks at directories are not: they change nothing and are no input of a verdict.
    Neither is what a grader clears and makes in a `shared` sandbox before it runs.
    """

    def __init__(self, files: Files, sandbox_id: str, log: Log) -> None:
        self._files = files
        self._sandbox_id = sandbox_id
        self._log = log

    def as_user(self, user: str | None) -> "LoggedFiles":
        return LoggedFiles(self._files.as_user(user), self._sandbox_id, self._log)

    async def read(self, path: str, /, *, length: int | None = None) -> bytes:
        args = {"sandbox_id": self._sandbox_id, "path": path, "length": length}
        return await logged(
            self._log, "file_read", args, lambda: self._files.read(path, length=length), lambda data: {"data": data}
        )

    async def write(self, path: str, data: bytes, /, *, mode: int = 0o644) -> None:
        args = {"sandbox_id": self._sandbox_id, "path": path, "data": data, "mode": mode}
        await logged(self._log, "file_write", args, lambda: self._files.write(path, data, mode=mode), lambda done: {})

    async def stat(self, path: str, /) -> FileInfo:
        return await self._files.stat(path)

    async def list(self, path: str = ".", /) -> list[FileInfo]:
        return await self._files.list(path)

    async def mkdir(self, path: str, /, *, mode: int = 0o755) -> None:
        await self._files.mkdir(path, mode=mode)

    async def remove(self, path: str, /, *, recursive: bool = False) -> None:
        await self._files.remove(path, recursive=recursive)

    async def upload(self, local: Path, remote: str, /) -> None:
        await self._files.upload(local, remote)

    async def read_tar(self, path: str, /, *, max_bytes: int) -> bytes:
        args = {"sandbox_id": self._sandbox_id, "path": path, "tar": True}
        return await logged(
            self._log,
            "file_read",
            args,
            lambda: self._files.read_tar(path, max_bytes=max_bytes),
            lambda data: {"data": data},
        )

    async def write_tar(self, path: str, data: bytes, /) -> None:
        args = {"sandbox_id": self._sandbox_id, "path": path, "data": data, "tar": True}
        await logged(self._log, "file_write", args, lambda: self._files.write_tar(path, data), lambda done: {})


class LoggedShell:
    """One shell; each command is an exec of the log."""

    def __init__(self, shell: Shell, sandbox_id: str, log: Log) -> None:
        self._shell = shell
        self._sandbox_id = sandbox_id
        self._log = log

    @property
    def point(self) -> ShellPoint | None:
        return self._shell.point

    async def run(self, command: str, /, *, timeout_s: float = DEFAULT_EXEC_TIMEOUT_S) -> ShellResult:
        args = {"sandbox_id": self._sandbox_id, "command": command, "shell": "persistent", "timeout_s": timeout_s}
        return await logged(self._log, "exec", args, lambda: self._shell.run(command, timeout_s=timeout_s), _whole)

    async def close(self) -> None:
        await self._shell.close()


def _given(members: Mapping[str, Any]) -> dict[str, Any]:
    """Those that say something: readers take a missing one for its default."""
    return {name: value for name, value in members.items() if value}


def _whole(result: ExecResult | ShellResult) -> Mapping[str, Any]:
    members = {name: getattr(result, name) for name in result.__struct_fields__}
    return {"exit_code": members.pop("exit_code"), **_given(members)}
