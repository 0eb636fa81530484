"""What rollouts need of a sandbox client: the part of `barchan.sdk`'s async client that they use, and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

from barchan.model.denials import Denials
from barchan.model.node import ImageInfo
from barchan.model.sandbox import ExecResult, FileInfo, ProcessInfo
from barchan.model.snapshot_info import SnapshotKind
from barchan.sdk.aio.shell import ShellPoint, ShellResult, ShellRun
from barchan.sdk.options import CreateOptions
from barchan.trajectory.format import Entry, Kind

RLimits = dict[str, tuple[int, int]]


class Files(Protocol):
    def as_user(self, user: str | None) -> Self: ...

    def fenced(self, epoch: int, /) -> Self: ...

    async def read(self, path: str, /, *, length: int | None = None) -> bytes: ...

    async def write(self, path: str, data: bytes, /, *, mode: int = ...) -> None: ...

    async def stat(self, path: str, /) -> FileInfo: ...

    async def list(self, path: str = ..., /) -> list[FileInfo]: ...

    async def mkdir(self, path: str, /, *, mode: int = ...) -> None: ...

    async def remove(self, path: str, /, *, recursive: bool = ...) -> None: ...

    async def upload(self, local: Path, remote: str, /) -> None: ...

    async def read_tar(self, path: str, /, *, max_bytes: int) -> bytes: ...

    async def write_tar(self, path: str, data: bytes, /) -> None: ...


class Shell(Protocol):
    @property
    def point(self) -> ShellPoint | None: ...

    async def begin(self) -> ShellRun: ...

    async def run(self, command: str, /, *, timeout_s: float = ..., begun: ShellRun | None = ...) -> ShellResult: ...

    async def close(self) -> None: ...


class Process(Protocol):
    async def info(self) -> ProcessInfo: ...

    async def kill(self) -> object: ...

    def output(self, offset: int = ..., *, follow: bool = ...) -> AsyncIterator[tuple[Any, int, bytes]]: ...


class Clock(Protocol):
    """A sandbox's own time; the sandbox is awake while it is entered."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def time(self) -> float: ...

    @property
    def stalled_s(self) -> float: ...

    def timeout(self, delay_s: float | None, /) -> AbstractAsyncContextManager[asyncio.Timeout]: ...


class Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def id(self) -> str: ...

    @property
    def kind(self) -> SnapshotKind: ...


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
        process_id: str | None = ...,
        stdin: bytes = ...,
        user: str | None = ...,
        cwd: str | None = ...,
        env: Mapping[str, str] = ...,
        rlimits: RLimits = ...,
        merge_stderr: bool = ...,
        restrained: bool = ...,
        timeout_s: float = ...,
        max_output_bytes: int = ...,
    ) -> ExecResult: ...

    async def start(
        self,
        command: str,
        /,
        *,
        process_id: str,
        user: str | None = ...,
        cwd: str | None = ...,
        env: Mapping[str, str] = ...,
        stdin_open: bool = ...,
        merge_stderr: bool = ...,
    ) -> Process: ...

    def process(self, process_id: str, /) -> Process: ...

    def clock(self) -> Clock: ...

    async def processes(self) -> list[ProcessInfo]: ...

    async def shell(self, *, max_output_bytes: int = ..., point: ShellPoint | None = ...) -> Shell: ...

    async def snapshot(
        self, name: str, /, *, kind: SnapshotKind = ..., metadata: Mapping[str, str] | None = ...
    ) -> Named: ...

    async def denials(self) -> Denials: ...

    async def kill(self) -> object: ...


class Client(Protocol):
    async def create(self, template: str, /, **options: Unpack[CreateOptions]) -> Sandbox: ...

    async def attach(self, sandbox_id: str, /) -> Sandbox: ...

    async def kill(self, *, labels: Mapping[str, str]) -> int: ...

    async def image(self, name: str, /) -> ImageInfo: ...

    async def remove_image(self, name: str, /) -> object: ...

    def use_tokens(self, count: int, /) -> None: ...


class Log(Protocol):
    """A rollout's trajectory log; `barchan.trajectory.writer.TrajectoryWriter` is one. `is_begun`: by another."""

    @property
    def is_begun(self) -> bool: ...

    @property
    def head_hash(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    def intent(self, kind: Kind, args: Mapping[str, Any], /, *, op_id: str | None = ...) -> int: ...

    def result(self, seq: int, outcome: Mapping[str, Any], /) -> int: ...

    def entry(self, kind: Kind, body: Mapping[str, Any], /) -> int: ...

    async def committed(self, seq: int | None = None, /) -> None: ...

    def entries(self) -> list[Entry]: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class NoLog:
    """For a rollout that keeps no trajectory."""

    head_hash = ""
    is_begun = False
    epoch = 0

    def intent(self, kind: Kind, args: Mapping[str, Any], /, *, op_id: str | None = None) -> int:
        return 0

    def result(self, seq: int, outcome: Mapping[str, Any], /) -> int:
        return 0

    def entry(self, kind: Kind, body: Mapping[str, Any], /) -> int:
        return 0

    async def committed(self, seq: int | None = None, /) -> None:
        """Nothing waits for a disk."""

    def entries(self) -> list[Entry]:
        return []

    def check(self) -> None:
        """Nobody else can have it."""

    def close(self) -> None:
        """Nothing is open."""
