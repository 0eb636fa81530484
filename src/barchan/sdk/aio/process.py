"""A program in the background: its output from any offset, its input without doubling a byte, its end."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Literal, TypeVar

import msgspec

from barchan.errors import (
    BarchanError,
    ConnectionLost,
    NotFound,
    ReadTimeout,
    RemoteProtocolError,
    SandboxExpired,
    SandboxLost,
)
from barchan.model.sandbox import OutputChunk, ProcessInfo, StartRequest
from barchan.sdk.aio.clock import awake_s, in_its_time
from barchan.sdk.background import BACKGROUND
from barchan.sdk.cancel import CLEANUP_S, clean_up, forget_error
from barchan.sdk.checks import check_seconds, checked_bytes
from barchan.sdk.endpoint import Endpoint
from barchan.sdk.transport import CALL_TIMEOUT_S, RESEND_S, Call, Transport, encode, records, shared_transport
from barchan.wire.api import Empty, ResizeRequest, Signalled, SignalRequest, StdinWritten

T = TypeVar("T")
Stream = Literal["stdout", "stderr"]
Scope = Literal["group", "process", "all", "children"]

START = Call("start", ProcessInfo)
INFO = Call("process_info", ProcessInfo)
OUTPUT = Call("output", OutputChunk)
STDIN = Call("stdin", StdinWritten)
SIGNAL = Call("signal", Signalled)
RESIZE = Call("resize", Empty)

WAIT_TIMEOUT_S = 3600.0
_POLL_S = 30.0
_PROBE_S = 60.0  # a silent stream is asked for again this often: a half-open connection would be silent for ever
_STDIN_BYTES = 1 << 20
_info_decoder = msgspec.json.Decoder(ProcessInfo)


class AsyncProcess:
    """One process of a sandbox, by its id. Cheap to make, picklable, and valid as long as the sandbox lives."""

    def __init__(self, transport: Transport, sandbox_id: str, process_id: str, info: ProcessInfo | None = None) -> None:
        self.sandbox_id = sandbox_id
        self.id = process_id
        self._transport = transport
        self._info = info
        self._stdin_lock = asyncio.Lock()  # used on the background loop only, like the offset
        self._stdin_offset: int | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sandbox_id!r}, {self.id!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (self._transport.endpoint, self.sandbox_id, self.id)

    def _target(self, call: Call[Any], **query: Any) -> str:
        return call.target(query, sandbox_id=self.sandbox_id, process_id=self.id)

    @property
    def exit_code(self) -> int | None:
        """The exit code as far as this handle knows: None before `wait()`, `info()` or `output()` told of the end."""
        return self._info.exit_code if self._info is not None else None

    async def info(self) -> ProcessInfo:
        self._info = await self._transport.value(INFO, self._target(INFO))
        return self._info

    async def wait(self, timeout_s: float | None = WAIT_TIMEOUT_S) -> ProcessInfo:
        """Wait for its end.

        Raises:
            ReadTimeout: It still runs after `timeout_s` of the sandbox's time, which does it no harm.
        """
        check_seconds(can_be_zero=True, timeout_s=timeout_s)
        left_s = timeout_s if timeout_s is not None else math.inf
        while True:
            started, wait_s = time.monotonic(), min(_POLL_S, left_s)
            call = self._transport.value(INFO, self._target(INFO, wait_s=wait_s), timeout_s=math.inf)
            self._info = await in_its_time(self._transport, self.sandbox_id, call, wait_s + CALL_TIMEOUT_S)
            spent_s = min(wait_s, time.monotonic() - started)  # what is more than that it slept, or the way took
            if not self._info.running:
                return self._info
            left_s -= spent_s
            if left_s <= 0:
                raise ReadTimeout(f"process {self.id} still runs after {timeout_s:g} s", process_id=self.id)
            if spent_s < wait_s / 2:
                await asyncio.sleep(0.05)

    async def output(
        self,
        offset: int = 0,
        stderr_offset: int = 0,
        *,
        follow: bool = True,
        quiet_timeout_s: float | None = WAIT_TIMEOUT_S,
    ) -> AsyncGenerator[tuple[Stream, int, bytes], None]:
        """Its output from the given offsets on, as `(stream, offset, data)`, each byte once, over lost connections too.

        A jump in the offsets says that nobody read the bytes before they had to go.

        Args:
            follow: Go on until it has ended and all is read; without, stop at what there is now.
            quiet_timeout_s: `ReadTimeout` when it writes nothing for this long; the sandbox's sleep does not count.
        """
        async for chunk in self.chunks(offset, stderr_offset, follow=follow, quiet_timeout_s=quiet_timeout_s):
            if chunk.stream == "stdout" or chunk.stream == "stderr":
                yield chunk.stream, chunk.offset, chunk.data

    async def chunks(
        self, offset: int, stderr_offset: int, *, follow: bool, quiet_timeout_s: float | None, is_idle: bool = False
    ) -> AsyncGenerator[OutputChunk, None]:
        """As `output`, with the chunk `exit` that tells of the end of the main process; others may still write then.

        Args:
            is_idle: Nobody waits for what it writes: the sandbox may go to sleep while its programs wait for input.
        """
        check_seconds(quiet_timeout_s=quiet_timeout_s)
        reached: dict[str, int] = {"stdout": offset, "stderr": stderr_offset}
        last_at = time.monotonic()
        lost_at: float | None = None
        again: bool | None = None
        has_ended = False
        while True:
            target = self._target(
                OUTPUT,
                stdout=reached["stdout"],
                stderr=reached["stderr"],
                follow=follow,
                again=again,
                idle=is_idle or None,
            )
            response = await self._transport.open(OUTPUT, target)
            quiet_s = _PROBE_S
            if quiet_timeout_s is not None:
                quiet_s = max(0.001, min(_PROBE_S, last_at + quiet_timeout_s - time.monotonic()))
            try:
                async for chunk in records(response, OUTPUT, quiet_s=quiet_s):
                    lost_at = None
                    if chunk.stream == "end":
                        return
                    if chunk.stream == "exit":
                        if has_ended:  # each response tells it again
                            continue
                        has_ended, self._info = True, _exit_info(chunk.data)
                        yield chunk
                    elif (new := _unseen(chunk, reached[chunk.stream])).data:
                        reached[chunk.stream] = new.offset + len(new.data)
                        yield new
                    last_at = time.monotonic()
                if not follow:
                    return
                loss = ConnectionLost(f"the output of process {self.id} ended before the process did", sent=1)
            except ConnectionLost as error:
                loss = error
            except ReadTimeout as error:
                if quiet_timeout_s is not None and time.monotonic() >= last_at + quiet_timeout_s:
                    is_awake_s = await awake_s(self._transport, self.sandbox_id)
                    if is_awake_s >= quiet_timeout_s:
                        raise ReadTimeout(
                            f"process {self.id} wrote nothing for {quiet_timeout_s:g} s", process_id=self.id
                        ) from error
                    last_at = time.monotonic() - is_awake_s  # it slept meanwhile
                again = True
                continue
            finally:
                response.close()
            lost_at = lost_at if lost_at is not None else time.monotonic()
            if time.monotonic() - lost_at > RESEND_S:
                raise loss
            await asyncio.sleep(0.05)

    async def write_stdin(
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
        check_seconds(timeout_s=timeout_s)
        payload = checked_bytes("data", data)
        await BACKGROUND.call(self._write_stdin(payload, eof, timeout_s, offset))

    async def stdin_offset(self) -> int:
        """How many bytes of input it was given, by whomever."""
        return await BACKGROUND.call(self._ask_stdin_offset())

    async def close_stdin(self) -> None:
        await self.write_stdin(b"", eof=True)

    async def _ask_stdin_offset(self) -> int:
        async with self._stdin_lock:
            return await self._known_offset(CALL_TIMEOUT_S)

    async def _known_offset(self, timeout_s: float) -> int:
        if self._stdin_offset is None:
            # Writing nothing tells how far earlier writers, in this process or another, have come.
            self._stdin_offset = (await self._send_stdin(b"", 0, False, timeout_s)).offset
        return self._stdin_offset

    async def _write_stdin(self, data: bytes, eof: bool, timeout_s: float, offset: int | None) -> None:
        async with self._stdin_lock:
            at = await self._known_offset(timeout_s) if offset is None else offset
            self._stdin_offset = None  # unknown again if this is cut short
            end, sent_all = at + len(data), False
            while not sent_all:
                piece = data[len(data) - (end - at) :][:_STDIN_BYTES]
                sent_all = at + len(piece) == end
                try:
                    reply = await self._send_stdin(piece, at, eof and sent_all, timeout_s)
                except ReadTimeout as error:
                    raise ReadTimeout(
                        f"process {self.id} took no more input for {timeout_s:g} s", process_id=self.id
                    ) from error
                if not at + bool(piece) <= reply.offset <= end:
                    raise RemoteProtocolError(f"stdin went from offset {at} to {reply.offset} with {len(piece)} bytes")
                sent_all = sent_all and reply.offset == end
                at = reply.offset
            self._stdin_offset = at

    async def _send_stdin(self, data: bytes, offset: int, eof: bool, timeout_s: float) -> StdinWritten:
        return await self._transport.value(
            STDIN, self._target(STDIN, offset=offset, eof=eof), data, timeout_s=timeout_s
        )

    async def signal(self, signal: str | int = "TERM", *, scope: Scope = "group") -> int:
        """Send a signal, by number or by name without SIG; returns how many processes got it."""
        name = signal.upper() if isinstance(signal, str) else signal
        body = encode(SignalRequest(signal=name, scope=scope))
        return (await self._transport.value(SIGNAL, self._target(SIGNAL), body, resend=False)).signalled

    async def kill(self) -> int:
        """Kill it and whatever it has left behind; returns how many processes that were."""
        body = encode(SignalRequest(signal="KILL", scope="all"))
        return (await self._transport.value(SIGNAL, self._target(SIGNAL), body)).signalled

    async def resize(self, rows: int, cols: int) -> None:
        """Change the size of its pty."""
        await self._transport.value(RESIZE, self._target(RESIZE), encode(ResizeRequest(rows=rows, cols=cols)))

    async def kill_unless(self, call: Coroutine[Any, Any, T]) -> T:
        """Await the call that starts it. If cancelled, its processes are killed before that is seen."""
        task = asyncio.ensure_future(call)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as cancelled:
            await clean_up(cancelled, self._kill_started(task), f"process {self.id} may still run")
            raise

    async def _kill_started(self, task: "asyncio.Task[Any]") -> None:
        """Kill until the call is over: before, the node may not have seen it yet, and would start what was killed.

        Ends when the main process has; what it left behind has its SIGKILL by then.
        """
        delay_s, is_over = 0.01, False
        try:
            while not is_over:
                is_over = task.done()
                try:
                    await self.kill()
                    if is_over:
                        await self.wait(CLEANUP_S)
                except (SandboxExpired, SandboxLost):
                    return
                except BarchanError as error:
                    # Not found: not started yet, or never. Anything else may pass, and counts if it is the last word.
                    if is_over and not isinstance(error, NotFound):
                        raise
                await asyncio.wait({task}, timeout=delay_s)
                delay_s = min(2 * delay_s, 0.5)
        finally:
            task.cancel()
            task.add_done_callback(forget_error)


async def start_process(transport: Transport, sandbox_id: str, request: StartRequest) -> AsyncProcess:
    """Start what the request says; it must have a process id."""
    process = AsyncProcess(transport, sandbox_id, request.process_id or "")
    call = transport.value(START, START.target(sandbox_id=sandbox_id), encode(request))
    process._info = await process.kill_unless(call)
    return process


def _unseen(chunk: OutputChunk, reached: int) -> OutputChunk:
    """The part of a chunk that begins at or after an offset."""
    seen = max(0, reached - chunk.offset)
    return OutputChunk(chunk.stream, chunk.offset + seen, chunk.data[seen:]) if seen else chunk


def _exit_info(data: bytes) -> ProcessInfo:
    try:
        return _info_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"the end of a process can't be read: {error}") from error


def _revive(endpoint: Endpoint, sandbox_id: str, process_id: str) -> AsyncProcess:
    return AsyncProcess(shared_transport(endpoint), sandbox_id, process_id)
