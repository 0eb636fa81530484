"""A sandbox whose every program and file operation is in the rollout's trajectory log: intended before, told after.

A tool that is run again, since whoever drove it was killed, finds here what it had done already: see
`resuming.operations`.
"""

import errno
import signal
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from barchan.errors import BarchanError, Conflict, LocalProtocolError, NotFound, TrajectoryDiverged
from barchan.model.denials import Denials
from barchan.model.sandbox import DEFAULT_EXEC_TIMEOUT_S, DEFAULT_OUTPUT_BYTES, ExecResult, FileInfo, ProcessInfo
from barchan.rollout.doing import UNKNOWN, Doing, given
from barchan.rollout.ports import Clock, Files, Log, Named, Process, RLimits, Sandbox, Shell
from barchan.rollout.resuming.operations import (
    Recorded,
    error_body,
    exec_result,
    not_begun,
    point_of,
    raise_logged,
    shell_result,
)
from barchan.sdk.aio.shell import NotBegun, ShellPoint, ShellResult, ShellRun
from barchan.trajectory.format import Entry, Kind


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

    @property
    def is_begun(self) -> bool:
        return self._log.is_begun

    @property
    def epoch(self) -> int:
        return self._log.epoch

    def intent(self, kind: Kind, args: Mapping[str, Any], /, *, op_id: str | None = None) -> int:
        with self._fence():
            return self._log.intent(kind, args, op_id=op_id)

    def result(self, seq: int, outcome: Mapping[str, Any], /) -> int:
        with self._fence():
            return self._log.result(seq, outcome)

    def entry(self, kind: Kind, body: Mapping[str, Any], /) -> int:
        with self._fence():
            return self._log.entry(kind, body)

    def check(self) -> None:
        with self._fence():
            self._log.check()

    def was_taken_over(self) -> bool:
        """Ask the log itself: whose sandbox it is by now is not this process's to end."""
        with suppress(BarchanError):  # other trouble with it is told by whatever is written next
            self.check()
        return self.is_relieved

    async def committed(self, seq: int | None = None, /) -> None:
        await self._log.committed(seq)

    def entries(self) -> list[Entry]:
        return self._log.entries()

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
        self.doing = Doing(sandbox.id, log)
        self.files: Files = LoggedFiles(sandbox.files.fenced(log.epoch), self.doing)
        self._sandbox = sandbox

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
        merge_stderr: bool = False,
        restrained: bool = False,
        timeout_s: float = DEFAULT_EXEC_TIMEOUT_S,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
    ) -> ExecResult:
        op_id = process_id or uuid.uuid4().hex
        asked = {
            "stdin": stdin, "user": user, "cwd": cwd, "env": env, "rlimits": rlimits, "merge_stderr": merge_stderr,
            "restrained": restrained,
        }  # fmt: skip
        args = {"command": command, "timeout_s": timeout_s, **given(asked)}
        if max_output_bytes != DEFAULT_OUTPUT_BYTES:
            args["max_output_bytes"] = max_output_bytes

        since = self.doing.time()

        async def work(earlier: Recorded | None) -> ExecResult:
            # The node knows its programs by their ids: asked again, it gives the result of the one that there was.
            limit_s = timeout_s if earlier is None else float(earlier.args["timeout_s"])
            result = await self._sandbox.exec(
                command,
                process_id=op_id if earlier is None else earlier.op_id,
                stdin=stdin,
                user=user,
                cwd=cwd,
                env=env,
                rlimits=rlimits,
                merge_stderr=merge_stderr,
                restrained=restrained,
                timeout_s=limit_s,
                max_output_bytes=max_output_bytes,
            )
            return result if earlier is None else _ended_late(result, limit_s)

        return await self.doing.once(
            "exec",
            args,
            work,
            lambda result: self.doing.ended(result, since, timeout_s),
            lambda earlier, result: exec_result(result, earlier.op_id),
            op_id=op_id,
        )

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
        asked = {"user": user, "cwd": cwd, "env": env, "background": True, "merge_stderr": merge_stderr}
        args = {"command": command, "process_id": process_id, **given(asked)}

        async def work(earlier: Recorded | None) -> Process:
            return await self._sandbox.start(
                command,
                process_id=process_id if earlier is None else earlier.op_id,
                user=user,
                cwd=cwd,
                env=env,
                stdin_open=stdin_open,
                merge_stderr=merge_stderr,
            )

        return await self.doing.once(
            "exec",
            args,
            work,
            lambda process: {},
            lambda earlier, result: self._sandbox.process(earlier.op_id),
            op_id=process_id,
        )

    async def shell(self, *, max_output_bytes: int = DEFAULT_OUTPUT_BYTES, point: ShellPoint | None = None) -> Shell:
        async def opened(at: ShellPoint | None) -> Shell:
            with self.doing.watched():
                return await self._sandbox.shell(max_output_bytes=max_output_bytes, point=at)

        shell = None if self.doing.earlier.is_left else await opened(point)
        return LoggedShell(shell, opened, point, self.doing)

    def process(self, process_id: str, /) -> Process:
        return self._sandbox.process(process_id)

    def clock(self) -> Clock:
        self.doing.clock = self._sandbox.clock()
        return self.doing.clock

    async def processes(self) -> list[ProcessInfo]:
        with self.doing.watched():
            return await self._sandbox.processes()

    async def snapshot(self, name: str, /, **options: Any) -> Named:
        return await self._sandbox.snapshot(name, **options)

    async def denials(self) -> Denials:
        return await self._sandbox.denials()

    async def kill(self) -> object:
        return await self._sandbox.kill()


class LoggedFiles:
    """What changes files is logged, and what is read of them. Looks at directories are not: they change nothing and
    are no input of a verdict.
    """

    def __init__(self, files: Files, doing: Doing, user: str | None = None) -> None:
        self._files = files
        self._doing = doing
        self._user = user

    def as_user(self, user: str | None) -> "LoggedFiles":
        return LoggedFiles(self._files.as_user(user), self._doing, user)

    def fenced(self, epoch: int, /) -> "LoggedFiles":
        return LoggedFiles(self._files.fenced(epoch), self._doing, self._user)

    async def read(self, path: str, /, *, length: int | None = None) -> bytes:
        return await self._read({"path": path, "length": length}, lambda: self._files.read(path, length=length))

    async def write(self, path: str, data: bytes, /, *, mode: int = 0o644) -> None:
        args = {"path": path, "data": data, "mode": mode}
        await self._change(args, lambda: self._files.write(path, data, mode=mode))

    async def stat(self, path: str, /) -> FileInfo:
        with self._doing.watched():
            return await self._files.stat(path)

    async def list(self, path: str = ".", /) -> list[FileInfo]:
        with self._doing.watched():
            return await self._files.list(path)

    async def mkdir(self, path: str, /, *, mode: int = 0o755) -> None:
        args = {"action": "mkdir", "path": path, "mode": mode}
        await self._change(args, lambda: self._files.mkdir(path, mode=mode))

    async def remove(self, path: str, /, *, recursive: bool = False) -> None:
        args = {"action": "remove", "path": path, "recursive": recursive}
        await self._change(args, lambda: self._files.remove(path, recursive=recursive), may_be_gone=True)

    async def upload(self, local: Path, remote: str, /) -> None:
        args = {"action": "upload", "path": remote, "local": str(local)}
        await self._change(args, lambda: self._files.upload(local, remote))

    async def read_tar(self, path: str, /, *, max_bytes: int) -> bytes:
        args = {"path": path, "tar": True, "max_bytes": max_bytes}
        return await self._read(args, lambda: self._files.read_tar(path, max_bytes=max_bytes))

    async def write_tar(self, path: str, data: bytes, /) -> None:
        await self._change({"path": path, "data": data, "tar": True}, lambda: self._files.write_tar(path, data))

    async def _read(self, args: Mapping[str, Any], work: Callable[[], Awaitable[bytes]]) -> bytes:
        return await self._doing.once(
            "file_read",
            self._asked(args),
            lambda earlier: work(),
            lambda data: {"data": data},
            lambda earlier, result: bytes(result["data"]),
        )

    async def _change(
        self, args: Mapping[str, Any], work: Callable[[], Awaitable[None]], *, may_be_gone: bool = False
    ) -> None:
        """Whatever of it was done before, doing it again leaves the same."""

        async def once_more(earlier: Recorded | None) -> None:
            try:
                await work()
            except NotFound as error:
                if earlier is None or not may_be_gone or error.details.get("errno") != errno.ENOENT:
                    raise

        await self._doing.once(
            "file_write", self._asked(args), once_more, lambda done: {}, lambda earlier, result: None
        )

    def _asked(self, args: Mapping[str, Any]) -> dict[str, Any]:
        return {**args, **given({"user": self._user})}


class LoggedShell:
    """One shell; each command is an exec of the log, with where it stands in the shell.

    Args:
        shell: None: it is not needed before a command that the log has no result of.
        opened: Gives the shell as it stood somewhere.
        point: Where that is.
    """

    def __init__(
        self,
        shell: Shell | None,
        opened: Callable[[ShellPoint | None], Awaitable[Shell]],
        point: ShellPoint | None,
        doing: Doing,
    ) -> None:
        self._shell = shell
        self._opened = opened
        self._point = point
        self._doing = doing

    @property
    def point(self) -> ShellPoint | None:
        return self._shell.point if self._shell is not None else self._point

    async def begin(self) -> ShellRun:
        return await (await self._there(self._point)).begin()

    async def _there(self, point: ShellPoint | None) -> Shell:
        if self._shell is None:
            self._shell = await self._opened(point)
        return self._shell

    async def run(
        self, command: str, /, *, timeout_s: float = DEFAULT_EXEC_TIMEOUT_S, begun: ShellRun | None = None
    ) -> ShellResult:
        with self._doing.watched():
            return await self._once(command, timeout_s)

    async def _once(self, command: str, timeout_s: float) -> ShellResult:
        args = {"command": command, "shell": "persistent", "timeout_s": timeout_s}
        found = self._doing.earlier.take("exec", {"sandbox_id": self._doing.sandbox_id, **args})
        if found is None:
            return await self._run_new(command, args, timeout_s)
        if found.result is None:
            try:
                return await self._told(found.seq, command, timeout_s, ShellRun(**found.args["at"]))
            except NotBegun as error:
                self._doing.log.result(found.seq, not_begun(error))
                return await self._run_new(command, args, timeout_s)
        raise_logged(found.result)
        if not found.is_whole:
            raise TrajectoryDiverged(f"entry {found.seq} of the log is a command whose long output it has not whole")
        self._shell, self._point = None, point_of(found.result)
        return shell_result(found.result)

    async def _run_new(self, command: str, args: Mapping[str, Any], timeout_s: float) -> ShellResult:
        log = self._doing.log
        while True:
            begun = await self.begin()
            asked = {"sandbox_id": self._doing.sandbox_id, **args, "at": asdict(begun)}
            seq = log.intent("exec", asked, op_id=begun.mark)
            await log.committed(seq)
            try:
                return await self._told(seq, command, timeout_s, begun)
            except NotBegun as error:  # it ended meanwhile: the next one is another
                log.result(seq, not_begun(error))

    async def _told(self, seq: int, command: str, timeout_s: float, begun: ShellRun) -> ShellResult:
        """What `told` does, and nothing where the shell has not taken the command."""
        shell, since = await self._there(_point_of(begun)), self._doing.time()
        try:
            result = await shell.run(command, timeout_s=timeout_s, begun=begun)
        except (*UNKNOWN, NotBegun):
            raise
        except Exception as error:
            self._doing.log.result(seq, error_body(error))
            raise
        point = shell.point
        told = self._doing.ended(result, since, timeout_s)
        self._doing.log.result(seq, {**told, "point": asdict(point) if point is not None else None})
        return result

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.close()


def _point_of(begun: ShellRun) -> ShellPoint:
    """Where the shell stood before a command."""
    return ShellPoint(process_id=begun.process_id, stdout=begun.stdout, stderr=begun.stderr, last_code=begun.last_code)


def _ended_late(result: ExecResult, timeout_s: float) -> ExecResult:
    """A program that was killed when nobody was there to say why: beyond its time it is the time-out."""
    if result.signal == signal.SIGKILL and not result.oom_killed and result.usage.wall_s >= timeout_s:
        return replace(result, timed_out=True)
    return result
