"""A sandbox by its id: run programs in it, move files, throw it away."""

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from barchan.errors import BarchanError, NotFound, SandboxExpired, SandboxLost
from barchan.model.denials import Denials
from barchan.model.fork import ForkKind
from barchan.model.node import Killed, SnapshotRequest
from barchan.model.sandbox import (
    DEFAULT_OUTPUT_BYTES,
    ExecRequest,
    ExecResult,
    ProcessInfo,
    SandboxInfo,
    SandboxStats,
    StartRequest,
)
from barchan.model.snapshot_info import SnapshotInfo, SnapshotKind
from barchan.sdk.aio.clock import AsyncSandboxClock, in_its_time
from barchan.sdk.aio.files import AsyncFiles
from barchan.sdk.aio.fork import FORK_TIMEOUT_S, error_of, fork
from barchan.sdk.aio.process import AsyncProcess, start_process
from barchan.sdk.aio.screen import AsyncScreen
from barchan.sdk.aio.shell import AsyncShell, ShellPoint
from barchan.sdk.aio.snapshot import AsyncSnapshot
from barchan.sdk.checks import check_seconds, checked_env, checked_labels
from barchan.sdk.endpoint import Endpoint
from barchan.sdk.options import (
    Command,
    CreateOptions,
    ExecOptions,
    ShellOptions,
    StartOptions,
    exec_request,
    python_request,
    start_request,
)
from barchan.sdk.transport import CALL_TIMEOUT_S, Call, Transport, encode, shared_transport

if TYPE_CHECKING:
    from barchan.sdk.aio.terminal import AsyncTerminal

INFO = Call("info", SandboxInfo)
KILL = Call("kill", Killed)
DENIALS = Call("denials", Denials)
STATS = Call("stats", SandboxStats)
SNAPSHOT = Call("snapshot", SnapshotInfo)
PAUSE = Call("pause", SandboxInfo)
PAGE_OUT = Call("page_out", SandboxInfo)
HIBERNATE = Call("hibernate", SandboxInfo)
RESUME = Call("resume", SandboxInfo)
PUSH = Call("push", SandboxInfo)
EXEC = Call("exec", ExecResult)
PROCESSES = Call("process_list", list[ProcessInfo])

SNAPSHOT_TIMEOUT_S = 660.0  # a little more than the node gives the packing of a layer
TIER_TIMEOUT_S = 600.0  # others of the node may have their turn first
_MARGIN_S = 30.0  # what the node may need beyond the time of the program itself
_REPLY_BYTES = 1 << 20  # of an exec's reply beside the output


class AsyncSandbox:
    """One sandbox; as a context it is killed on exit. Picklable, without the token; valid while the sandbox lives."""

    def __init__(self, transport: Transport, sandbox_id: str, lease_id: str | None = None) -> None:
        self.id = sandbox_id
        self.files = AsyncFiles(transport, sandbox_id, lease_id=lease_id)
        self.screen = AsyncScreen(transport, sandbox_id)
        self._transport = transport
        self._exec_target = self._target(EXEC)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (self._transport.endpoint, self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    def _target(self, call: Call[Any]) -> str:
        return call.target(sandbox_id=self.id)

    async def info(self) -> SandboxInfo:
        return await self._transport.value(INFO, self._target(INFO))

    async def stats(self) -> SandboxStats:
        return await self._transport.value(STATS, self._target(STATS))

    async def denials(self) -> Denials:
        """What it was refused, as far as that leaves a trace. It stays asleep, if it is."""
        return await self._transport.value(DENIALS, self._target(DENIALS))

    async def kill(self) -> bool:
        """End it; returns when nothing of it is left on its node. False if it had ended before."""
        try:
            return (await self._transport.value(KILL, self._target(KILL), timeout_s=2 * CALL_TIMEOUT_S)).killed > 0
        except (NotFound, SandboxExpired, SandboxLost):
            return False

    async def snapshot(
        self,
        name: str | None = None,
        *,
        kind: SnapshotKind = "fs",
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
        base_layers: int | Literal["same"] | None = None,
        timeout_s: float = SNAPSHOT_TIMEOUT_S,
    ) -> AsyncSnapshot:
        """Keep it as it is at one moment, for which the programs in it are stopped: its files, as an image, and more.

        Sandboxes of the image start with these files and none of the processes. /tmp and all else on disk is in it;
        /dev/shm is not.

        Args:
            name: Of the image; one of that name gives way. None: a fresh one, `snap-...`.
            kind: `memory` keeps the processes, too; sandboxes of the snapshot, not of its image alone, go on with them.
            metadata: For whoever looks for it later.
            env: Replaces the environment of this sandbox's image in the new one, as do `user` and `workdir`.
            base_layers: How many of the sandbox's bottom layers are the new image's base, and not its own. None: all;
                "same": those that are the base of what it was made of.

        Raises:
            CapacityError: No room on the node's disk.
            GuestWrecked: The files can't be an image: directories without end, or sparse files without measure.
            NotSnapshotable: A process holds what can't be kept with its memory. The sandbox goes on.
        """
        check_seconds(timeout_s=timeout_s)
        asked = SnapshotRequest(
            name=name,
            kind=kind,
            metadata=checked_labels(metadata or {}),
            env=None if env is None else checked_env(env),
            user=user,
            workdir=workdir,
            base_layers=base_layers,
        )
        info = await self._transport.value(SNAPSHOT, self._target(SNAPSHOT), encode(asked), timeout_s=timeout_s)
        return AsyncSnapshot(self._transport, info)

    async def fork(
        self,
        n: int = 1,
        *,
        kind: ForkKind = "fs",
        timeout_s: float = FORK_TIMEOUT_S,
        **options: Unpack[CreateOptions],
    ) -> "list[AsyncSandbox | BarchanError]":
        """Make `n` sandboxes that start as this one is at one moment, and go their own ways from there.

        Each has its own id, host name, network and random numbers; it is a sandbox like any other, and may be forked
        again. Where one could not be made, its error is in its place. This one goes on.

        Args:
            kind: `fs`: its files, and no processes. `memory`: its processes too, with all they have in memory.
            options: In what the children differ from it, as for `create`; `labels` and `env` are added to its own.
                Their lease is its lease, and their `ttl_s` begins anew.

        Raises:
            CapacityError: The files could not be kept: no child was made.
            NotSnapshotable: A process holds what can't be copied with its memory: no child was made.
        """
        return [
            error_of(item) if item.sandbox is None else AsyncSandbox(self._transport, item.sandbox.sandbox_id)
            for item in await fork(self._transport, self.id, n, kind, timeout_s, options)
        ]

    async def pause(self) -> SandboxInfo:
        """Stop its programs. Its memory stays, its clocks stand still, and whatever is asked of it next wakes it.

        Requests that are being served wait, too, and so do their deadlines.

        Raises:
            CapacityError: Its programs don't stop, for they wait for a disk.
        """
        return await self._move(PAUSE)

    async def page_out(self) -> SandboxInfo:
        """Pause it, and give its cold memory away: to swap; on a host without, only what the page cache has for it."""
        return await self._move(PAGE_OUT)

    async def hibernate(self) -> SandboxInfo:
        """Pause it, and put its processes and memory on the node's disk, which frees what it takes otherwise.

        Whatever is asked of it next brings it back; it outlives the node.

        Raises:
            NotSnapshotable: It holds what can't be stored, and stays paused; the message says what.
            Conflict: A request came meanwhile, and it is awake again.
        """
        return await self._move(HIBERNATE)

    async def push(self) -> SandboxInfo:
        """Send it, hibernated, to the node's blob store, from where another node may take it: `client.adopt(id)`.

        Raises:
            Conflict: It is not hibernated, somebody wants it awake, or the node has no store.
            BlobUnavailable: The store is slow or dead.
        """
        return await self._move(PUSH)

    async def resume(self) -> SandboxInfo:
        """Wake it, from wherever it is. Nobody has to: any request does."""
        return await self._move(RESUME)

    async def _move(self, call: Call[SandboxInfo]) -> SandboxInfo:
        return await self._transport.value(call, self._target(call), timeout_s=TIER_TIMEOUT_S)

    async def exec(self, command: Command, **options: Unpack[ExecOptions]) -> ExecResult:
        """Run a program to its end; a string runs in a shell. What it does is in the result, never an exception.

        After a lost connection the same request is sent again and finds the same process. If cancelled, all that the
        program has started is killed before the cancellation is seen.
        """
        return await self._to_end(exec_request(command, options))

    async def _to_end(self, request: ExecRequest) -> ExecResult:
        call = self._transport.value(
            EXEC,
            self._exec_target,
            encode(request),
            timeout_s=math.inf,
            bytes_max=2 * request.max_output_bytes + _REPLY_BYTES,
        )
        limit_s = request.timeout_s + _MARGIN_S
        return await self.process(request.process_id or "").kill_unless(
            in_its_time(self._transport, self.id, call, limit_s)
        )

    async def start(self, command: Command, **options: Unpack[StartOptions]) -> AsyncProcess:
        """Start a program in the background; repeating it with the same `process_id` gives the same process."""
        return await start_process(self._transport, self.id, start_request(command, options))

    async def python(self, source: str, *, args: Sequence[str] = (), **options: Unpack[ExecOptions]) -> ExecResult:
        """Run source to its end in a fork of the sandbox's warm interpreter, as `python3 -c` would run it.

        The sandbox must have been made of a zygote. What the interpreter has imported is there at once; nothing that
        the source does is seen by the next one. It runs as the sandbox's user.

        Args:
            args: `sys.argv[1:]`.
            options: As of `exec`, but `user`, `rlimits` and `platform`.

        Raises:
            InvalidSpec: The sandbox has no warm interpreter.
        """
        return await self._to_end(python_request(ExecRequest, source, args, options))

    async def start_python(
        self, source: str, *, args: Sequence[str] = (), **options: Unpack[StartOptions]
    ) -> AsyncProcess:
        """Start source in the background, in a fork of the sandbox's warm interpreter; see `python`."""
        return await start_process(self._transport, self.id, python_request(StartRequest, source, args, options))

    def process(self, process_id: str) -> AsyncProcess:
        """A handle on a process that was started earlier, by whomever; nothing is asked of the node yet."""
        return AsyncProcess(self._transport, self.id, process_id)

    def clock(self) -> AsyncSandboxClock:
        """The sandbox's own time, for whoever measures it; while it is entered, the sandbox is awake."""
        return AsyncSandboxClock(self._transport, self.id)

    async def processes(self) -> list[ProcessInfo]:
        return await self._transport.value(PROCESSES, self._target(PROCESSES))

    async def shell(
        self,
        *,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        point: ShellPoint | None = None,
        **options: Unpack[ShellOptions],
    ) -> AsyncShell:
        """Start a shell that keeps its directory, variables and functions between commands.

        Args:
            max_output_bytes: Of one command, per stream; beyond it the head and the tail are kept.
            point: Go on with the shell that another handle had come to this point with, in place of a new one.
        """
        shell = AsyncShell(self._transport, self.id, max_output_bytes, options, point)
        await shell.open()
        return shell

    async def terminal(
        self, rows: int = 24, cols: int = 80, *, command: Command | None = None, **options: Unpack[ShellOptions]
    ) -> "AsyncTerminal":
        """Start a program (an interactive shell by default) on a terminal, with its screen kept here."""
        from barchan.sdk.aio.terminal import AsyncTerminal  # with its emulator, which few programs need

        terminal = AsyncTerminal(self._transport, self.id, rows, cols)
        await terminal.open(command, options)
        return terminal


def made_under(transport: Transport, info: SandboxInfo, lease_id: str | None) -> AsyncSandbox:
    """A handle on a sandbox that a create gave. Where it came under the lease that it was asked for under, the handle
    changes no files once it has left that; another client's, found by its create id, has no such bound.
    """
    return AsyncSandbox(transport, info.sandbox_id, lease_id if info.spec.lease_id == lease_id else None)


def _revive(endpoint: Endpoint, sandbox_id: str) -> AsyncSandbox:
    return AsyncSandbox(shared_transport(endpoint), sandbox_id)
