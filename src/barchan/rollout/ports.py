"""What rollouts need of a sandbox client: the part of `barchan.sdk`'s async client that they use, and nothing else."""

from collections.abc import Sequence
from typing import Protocol

from barchan.model.sandbox import ExecResult

RLimits = dict[str, tuple[int, int]]


class Files(Protocol):
    async def read(self, path: str, /, *, length: int | None = None) -> bytes: ...


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
        timeout_s: float = ...,
        max_output_bytes: int = ...,
    ) -> ExecResult: ...

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
