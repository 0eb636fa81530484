"""What rollouts need of a sandbox client: the part of `barchan.sdk`'s async client that they use, and nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from barchan.model.sandbox import ExecResult, FileInfo, SandboxStats
from barchan.sdk.aio.shell import ShellResult
from barchan.trajectory.format import Kind

RLimits = dict[str, tuple[int, int]]


class Files(Protocol):
    async def read(self, path: str, /, *, length: int | None = None) -> bytes: ...

    async def write(self, path: str, data: bytes, /, *, mode: int = ...) -> None: ...

    async def stat(self, path: str, /) -> FileInfo: ...

    async def list(self, path: str = ..., /) -> list[FileInfo]: ...


class Shell(Protocol):
    async def run(self, command: str, /, *, timeout_s: float = ...) -> ShellResult: ...

    async def close(self) -> None: ...


class Sandbox(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def files(self) -> Files: ...

    async def exec(
        self,
        command: str | Sequence[str],
        /,
        *,
        stdin: bytes = ...,
        user: str | None = ...,
        cwd: str | None = ...,
        rlimits: RLimits = ...,
        merge_stderr: bool = ...,
        timeout_s: float = ...,
        max_output_bytes: int = ...,
    ) -> ExecResult: ...

    async def shell(self, *, max_output_bytes: int = ...) -> Shell: ...

    async def stats(self) -> SandboxStats: ...

    async def kill(self) -> object: ...


class Client(Protocol):
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
    ) -> Sandbox: ...


class Log(Protocol):
    """A rollout's trajectory log; `barchan.trajectory.writer.TrajectoryWriter` is one."""

    def intent(self, kind: Kind, args: Mapping[str, Any], /) -> int: ...

    def result(self, seq: int, outcome: Mapping[str, Any], /) -> int: ...

    def entry(self, kind: Kind, body: Mapping[str, Any], /) -> int: ...

    def close(self) -> None: ...


class NoLog:
    """For a rollout that keeps no trajectory."""

    def intent(self, kind: Kind, args: Mapping[str, Any], /) -> int:
        return 0

    def result(self, seq: int, outcome: Mapping[str, Any], /) -> int:
        return 0

    def entry(self, kind: Kind, body: Mapping[str, Any], /) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""
