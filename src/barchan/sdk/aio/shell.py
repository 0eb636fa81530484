"""A shell that stays: directory, variables and functions are kept from one command to the next.

One background shell reads commands from its stdin. Each run is sent as one line that evaluates the command with an
empty stdin and then writes a fresh random mark to the two original output streams, with the exit code. The mark is no
evidence: a command that reads the memory of its own shell can forge its own exit code, as it could simply exit with
another one. It is fresh, so that what an earlier command left running can't end a later one.
"""

import asyncio
import secrets
from types import TracebackType
from typing import Any, Self, cast

from msgspec import Struct

from barchan.errors import (
    BarchanError,
    CallerError,
    InvalidSpec,
    LocalProtocolError,
    NotFound,
    SandboxExpired,
    SandboxLost,
    TrajectoryDiverged,
    TransportError,
)
from barchan.model.sandbox import DEFAULT_EXEC_TIMEOUT_S, OutputChunk
from barchan.sdk.aio.clock import AsyncSandboxClock
from barchan.sdk.aio.process import AsyncProcess, start_process
from barchan.sdk.aio.shell_streams import Run, line_of
from barchan.sdk.background import BACKGROUND
from barchan.sdk.cancel import clean_up, forget_error
from barchan.sdk.checks import check_seconds
from barchan.sdk.endpoint import Endpoint
from barchan.sdk.options import ShellOptions, StartOptions, start_request
from barchan.sdk.transport import CALL_TIMEOUT_S, Transport, shared_transport

_SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash --noprofile --norc; exec sh")
_SETTLE_S = 2.0  # how long the shell may take to come back after its children were killed
_ENDED_S = 10.0
# Copies of the two streams, so that a command may redirect the shell's own (`exec >file`); only bash knows two digits.
# The word that follows tells a shell that came up from one that could not be started.
_SET_UP = "exec 8>&1 9>&2; command printf %s {} >&9\n"
_SAID_BYTES = 4096


class ShellResult(Struct, frozen=True, kw_only=True):
    """What one command in a shell did.

    Attributes:
        exit_code: Of the command; of the shell itself, if the command ended it.
        timed_out: `timeout_s` passed, or `idle_timeout_s` without output; every process below the shell was killed.
        truncated: The middle of an output was left out.
        restarted: The shell ended, with this command (`exit`, or a time-out it did not survive) or since the last one:
            directory, variables and functions are lost, and the next command has a new shell.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    restarted: bool = False

    @property
    def text(self) -> str:
        """stdout as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """stderr as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr.decode("utf-8", "replace")


class NotBegun(Exception):
    """The shell of a command has ended, and had not taken the command: it may be run in another one."""


class ShellPoint(Struct, frozen=True, kw_only=True):
    """Where a shell stands between two commands, for whoever goes on with it, here or in another process.

    `stdout` and `stderr` are offsets of its process's output: what lies before was told.
    """

    process_id: str
    stdout: int
    stderr: int
    last_code: int


class ShellRun(Struct, frozen=True, kw_only=True):
    """One command that is about to be sent to a shell. Whoever has this can send the same again, from any process: the
    shell takes it once, and what it wrote is read from where it began.

    Attributes:
        mark: What tells its end.
        stdin: Offset of the shell's input at which its line begins; `stdout` and `stderr` are those of its output.
        greeting: What a shell that just started says first.
        is_new: It is another shell than the command before had.
    """

    process_id: str
    mark: str
    stdin: int
    stdout: int
    stderr: int
    last_code: int = 0
    greeting: str = ""
    is_new: bool = False


class AsyncShell:
    """Runs one command at a time. Used from any loop; it lives on the SDK's own, so that its output is always read.

    Picklable between two commands; one process at a time goes on with it.
    """

    def __init__(
        self,
        transport: Transport,
        sandbox_id: str,
        bytes_max: int,
        options: ShellOptions,
        point: ShellPoint | None = None,
    ) -> None:
        self.point = point  # None before the first command
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._bytes_max = bytes_max
        self._options = options
        self._turn = asyncio.Lock()
        self._process: AsyncProcess | None = None
        self._reader: asyncio.Task[None] | None = None
        self._run = Run(bytes_max)
        self._is_taken_over = point is not None
        self._read_to = {"stdout": 0, "stderr": 0}
        self._begins_at = (0, 0)  # offsets of the output that belongs to the next command
        self._last_code = 0
        self._first_greeting = ""  # of a shell that has run no command yet
        self._greeting = b""  # what the shell has yet to say first, b"" once it did
        self._said = b""  # on its stderr, before the greeting
        self._was_lost = False  # the shell before, and with it what earlier commands had set; not told yet
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (self._transport.endpoint, self._sandbox_id, self._bytes_max, self._options, self.point)

    async def open(self) -> None:
        if self.point is None:
            await BACKGROUND.call(self._start())

    async def begin(self) -> ShellRun:
        """Make sure that there is a shell, and say where the next command will stand in it."""
        return await BACKGROUND.call(self._begin())

    async def run(
        self,
        command: str,
        *,
        timeout_s: float = DEFAULT_EXEC_TIMEOUT_S,
        idle_timeout_s: float | None = None,
        begun: ShellRun | None = None,
    ) -> ShellResult:
        """Run a command in the shell. Its stdin is empty; what background jobs wrote since the last run comes with it.

        A time-out and a cancelled await kill every process below the shell, also earlier background jobs; the shell and
        what it knows live on, unless it is the shell itself that does not come back in 2 s.

        Args:
            timeout_s: Of the sandbox's own time: neither a wake before it nor a sleep that somebody asks for meanwhile
                counts. By itself the sandbox does not sleep before it is done.
            idle_timeout_s: Time out when it writes nothing for this long, of the same time.
            begun: What `begin` gave for this command, to this handle or another, whose process was killed then: what of
                the command the shell has taken already it does not take again.

        Raises:
            NotBegun: The shell of `begun` has ended or was never there, and had not taken the command.
        """
        check_seconds(timeout_s=timeout_s, idle_timeout_s=idle_timeout_s)
        if "\0" in command:
            raise InvalidSpec("a shell command holds no NUL character")
        return await BACKGROUND.call(self._run_command(command, timeout_s, idle_timeout_s, begun))

    async def close(self) -> None:
        """End the shell and what runs below it."""
        await BACKGROUND.call(self._close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(self) -> AsyncProcess:
        options: dict[str, Any] = {**self._options}
        request = start_request(_SHELL, cast("StartOptions", options))
        process = await start_process(self._transport, self._sandbox_id, request)
        self._process, self._last_code, self._run = process, 0, Run(self._bytes_max)
        self._first_greeting = greeting = secrets.token_hex(16)
        self._greeting, self._said = greeting.encode(), b""
        self._follow(process, 0, 0)
        try:
            await process.write_stdin(_SET_UP.format(greeting))
        except CallerError as error:
            await self._explain(process, error)
            raise
        return process

    async def _take_over(self, point: ShellPoint) -> tuple[AsyncProcess, bool]:
        """Go on with a shell that another handle started; with a new one, where that has ended since."""
        process = AsyncProcess(self._transport, self._sandbox_id, point.process_id)
        is_running = (await process.info()).running
        self._is_taken_over = False
        if not is_running:
            return await self._start(), True
        self._process, self._last_code, self._run = process, point.last_code, Run(self._bytes_max)
        self._follow(process, point.stdout, point.stderr)
        return process, False

    async def _begin(self) -> ShellRun:
        async with self._turn:
            process, is_new = await self._living_shell()
            try:
                stdin = await process.stdin_offset()
            except CallerError as error:
                await self._explain(process, error)
                raise
            stdout, stderr = self._begins_at
            return ShellRun(
                process_id=process.id,
                mark=self._run.mark,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                last_code=self._last_code,
                greeting=self._first_greeting,
                is_new=is_new,
            )

    async def _again(self, begun: ShellRun, length: int) -> tuple[AsyncProcess, bool]:
        """The shell of a command that another handle has begun, as it was then, and whether it still takes input: its
        input goes on where the command's line of that length begins.
        """
        await self._forget()
        self._is_taken_over = False
        process = AsyncProcess(self._transport, self._sandbox_id, begun.process_id)
        try:
            is_running = (await process.info()).running
            taken = await process.stdin_offset() - begun.stdin
        except NotFound as error:
            if "process_id" not in error.details:
                raise
            self._was_lost |= _has_run(begun)
            raise NotBegun(f"shell {begun.process_id} is not in this sandbox") from error
        if not 0 <= taken <= length:
            raise TrajectoryDiverged(f"shell {begun.process_id} has had other input than this command")
        if not is_running and taken < length:
            self._was_lost |= _has_run(begun)
            raise NotBegun(f"shell {begun.process_id} has ended before it had the command")
        self._process, self._last_code = process, begun.last_code
        self._run = Run(self._bytes_max, mark=begun.mark)
        self._first_greeting, self._greeting, self._said = begun.greeting, begun.greeting.encode(), b""
        self._follow(process, begun.stdout, begun.stderr)
        return process, is_running

    def _follow(self, process: AsyncProcess, stdout: int, stderr: int) -> None:
        self._begins_at = stdout, stderr
        self._read_from(process, stdout, stderr)

    def _read_from(self, process: AsyncProcess, stdout: int, stderr: int) -> None:
        self._read_to = {"stdout": stdout, "stderr": stderr}
        self._reader = asyncio.create_task(self._read(process, stdout, stderr))
        self._reader.add_done_callback(forget_error)

    def _is_there(self) -> bool:
        """Whether there is a shell that nobody has told of the end of. Where only the way to it was lost, while nothing
        ran in it, its output is read on: it has all that earlier commands have set.
        """
        if self._process is None or self._reader is None:
            return False
        if self._reader.done() and isinstance(self._reader.exception(), TransportError):
            self._read_from(self._process, self._read_to["stdout"], self._read_to["stderr"])
        return not self._reader.done()

    async def _explain(self, process: AsyncProcess, error: CallerError) -> None:
        """Forget a shell that takes no input, and raise what it said if it never came up."""
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=_SETTLE_S)
        never_came_up = bool(self._greeting) and process.exit_code is not None
        await self._forget()
        if never_came_up:
            raise self._not_started(process.exit_code) from error

    def _not_started(self, exit_code: int | None) -> InvalidSpec:
        said = self._said.decode("utf-8", "replace").strip()
        return InvalidSpec(f"the shell did not start: {said or f'it ended with exit code {exit_code}'}")

    async def _read(self, process: AsyncProcess, stdout: int, stderr: int) -> None:
        """Give each run its output; returns when the shell ended, though its children may live on."""
        try:
            async for chunk in process.chunks(stdout, stderr, follow=True, quiet_timeout_s=None, is_idle=True):
                if chunk.stream == "exit":
                    return
                self._run.has_gap |= chunk.offset > self._read_to[chunk.stream]
                self._read_to[chunk.stream] = chunk.offset + len(chunk.data)
                if self._greeting and chunk.stream == "stderr":
                    self._greet(chunk)
                else:
                    self._run.feed(chunk)
        finally:
            self._run.changed.set()

    def _greet(self, chunk: OutputChunk) -> None:
        before, greeting, after = (self._said + chunk.data).partition(self._greeting)
        self._said = before[-_SAID_BYTES:]
        if greeting:
            self._greeting = b""
            self._run.feed(OutputChunk("stderr", chunk.offset, before + after))

    async def _run_command(
        self, command: str, timeout_s: float, idle_timeout_s: float | None, begun: ShellRun | None
    ) -> ShellResult:
        async with self._turn:
            if begun is None:
                process, is_new = await self._living_shell()
                line, offset = line_of(command, self._run.mark, self._last_code), None
            else:
                line, offset, is_new = line_of(command, begun.mark, begun.last_code), begun.stdin, begun.is_new
                own, takes_input = self._begun_here(begun), True
                if own is None:
                    own, takes_input = await self._again(begun, len(line.encode()))
                process, line = own, line if takes_input else ""
            async with AsyncSandboxClock(self._transport, self._sandbox_id) as clock:
                return await self._run_awake(process, is_new, clock, line, offset, timeout_s, idle_timeout_s)

    def _begun_here(self, begun: ShellRun) -> AsyncProcess | None:
        if self._process is None or (self._process.id, self._run.mark) != (begun.process_id, begun.mark):
            return None
        if not self._is_there():
            raise NotBegun(f"shell {begun.process_id} has ended before it was sent the command")
        return self._process

    async def _run_awake(
        self,
        process: AsyncProcess,
        is_new: bool,
        clock: AsyncSandboxClock,
        line: str,
        offset: int | None,
        timeout_s: float,
        idle_timeout_s: float | None,
    ) -> ShellResult:
        run = self._run
        run.time, run.last_output_at = clock.time, clock.time()
        timed_out = False
        try:
            async with clock.timeout(timeout_s):
                if line:
                    await process.write_stdin(line, timeout_s=timeout_s + CALL_TIMEOUT_S, offset=offset)
                timed_out = not await self._wait(run, clock, idle_timeout_s)
        except TimeoutError:
            timed_out = True
        except asyncio.CancelledError as cancelled:
            await clean_up(cancelled, self._abandon(run, clock), "the command may still run")
            if self._run is run:
                await self._lose()
            raise
        except CallerError as error:
            await self._explain(process, error)
            raise
        except BarchanError:
            await self._lose()
            raise
        try:
            if timed_out:
                await self._interrupt(run, clock)
            return await self._result(run, timed_out, is_new)
        except (TransportError, TimeoutError):
            await self._lose()
            raise

    async def _living_shell(self) -> tuple[AsyncProcess, bool]:
        """The shell for the next command, and whether it is another than the last command had."""
        if self._closed:
            raise LocalProtocolError("the shell is closed")
        if self._is_taken_over and self.point is not None:
            return await self._take_over(self.point)
        if self._process is not None and self._is_there():
            return self._process, False
        is_new = self._process is not None or self._was_lost
        await self._forget()
        return await self._start(), is_new

    async def _wait(self, run: Run, clock: AsyncSandboxClock, idle_timeout_s: float | None = None) -> bool:
        """Wait for the mark or the end of the shell; False when it was silent for too long first."""
        assert self._reader is not None
        while run.exit_code is None and not self._reader.done():
            run.changed.clear()
            left_s = run.last_output_at + idle_timeout_s - clock.time() if idle_timeout_s is not None else None
            try:
                async with clock.timeout(left_s):
                    await run.changed.wait()
            except TimeoutError:
                return False
            # The reader sets the event in its last breath, and is done only after that.
            await asyncio.sleep(0)
        return True

    async def _interrupt(self, run: Run, clock: AsyncSandboxClock) -> None:
        """Kill what runs below the shell; if it does not come back, the shell too."""
        assert self._process is not None
        await self._process.signal("KILL", scope="children")
        try:
            async with clock.timeout(_SETTLE_S):
                await self._wait(run, clock)
        except TimeoutError:
            await self._process.kill()
            async with clock.timeout(_ENDED_S):
                await self._wait(run, clock)

    async def _abandon(self, run: Run, clock: AsyncSandboxClock) -> None:
        await self._interrupt(run, clock)
        await self._result(run, True, False)

    async def _result(self, run: Run, timed_out: bool, is_new: bool) -> ShellResult:
        assert self._process is not None and self._reader is not None
        exit_code = run.exit_code
        has_ended = exit_code is None
        if exit_code is None:
            process = self._process
            await self._reader  # it is over; raises what ended it, if that was an error
            await self._forget()
            exit_code = (await process.wait(_ENDED_S)).exit_code or 0
            if self._greeting and not timed_out:
                raise self._not_started(exit_code)
        self._run, self._last_code, self._was_lost = Run(self._bytes_max, run), exit_code, False
        self.point, self._first_greeting = None if has_ended else self._point(run), ""
        if self.point is not None:
            self._begins_at = self.point.stdout, self.point.stderr
        (out, out_cut), (err, err_cut) = (run.streams[name].content() for name in ("stdout", "stderr"))
        return ShellResult(
            exit_code=exit_code,
            stdout=out,
            stderr=err,
            timed_out=timed_out,
            truncated=out_cut or err_cut or run.has_gap,
            restarted=has_ended or is_new,
        )

    def _point(self, run: Run) -> ShellPoint | None:
        """Where the mark of a run was: what came after it is the next command's."""
        if self._process is None:
            return None
        told = {name: self._read_to[name] - stream.after_bytes for name, stream in run.streams.items()}
        return ShellPoint(
            process_id=self._process.id, stdout=told["stdout"], stderr=told["stderr"], last_code=self._last_code
        )

    async def _forget(self) -> None:
        """Let the next command have a new shell."""
        reader, self._process, self._reader = self._reader, None, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _lose(self) -> None:
        """Have a new shell for the next command, which is told: what comes of the one that is not over would pass for
        the next one's.
        """
        self._was_lost = True
        await self._forget()

    async def _close(self) -> None:
        self._closed = True
        process = self._process
        await self._forget()
        try:
            if process is not None:
                await process.kill()
        except (NotFound, SandboxExpired, SandboxLost):
            pass  # it went with its sandbox


def _has_run(begun: ShellRun) -> bool:
    """Whether a shell had done something before this command, or had itself taken the place of one that had."""
    return begun.is_new or not begun.greeting


def _revive(
    endpoint: Endpoint, sandbox_id: str, bytes_max: int, options: ShellOptions, point: ShellPoint | None
) -> AsyncShell:
    return AsyncShell(shared_transport(endpoint), sandbox_id, bytes_max, options, point)
