"""What a check works with: a node, a client, sandboxes of the backend under test, and a few ways to look at them."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from barchan.errors import BarchanError, TransportError
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.aio.process import AsyncProcess, Stream
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.options import CreateOptions, ExecOptions, StartOptions
from barchan.testing.expect import NotConforming, equal, until
from barchan.testing.node import NodeProcess
from barchan.testing.profiles import Profile

T = TypeVar("T")
MIB = 1 << 20
CREATE_S = 60.0
ANSWER_S = 10.0


class Lab:
    """Everything that is made through it ends with the check.

    Args:
        client: Of the check's own; `common` gives the sandbox that checks share which leave it as they found it.
        folder: An empty one on this machine.
    """

    def __init__(
        self,
        backend: str,
        template: str,
        profile: Profile,
        node: NodeProcess,
        client: AsyncClient,
        common: Callable[[], Awaitable[AsyncSandbox]],
        folder: Path,
    ) -> None:
        self.backend = backend
        self.template = template
        self.profile = profile
        self.node = node
        self.client = client
        self.common = common
        self.folder = folder
        self._tasks: list[asyncio.Task[Any]] = []

    def spawn(self, call: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run something beside the check; it is cancelled when that has ended."""
        task = asyncio.get_running_loop().create_task(call)
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        """Wait until nothing of what was spawned runs any more, and leave no snapshot in an image store of others."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(TransportError):  # a check that was cut short may have left no node
            for snapshot in await self.client.snapshots():
                await snapshot.remove()

    def s(self, seconds: float) -> float:
        """So many seconds for a container on an idle machine; more for what is slower."""
        return seconds * self.profile.patience

    def options(self, **given: Unpack[CreateOptions]) -> CreateOptions:
        options: CreateOptions = {"backend": self.backend, "memory_mib": self.profile.memory_mib, **given}
        return options

    async def create(self, **given: Unpack[CreateOptions]) -> AsyncSandbox:
        """A sandbox of the check's own."""
        return await self.client.create(self.template, timeout_s=self.s(CREATE_S), **self.options(**given))

    async def kill_host_processes(self, sandbox_id: str) -> int:
        """SIGKILL all that the host has of a sandbox: its init, or what its guest runs in. Returns how many."""
        pids = await asyncio.to_thread(self.node.watch.sandbox_pids, sandbox_id)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    async def nothing_remains(self, sandbox_id: str) -> None:
        """Nothing on the host bears this sandbox's name any more, or soon."""
        left: list[str] = []

        async def is_clean() -> bool:
            left[:] = await asyncio.to_thread(self.node.watch.sandbox_remains, sandbox_id)
            return not left

        try:
            await until(is_clean, "nothing of it remains", self.s(ANSWER_S))
        except NotConforming as error:
            raise NotConforming(f"{error}: {'; '.join(left)}") from None

    async def restart_node(self) -> None:
        """SIGKILL the node, and start the next one."""
        await asyncio.to_thread(self.node.kill)
        await asyncio.to_thread(self.node.start)


async def text(sandbox: AsyncSandbox, command: str | list[str], **options: Unpack[ExecOptions]) -> str:
    """What a command that succeeds says."""
    return (await sandbox.exec(command, **options)).check().text


async def collected(process: AsyncProcess, stream: Stream = "stdout", *, follow: bool = True) -> bytes:
    """All that a program writes to one stream, which must come without gap or repetition."""
    found = bytearray()
    async for name, offset, data in process.output(follow=follow):
        if name == stream:
            equal(offset, len(found), f"the next offset of {stream}")
            found += data
    return bytes(found)


async def said_until(process: AsyncProcess, end: bytes, at: int = 0, quiet_s: float = 60.0) -> bytes:
    """What a program writes to stdout from an offset on, until it has said this."""
    found = bytearray()
    async for name, _, data in process.output(at, quiet_timeout_s=quiet_s):
        if name == "stdout":
            found += data
            if end in found:
                return bytes(found)
    raise NotConforming(f"the program ended, and said {bytes(found)!r} without {end!r}")


class Talker:
    """A shell that keeps variables in its memory, and does what it is told line by line."""

    SOURCE = 'while read -r line; do eval "$line"; done'

    def __init__(self, process: AsyncProcess, at: int = 0) -> None:
        self._process = process
        self._at = at

    @classmethod
    async def start(cls, sandbox: AsyncSandbox, **options: Unpack[StartOptions]) -> Self:
        return cls(await sandbox.start(["/bin/sh", "-c", cls.SOURCE], **options))

    @property
    def process(self) -> AsyncProcess:
        return self._process

    def of(self, sandbox: AsyncSandbox) -> "Talker":
        """The same program where it has been copied to, at the same offset."""
        return Talker(sandbox.process(self._process.id), self._at)

    async def ask(self, line: str) -> str:
        """Have it do something that writes one line; returns that."""
        await self._process.write_stdin(line + "\n")
        said = await said_until(self._process, b"\n", self._at)
        self._at += len(said)
        return said.decode().strip()


def made(items: list[AsyncSandbox | BarchanError]) -> list[AsyncSandbox]:
    """Sandboxes, all of which must have been made."""
    for item in items:
        if isinstance(item, BarchanError):
            raise item
    return [item for item in items if isinstance(item, AsyncSandbox)]
