"""The synchronous faces of a sandbox and its processes."""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from barchan.errors import BarchanError
from barchan.model.denials import Denials
from barchan.model.fork import ForkKind
from barchan.model.sandbox import DEFAULT_OUTPUT_BYTES, ExecResult, ProcessInfo, SandboxInfo, SandboxStats
from barchan.model.snapshot_info import SnapshotKind
from barchan.sdk.aio.fork import FORK_TIMEOUT_S
from barchan.sdk.aio.process import WAIT_TIMEOUT_S, AsyncProcess, Scope, Stream
from barchan.sdk.aio.sandbox import SNAPSHOT_TIMEOUT_S, AsyncSandbox
from barchan.sdk.aio.shell import ShellPoint
from barchan.sdk.background import iterate, run
from barchan.sdk.files import Files
from barchan.sdk.options import Command, CreateOptions, ExecOptions, ShellOptions, StartOptions
from barchan.sdk.screen import Screen
from barchan.sdk.shell import Shell
from barchan.sdk.snapshot import Snapshot
from barchan.sdk.transport import CALL_TIMEOUT_S

if TYPE_CHECKING:
    from barchan.sdk.terminal import Terminal


class Sandbox:
    """One sandbox; as a context it is killed on exit. Picklable, without the token; valid while the sandbox lives."""

    def __init__(self, twin: AsyncSandbox) -> None:
        self._twin = twin
        self.id = twin.id
        self.files = Files(twin.files)
        self.screen = Screen(twin.screen)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._twin,)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def info(self) -> SandboxInfo:
        return run(self._twin.info())

    def stats(self) -> SandboxStats:
        return run(self._twin.stats())

    def denials(self) -> Denials:
        """What it was refused, as far as that leaves a trace. It stays asleep, if it is."""
        return run(self._twin.denials())

    def kill(self) -> bool:
        """End it; returns when nothing of it is left on its node. False if it had ended before."""
        return run(self._twin.kill())

    def snapshot(
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
    ) -> Snapshot:
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
        made = self._twin.snapshot(
            name,
            kind=kind,
            metadata=metadata,
            env=env,
            user=user,
            workdir=workdir,
            base_layers=base_layers,
            timeout_s=timeout_s,
        )
        return Snapshot(run(made))

    def fork(
        self,
        n: int = 1,
        *,
        kind: ForkKind = "fs",
        timeout_s: float = FORK_TIMEOUT_S,
        **options: Unpack[CreateOptions],
    ) -> "list[Sandbox | BarchanError]":
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
        made = run(self._twin.fork(n, kind=kind, timeout_s=timeout_s, **options))
        return [Sandbox(item) if isinstance(item, AsyncSandbox) else item for item in made]

    def pause(self) -> SandboxInfo:
        """Stop its programs. Its memory stays, its clocks stand still, and whatever is asked of it next wakes it.

        Requests that are being served wait, too, and so do their deadlines.

        Raises:
            CapacityError: Its programs don't stop, for they wait for a disk.
        """
        return run(self._twin.pause())

    def page_out(self) -> SandboxInfo:
        """Pause it, and give its cold memory away: to swap; on a host without, only what the page cache has for it."""
        return run(self._twin.page_out())

    def hibernate(self) -> SandboxInfo:
        """Pause it, and put its processes and memory on the node's disk, which frees what it takes otherwise.

        Whatever is asked of it next brings it back; it outlives the node.

        Raises:
            NotSnapshotable: It holds what can't be stored, and stays paused; the message says what.
            Conflict: A request came meanwhile, and it is awake again.
        """
        return run(self._twin.hibernate())

    def push(self) -> SandboxInfo:
        """Send it, hibernated, to the node's blob store, from where another node may take it: `client.adopt(id)`.

        Raises:
            Conflict: It is not hibernated, somebody wants it awake, or the node has no store.
            BlobUnavailable: The store is slow or dead.
        """
        return run(self._twin.push())

    def resume(self) -> SandboxInfo:
        """Wake it, from wherever it is. Nobody has to: any request does."""
        return run(self._twin.resume())

    def exec(self, command: Command, **options: Unpack[ExecOptions]) -> ExecResult:
        """Run a program to its end; a string runs in a shell. What it does is in the result, never an exception.

        After a lost connection the same request is sent again and finds the same process. If interrupted, all that the
        program has started is killed before the interrupt is seen.
        """
        return run(self._twin.exec(command, **options))

    def start(self, command: Command, **options: Unpack[StartOptions]) -> "Process":
        """Start a program in the background; repeating it with the same `process_id` gives the same process."""
        return Process(run(self._twin.start(command, **options)))

    def python(self, source: str, *, args: Sequence[str] = (), **options: Unpack[ExecOptions]) -> ExecResult:
        """Run source to its end in a fork of the sandbox's warm interpreter, as `python3 -c` would run it.

        The sandbox must have been made of a zygote. What the interpreter has imported is there at once; nothing that
        the source does is seen by the next one. It runs as the sandbox's user.

        Args:
            args: `sys.argv[1:]`.
            options: As of `exec`, but `user`, `rlimits` and `platform`.

        Raises:
            InvalidSpec: The sandbox has no warm interpreter.
        """
        return run(self._twin.python(source, args=args, **options))

    def start_python(self, source: str, *, args: Sequence[str] = (), **options: Unpack[StartOptions]) -> "Process":
        """Start source in the background, in a fork of the sandbox's warm interpreter; see `python`."""
        return Process(run(self._twin.start_python(source, args=args, **options)))

    def process(self, process_id: str) -> "Process":
        """A handle on a process that was started earlier, by whomever; nothing is asked of the node yet."""
        return Process(self._twin.process(process_id))

    def processes(self) -> list[ProcessInfo]:
        return run(self._twin.processes())

    def shell(
        self,
        *,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        point: ShellPoint | None = None,
        **options: Unpack[ShellOptions],
    ) -> Shell:
        """Start a shell that keeps its directory, variables and functions between commands.

        Args:
            max_output_bytes: Of one command, per stream; beyond it the head and the tail are kept.
            point: Go on with the shell that another handle had come to this point with, in place of a new one.
        """
        return Shell(run(self._twin.shell(max_output_bytes=max_output_bytes, point=point, **options)))

    def terminal(
        self, rows: int = 24, cols: int = 80, *, command: Command | None = None, **options: Unpack[ShellOptions]
    ) -> "Terminal":
        """Start a program (an interactive shell by default) on a terminal, with its screen kept here."""
        from barchan.sdk.terminal import Terminal  # with its emulator, which few programs need

        return Terminal(run(self._twin.terminal(rows, cols, command=command, **options)))


class Process:
    """One process of a sandbox, by its id. Cheap to make, picklable, and valid as long as the sandbox lives."""

    def __init__(self, twin: AsyncProcess) -> None:
        self._twin = twin
        self.id = twin.id
        self.sandbox_id = twin.sandbox_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sandbox_id!r}, {self.id!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._twin,)

    @property
    def exit_code(self) -> int | None:
        """The exit code as far as this handle knows: None before `wait()`, `info()` or `output()` told of the end."""
        return self._twin.exit_code

    def info(self) -> ProcessInfo:
        return run(self._twin.info())

    def wait(self, timeout_s: float | None = WAIT_TIMEOUT_S) -> ProcessInfo:
        """Wait for its end.

        Raises:
            ReadTimeout: It still runs after `timeout_s`, which does it no harm.
        """
        return run(self._twin.wait(timeout_s))

    def output(
        self,
        offset: int = 0,
        stderr_offset: int = 0,
        *,
        follow: bool = True,
        quiet_timeout_s: float | None = WAIT_TIMEOUT_S,
    ) -> Iterator[tuple[Stream, int, bytes]]:
        """Its output from the given offsets on, as `(stream, offset, data)`, each byte once, over lost connections too.

        A jump in the offsets says that nobody read the bytes before they had to go.

        Args:
            follow: Go on until it has ended and all is read; without, stop at what there is now.
            quiet_timeout_s: `ReadTimeout` when it writes nothing for this long.
        """
        return iterate(self._twin.output(offset, stderr_offset, follow=follow, quiet_timeout_s=quiet_timeout_s))

    def stdin_offset(self) -> int:
        """How many bytes of input it was given, by whomever."""
        return run(self._twin.stdin_offset())

    def write_stdin(
        self,
        data: bytes | str,
        *,
        eof: bool = False,
        timeout_s: float = CALL_TIMEOUT_S,
        offset: int | None = None,
    ) -> None:
        """Write all of it, and return when it is in the pipe: a process that doesn't read makes this wait.

        Args:
            eof: Close stdin after it.
            timeout_s: For each MiB; then `ReadTimeout`, with a part of the data possibly written.
            offset: Where in its input the data begins, for a write that is repeated: what it has taken of it already it
                does not take twice. None: behind all that it was given.
        """
        run(self._twin.write_stdin(data, eof=eof, timeout_s=timeout_s, offset=offset))

    def close_stdin(self) -> None:
        run(self._twin.close_stdin())

    def signal(self, signal: str | int = "TERM", *, scope: Scope = "group") -> int:
        """Send a signal, by number or by name without SIG; returns how many processes got it."""
        return run(self._twin.signal(signal, scope=scope))

    def kill(self) -> int:
        """Kill it and whatever it has left behind; returns how many processes that were."""
        return run(self._twin.kill())

    def resize(self, rows: int, cols: int) -> None:
        """Change the size of its pty."""
        run(self._twin.resize(rows, cols))
