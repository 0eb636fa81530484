"""A program on a terminal, with the screen it draws kept here: what an agent that types and looks needs."""

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

import pyte

from barchan.errors import CallerError, LocalProtocolError, NotFound, ReadTimeout, SandboxExpired, SandboxLost
from barchan.sdk.aio.clock import AsyncSandboxClock
from barchan.sdk.aio.process import AsyncProcess, start_process
from barchan.sdk.background import BACKGROUND
from barchan.sdk.cancel import forget_error
from barchan.sdk.checks import check_seconds, checked_env
from barchan.sdk.options import Command, ShellOptions, StartOptions, start_request
from barchan.sdk.transport import Transport

_SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash; exec sh")
_TERM = "linux"  # what the screen here understands
_FEED_BYTES = 16 << 10
_ANSWER_TIMEOUT_S = 2.0
# What the parser raises on sequences that it half knows; real programs send such.
_UNREADABLE = (TypeError, ValueError, LookupError, NameError, AttributeError)


class _AnsweringScreen(pyte.Screen):
    """Keeps what a terminal would answer to the program's questions."""

    def __init__(self, cols: int, rows: int) -> None:
        self.answers: list[str] = []
        super().__init__(cols, rows)

    def write_process_input(self, data: str) -> None:
        self.answers.append(data)


class Screen:
    """The screen as drawn so far. Safe from several threads: drawing is slow, and happens off the event loop."""

    def __init__(self, rows: int, cols: int) -> None:
        self._guard = threading.Lock()
        self._screen = _AnsweringScreen(cols, rows)
        self._stream = pyte.ByteStream(self._screen)

    def feed(self, data: bytes) -> bytes:
        """Draw; returns what a terminal answers (where the cursor is, what kind of terminal this is)."""
        with self._guard:
            try:
                self._stream.feed(data)
            except _UNREADABLE:
                self._stream = pyte.ByteStream(self._screen)  # the parser can't go on after an error; the screen can
            answers, self._screen.answers = self._screen.answers, []
            return "".join(answers).encode()

    def resize(self, rows: int, cols: int) -> None:
        with self._guard:
            self._screen.resize(rows, cols)

    def rows(self) -> list[str]:
        """One string per row, without trailing blanks."""
        with self._guard:
            buffer, rows, cols = self._screen.buffer, self._screen.lines, self._screen.columns
            return ["".join(buffer[y][x].data for x in range(cols)).rstrip() for y in range(rows)]


class AsyncTerminal:
    """Used from any loop; it lives on the SDK's own, so that the program is never held up."""

    def __init__(self, transport: Transport, sandbox_id: str, rows: int, cols: int) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._size = rows, cols
        self._screen = Screen(rows, cols)
        self._time: Callable[[], float] = time.monotonic
        self._last_output_at = 0.0
        self._process: AsyncProcess | None = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self, command: Command | None, options: ShellOptions) -> None:
        rows, cols = self._size
        given: dict[str, Any] = {**options, "env": {"TERM": _TERM, **checked_env(options.get("env", {}))}}
        request = start_request(
            command if command is not None else _SHELL,
            cast("StartOptions", {**given, "pty": True, "rows": rows, "cols": cols}),
        )
        await BACKGROUND.call(self._open(await start_process(self._transport, self._sandbox_id, request)))

    async def _open(self, process: AsyncProcess) -> None:
        self._process = process
        self._last_output_at = self._time()
        self._reader = asyncio.create_task(self._read(process))
        self._reader.add_done_callback(forget_error)

    async def _read(self, process: AsyncProcess) -> None:
        async for chunk in process.chunks(0, 0, follow=True, quiet_timeout_s=None, is_idle=True):
            for start in range(0, len(chunk.data) if chunk.stream == "stdout" else 0, _FEED_BYTES):
                answer = await asyncio.to_thread(self._screen.feed, chunk.data[start : start + _FEED_BYTES])
                self._last_output_at = self._time()
                try:
                    if answer and process.exit_code is None:
                        await process.write_stdin(answer, timeout_s=_ANSWER_TIMEOUT_S)
                except (CallerError, ReadTimeout):
                    pass  # it asked, but ended or doesn't read: the answer is for nobody

    @property
    def process(self) -> AsyncProcess:
        """The program that runs on it."""
        if self._process is None:
            raise LocalProtocolError("the terminal is not open")
        return self._process

    async def send(self, text: str | bytes) -> None:
        """Type; control keys are their characters, such as `"\\x03"` for Ctrl-C."""
        await self.process.write_stdin(text)

    async def screen(self, *, settle_s: float = 0.1, timeout_s: float = 5.0) -> list[str]:
        """The rows of the screen, once nothing was drawn for `settle_s`, or as they are after `timeout_s`.

        Both of the sandbox's own time; one that sleeps is woken first.
        """
        check_seconds(can_be_zero=True, settle_s=settle_s, timeout_s=timeout_s)
        return await BACKGROUND.call(self._settled(settle_s, timeout_s))

    async def _settled(self, settle_s: float, timeout_s: float) -> list[str]:
        if self._reader is None or not self._reader.done():
            async with AsyncSandboxClock(self._transport, self._sandbox_id) as clock:
                self._time = clock.time
                quiet_from = clock.time()  # what was typed just now has its time to show
                deadline = quiet_from + timeout_s
                while (now := clock.time()) < deadline:
                    left_s = max(quiet_from, self._last_output_at) + settle_s - now
                    if left_s <= 0 or (self._reader is not None and self._reader.done()):
                        break
                    await asyncio.sleep(min(left_s, deadline - now))
        if self._reader is not None and self._reader.done():
            await self._reader  # raises what ended the reading, if it was an error
        return self._screen.rows()

    async def resize(self, rows: int, cols: int) -> None:
        await self.process.resize(rows, cols)
        self._screen.resize(rows, cols)

    async def close(self) -> None:
        """End the program and what runs below it."""
        await BACKGROUND.call(self._close())

    async def _close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        try:
            await self.process.kill()
        except (NotFound, SandboxExpired, SandboxLost):
            pass  # it went with its sandbox

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
