"""The provider: inspect_ai's interface over sandboxes of a node.

Every exception that inspect_ai tells apart is raised as it asks; what is the platform's own fault comes as
`SandboxUnavailableError`, so that no sample is scored for it.
"""

import asyncio
import errno
import os
import shlex
from pathlib import PurePosixPath
from typing import Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    sandboxenv,
)
from pydantic import BaseModel

from barchan.compat.inspect_ai import nodes
from barchan.compat.inspect_ai.config import FILES, BarchanConfig, config_of, validated
from barchan.compat.inspect_ai.outcome import CANNOT_RUN, TooLong, ended, file_error, is_unavailable
from barchan.errors import BarchanError, CapacityError, InvalidSpec, NotFound
from barchan.model.sandbox import DURATION_S_MAX
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.wire.api import STDIN_INLINE_BYTES_MAX

LABEL_BYTES_MAX = 256
# Writes through what is there, as a shell's redirection does: the file keeps its owner and mode, and its permissions
# count, which replacing it would not ask for.
WRITE_OVER = (
    f'if [ -d "$1" ]; then exit {errno.EISDIR}; elif [ ! -w "$1" ]; then exit {errno.EACCES}; fi; exec /bin/cat >"$1"'
)
WRITE_ON = 'exec /bin/cat >>"$1"'  # more of what one command's input may have


@sandboxenv(name="barchan")
class BarchanEnvironment(SandboxEnvironment):
    """A sample's sandbox. Relative paths start at its working directory."""

    def __init__(self, sandbox: AsyncSandbox, config: BarchanConfig, workdir: str) -> None:
        super().__init__()
        self.sandbox = sandbox
        self._config = config
        self._workdir = workdir

    # configuration

    @classmethod
    def config_files(cls) -> list[str]:
        """Looked for beside the task."""
        return list(FILES)

    @classmethod
    def is_docker_compatible(cls) -> bool:
        """Compose files and Dockerfiles say more than one sandbox can be: images are built by `barchan image build`."""
        return False

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """From an eval log."""
        return validated(config, "the log's sandbox configuration")

    @classmethod
    def default_concurrency(cls) -> int | None:
        """None: the node itself lets in what fits, and a sample waits for its turn."""
        return None

    def default_polling_interval(self) -> float:
        """Seconds; a request to the node takes a millisecond or two."""
        return 0.2

    # lives

    @classmethod
    async def task_init(cls, task_name: str, config: BaseModel | str | None) -> None:
        """Reach the node, starting this user's own if need be, and see that it has the template."""
        settings = config_of(config)
        client = await nodes.take(settings)
        try:
            await client.image(settings.template)
        except BaseException:
            await nodes.give_back(settings)
            raise

    @classmethod
    async def task_cleanup(cls, task_name: str, config: BaseModel | str | None, cleanup: bool) -> None:
        """With `cleanup` off the sandboxes stay, `grace_s` longer than this process."""
        if cleanup:
            await nodes.give_back(config_of(config))

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """One sandbox, `default`."""
        settings = config_of(config)
        client = await nodes.take(settings)
        try:
            sandbox = await _created(client, settings, task_name)
            workdir = (await sandbox.exec(["pwd"])).text.strip() or "/"
        except BaseException:
            await nodes.give_back(settings)
            raise
        return {"default": cls(sandbox, settings, workdir)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """End them; nothing of them is left on the node when this returns."""
        for environment in environments.values():
            ours = environment.as_type(cls)
            try:
                await ours.sandbox.kill()
            finally:
                await nodes.give_back(ours._config)

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """`inspect sandbox cleanup barchan [ID]`, on this user's own node: one by its id, or all of inspect's."""
        settings = BarchanConfig()
        client = await nodes.take(settings)
        try:
            if id is None:
                await client.kill(labels={nodes.LABEL: nodes.MAKER})
            else:
                await (await client.attach(id)).kill()
        finally:
            await nodes.give_back(settings)

    # operations

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a program to its end; at its time-out all that it has started is killed before that is seen.

        Args:
            timeout_retry: Means nothing here: a time-out is the command's own, never that of a lost connection.
            concurrency: Likewise: no process of this machine is started.
        """
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            result = await self.sandbox.exec(
                cmd,
                stdin=input,
                cwd=cwd,
                env=env or {},
                user=user,
                timeout_s=DURATION_S_MAX if timeout is None else timeout,
                max_output_bytes=limit,
            )
        except InvalidSpec as error:  # mostly an argument that no kernel takes, of a model's making
            return ExecResult(False, CANNOT_RUN, "", f"{error}\n")
        except BarchanError as error:
            raise _translated(error, None) from error
        found = ended(result, limit, timeout)
        if isinstance(found, TooLong):
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, found.kept)
        return ExecResult(found.exit_code == 0, found.exit_code, found.stdout, found.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, with the directories above it; one that is there keeps its mode and owner."""
        data = contents.encode() if isinstance(contents, str) else contents
        path = self._path(file)
        try:
            try:
                await self.sandbox.files.stat(path)
            except NotFound:
                await self.sandbox.files.write(path, data)
                return
            for at in range(0, max(1, len(data)), STDIN_INLINE_BYTES_MAX):
                await self._write(file, path, data[at : at + STDIN_INLINE_BYTES_MAX], WRITE_ON if at else WRITE_OVER)
        except BarchanError as error:
            raise _translated(error, file) from error

    async def _write(self, file: str, path: str, data: bytes, script: str) -> None:
        done = await self.sandbox.exec(["/bin/sh", "-c", script, "write", path], stdin=data)
        if done.exit_code in (errno.EACCES, errno.EISDIR):
            raise OSError(done.exit_code, os.strerror(done.exit_code), file)
        if not done.ok:
            raise OSError(f"{file} could not be written: {done.error_text.strip() or f'exit code {done.exit_code}'}")

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """The whole of a file, within inspect's limit."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            data = await self.sandbox.files.read(self._path(file), length=limit + 1)
        except BarchanError as error:
            raise _translated(error, file) from error
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """How a person gets a shell in it while the sample runs."""
        where = []
        if self._config.url is not None:
            where = ["--url", self._config.url]
            if self._config.token_file is not None:
                where += ["--token-file", self._config.token_file]
        elif self._config.state_dir is not None:
            where = ["--state-dir", self._config.state_dir]
        words = ["barchan", *where, "exec", "--tty", *(["--user", user] if user else []), self.sandbox.id]
        return SandboxConnection(type="barchan", command=shlex.join([*words, "--", "/bin/sh", "-l"]))

    def _path(self, file: str) -> str:
        return str(PurePosixPath(self._workdir) / file)


async def _created(client: Any, settings: BarchanConfig, task_name: str) -> AsyncSandbox:
    """A sandbox, once the node has room for it."""
    give_up_at = asyncio.get_running_loop().time() + settings.capacity_wait_s
    options = settings.options()
    options["labels"] = {nodes.LABEL: nodes.MAKER, "task": task_name[:LABEL_BYTES_MAX]}
    while True:
        try:
            sandbox: AsyncSandbox = await client.create(settings.template, **options)
            return sandbox
        except CapacityError as error:
            if asyncio.get_running_loop().time() + error.retry_after_s > give_up_at:
                raise SandboxUnavailableError(f"no room on the node: {error}") from error
            await asyncio.sleep(error.retry_after_s)


def _translated(error: BarchanError, path: str | None) -> Exception:
    """As inspect_ai tells it apart."""
    if path is not None and (found := file_error(error, path)) is not None:
        return found
    return SandboxUnavailableError(str(error)) if is_unavailable(error) else error
