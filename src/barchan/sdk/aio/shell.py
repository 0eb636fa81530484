"""A shell that stays: directory, variables and functions are kept from one command to the next.

One background shell reads commands from its stdin. Each run is sent as one line that evaluates the command with an
empty stdin and then writes a fresh random mark to the two original output streams, with the exit code. The mark is no
evidence: a command that reads the memory of its own shell can forge its own exit code, as it could simply exit with
another one. It is fresh, so that what an earlier command left running can't end a later one.
"""

import asyncio
import re
import secrets
import shlex
import time
from collections.abc import Callable
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
)
from barchan.model.sandbox import DEFAULT_EXEC_TIMEOUT_S, OutputChunk
from barchan.sdk.aio.clock import AsyncSandboxClock
from barchan.sdk.aio.process import AsyncProcess, start_process
from barchan.sdk.background import BACKGROUND
from barchan.sdk.cancel import clean_up, forget_error
from barchan.sdk.checks import check_seconds
from barchan.sdk.endpoint import Endpoint
from barchan.sdk.headtail import HeadTail
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


class ShellPoint(Struct, frozen=True, kw_only=True):
    """Where a shell stands between two commands, for whoever goes on with it, here or in another process.

    `stdout` and `stderr` are offsets of its process's output: what lies before was told.
    """

    process_id: str
    stdout: int
    stderr: int
    last_code: int


class MarkedStream:
    """One output stream up to a mark and the number behind it. What follows belongs to the next command."""

    def __init__(self, mark: bytes, kept: HeadTail, bytes_max: int) -> None:
        self.kept = kept
        self.after = HeadTail(bytes_max)
        self.after_bytes = 0
        self.code: int | None = None
        self._pattern = re.compile(re.escape(mark) + rb" ([0-9]{1,3})\n")
        self._hold_bytes = len(mark) + 4
        self._held = b""  # what may be the beginning of the mark

    def feed(self, data: bytes) -> None:
        if self.code is not None:
            self._feed_after(data)
            return
        held = self._held + data
        if found := self._pattern.search(held):
            self.code = int(found[1]) & 0xFF
            self.kept.feed(held[: found.start()])
            self._held = b""
            self._feed_after(held[found.end() :])
        else:
            keep = min(len(held), self._hold_bytes)
            self.kept.feed(held[: len(held) - keep])
            self._held = held[len(held) - keep :]

    def _feed_after(self, data: bytes) -> None:
        self.after.feed(data)
        self.after_bytes += len(data)

    def content(self) -> tuple[bytes, bool]:
        """What came before the mark, and whether bytes were left out."""
        self.kept.feed(self._held)
        self._held = b""
        return self.kept.content()


class _Run:
    """One command, or the time before it: the output, and the event that something happened."""

    def __init__(self, bytes_max: int, before: "_Run | None" = None) -> None:
        self.mark = secrets.token_hex(16)
        self.streams: dict[str, MarkedStream] = {
            name: MarkedStream(
                self.mark.encode(), before.streams[name].after if before is not None else HeadTail(bytes_max), bytes_max
            )
            for name in ("stdout", "stderr")
        }
        self.time: Callable[[], float] = time.monotonic
        self.last_output_at = 0.0
        self.changed = asyncio.Event()

    def feed(self, chunk: OutputChunk) -> None:
        self.streams[chunk.stream].feed(chunk.data)
        self.last_output_at = self.time()
        self.changed.set()

    @property
    def exit_code(self) -> int | None:
        """The code, once both streams have come to the mark."""
        return self.streams["stdout"].code if self.streams["stderr"].code is not None else None


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
        self._run = _Run(bytes_max)
        self._is_taken_over = point is not None
        self._read_to = {"stdout": 0, "stderr": 0}
        self._last_code = 0
        self._greeting = b""  # what the shell has yet to say first, b"" once it did
        self._said = b""  # on its stderr, before the greeting
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (self._transport.endpoint, self._sandbox_id, self._bytes_max, self._options, self.point)

    async def open(self) -> None:
        if self.point is None:
            await BACKGROUND.call(self._start())

    async def run(
        self, command: str, *, timeout_s: float = DEFAULT_EXEC_TIMEOUT_S, idle_timeout_s: float | None = None
    ) -> ShellResult:
        """Run a command in the shell. Its stdin is empty; what background jobs wrote since the last run comes with it.

        A time-out and a cancelled await kill every process below the shell, also earlier background jobs; the shell and
        what it knows live on, unless it is the shell itself that does not come back in 2 s.

        Args:
            timeout_s: Of the sandbox's own time: neither a wake before it nor a sleep that somebody asks for meanwhile
                counts. By itself the sandbox does not sleep before it is done.
            idle_timeout_s: Time out when it writes nothing for this long, of the same time.
        """
        check_seconds(timeout_s=timeout_s, idle_timeout_s=idle_timeout_s)
        if "\0" in command:
            raise InvalidSpec("a shell command holds no NUL character")
        return await BACKGROUND.call(self._run_command(command, timeout_s, idle_timeout_s))

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
        self._process, self._last_code, self._run = process, 0, _Run(self._bytes_max)
        greeting = secrets.token_hex(16)
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
        if not (await process.info()).running:
            return await self._start(), True
        self._process, self._last_code, self._run = process, point.last_code, _Run(self._bytes_max)
        self._follow(process, point.stdout, point.stderr)
        return process, False

    def _follow(self, process: AsyncProcess, stdout: int, stderr: int) -> None:
        self._read_to = {"stdout": stdout, "stderr": stderr}
        self._reader = asyncio.create_task(self._read(process, stdout, stderr))
        self._reader.add_done_callback(forget_error)

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

    async def _run_command(self, command: str, timeout_s: float, idle_timeout_s: float | None) -> ShellResult:
        async with self._turn:
            process, is_new = await self._living_shell()
            async with AsyncSandboxClock(self._transport, self._sandbox_id) as clock:
                return await self._run_awake(process, is_new, clock, command, timeout_s, idle_timeout_s)

    async def _run_awake(
        self,
        process: AsyncProcess,
        is_new: bool,
        clock: AsyncSandboxClock,
        command: str,
        timeout_s: float,
        idle_timeout_s: float | None,
    ) -> ShellResult:
        run = self._run
        run.time, run.last_output_at = clock.time, clock.time()
        line = _line(command, run.mark, self._last_code)
        timed_out = False
        try:
            async with clock.timeout(timeout_s):
                await process.write_stdin(line, timeout_s=timeout_s + CALL_TIMEOUT_S)
                timed_out = not await self._wait(run, clock, idle_timeout_s)
        except TimeoutError:
            timed_out = True
        except asyncio.CancelledError as cancelled:
            await clean_up(cancelled, self._abandon(run, clock), "the command may still run")
            raise
        except CallerError as error:
            await self._explain(process, error)
            raise
        except BarchanError:
            await self._forget()
            raise
        if timed_out:
            await self._interrupt(run, clock)
        return await self._result(run, timed_out, is_new)

    async def _living_shell(self) -> tuple[AsyncProcess, bool]:
        """The shell for the next command, and whether it is another than the last command had."""
        if self._closed:
            raise LocalProtocolError("the shell is closed")
        if self._is_taken_over and self.point is not None:
            self._is_taken_over = False
            return await self._take_over(self.point)
        if self._process is not None and self._reader is not None and not self._reader.done():
            return self._process, False
        is_new = self._process is not None
        await self._forget()
        return await self._start(), is_new

    async def _wait(self, run: _Run, clock: AsyncSandboxClock, idle_timeout_s: float | None = None) -> bool:
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

    async def _interrupt(self, run: _Run, clock: AsyncSandboxClock) -> None:
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

    async def _abandon(self, run: _Run, clock: AsyncSandboxClock) -> None:
        await self._interrupt(run, clock)
        await self._result(run, True, False)

    async def _result(self, run: _Run, timed_out: bool, is_new: bool) -> ShellResult:
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
        self._run, self._last_code = _Run(self._bytes_max, run), exit_code
        self.point = None if has_ended else self._point(run)
        (out, out_cut), (err, err_cut) = (run.streams[name].content() for name in ("stdout", "stderr"))
        return ShellResult(
            exit_code=exit_code,
            stdout=out,
            stderr=err,
            timed_out=timed_out,
            truncated=out_cut or err_cut,
            restarted=has_ended or is_new,
        )

    def _point(self, run: _Run) -> ShellPoint | None:
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

    async def _close(self) -> None:
        self._closed = True
        process = self._process
        await self._forget()
        try:
            if process is not None:
                await process.kill()
        except (NotFound, SandboxExpired, SandboxLost):
            pass  # it went with its sandbox


def _revive(
    endpoint: Endpoint, sandbox_id: str, bytes_max: int, options: ShellOptions, point: ShellPoint | None
) -> AsyncShell:
    return AsyncShell(shared_transport(endpoint), sandbox_id, bytes_max, options, point)


def _line(command: str, mark: str, last_code: int) -> str:
    """What the shell is sent: read as one line, so that nothing of it is left in the pipe while the command runs."""
    script = f"(exit {last_code})\n{command}" if last_code else command
    told = "command printf '%s %d\\n'"
    return (
        f"eval {shlex.quote(script)} </dev/null 8>&- 9>&-; "
        f"{{ {told} {mark} $? >&8; {told} {mark} 0 >&9; }} 2>/dev/null\n"
    )
