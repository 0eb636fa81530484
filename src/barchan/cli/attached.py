"""A process of a sandbox on this terminal: stdin, output, size and interrupts, until it ends."""

import asyncio
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from barchan.cli.common import print_json
from barchan.errors import BarchanError, CallerError
from barchan.model.sandbox import ProcessInfo
from barchan.sdk.aio.process import AsyncProcess

OUT_OF_TIME = 124
READ_BYTES = 64 << 10
# A program may leave its input alone for as long as it runs.
STDIN_TIMEOUT_S = 7 * 86_400.0
INPUT, OUTPUT, ERRORS = 0, 1, 2
Wishes = asyncio.Queue[Callable[[], Awaitable[object]]]


def terminal_size() -> tuple[int, int]:
    """(rows, columns) of this terminal."""
    size = shutil.get_terminal_size()
    return size.lines, size.columns


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run a command's coroutine; however it was cancelled, its caller sees an interrupt."""
    try:
        return asyncio.run(main)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def follow(process: AsyncProcess, *, use_tty: bool, end_line: bool) -> ProcessInfo:
    """Be the process's terminal until it has ended and its output is written.

    The first interrupt goes to the process, a second one (or SIGTERM) kills it.

    Args:
        end_line: Leave stdout at the start of a line, because something of ours follows.

    Cancellation: The process is killed before it is seen.
    """
    wishes: Wishes = asyncio.Queue()
    last = b"\n"
    try:
        with _signals(process, wishes, use_tty=use_tty), _raw_terminal(use_tty):
            async with asyncio.TaskGroup() as tasks:
                helpers = (tasks.create_task(_forward_input(process)), tasks.create_task(_carry_out(wishes)))
                async with aclosing(process.output(quiet_timeout_s=None)) as output:
                    async for stream, _, data in output:
                        _write_all(OUTPUT if stream == "stdout" else ERRORS, data)
                        last = data[-1:] if stream == "stdout" else last
                info = await process.wait(None)
                for helper in helpers:
                    helper.cancel()
            if end_line and last != b"\n":
                _write_all(OUTPUT, b"\n")
            return info
    except BaseException as error:
        try:
            await process.kill()
        except BarchanError as failed:
            error.add_note(f"and the process may still run: {failed}")
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from error
        raise


async def _carry_out(wishes: Wishes) -> None:
    while True:
        try:
            await (await wishes.get())()
        except CallerError:
            pass  # it has just ended


def exit_code(info: ProcessInfo) -> int:
    """What this program's exit code becomes: the process's own, or 124 when it was killed for its time."""
    if info.timed_out:
        return OUT_OF_TIME
    return info.exit_code if info.exit_code is not None else 0


def print_end(sandbox_id: str, info: ProcessInfo) -> None:
    """The end as JSON on a line of its own, after whatever the process wrote."""
    print_json({"sandbox_id": sandbox_id, "process": info, "exit_code": exit_code(info)})


async def _forward_input(process: AsyncProcess) -> None:
    async with aclosing(_input()) as pieces:
        async for piece in pieces:
            try:
                await process.write_stdin(piece, eof=not piece, timeout_s=STDIN_TIMEOUT_S)
            except CallerError:
                return  # it has closed its input or ended: as with a pipe, the rest is nobody's


async def _input() -> AsyncGenerator[bytes, None]:
    """What comes on stdin, ending with an empty piece. Its descriptor stays blocking: others may share it."""
    piece = b"?"
    while piece:
        await _readable()
        try:
            piece = os.read(INPUT, READ_BYTES)
        except OSError:
            piece = b""  # closed, or its terminal is gone: nothing more will come
        yield piece


async def _readable() -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(INPUT, ready.set)
    except OSError:  # a regular file or /dev/null can't be polled, and never makes anybody wait
        return
    try:
        await ready.wait()
    finally:
        loop.remove_reader(INPUT)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextmanager
def _signals(process: AsyncProcess, wishes: Wishes, *, use_tty: bool) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if interrupted:
            task.cancel()
        else:
            wishes.put_nowait(partial(process.signal, "INT"))
        interrupted = True

    def resize() -> None:
        wishes.put_nowait(partial(process.resize, *terminal_size()))

    handlers: dict[int, Callable[[], object]] = {signal.SIGINT: interrupt, signal.SIGTERM: task.cancel}
    if use_tty:
        handlers[signal.SIGWINCH] = resize
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


@contextmanager
def _raw_terminal(use_tty: bool) -> Iterator[None]:
    """Pass every key on as it is typed; the terminal is put back however this ends."""
    if not use_tty or not os.isatty(INPUT):
        yield
        return
    before = termios.tcgetattr(INPUT)
    try:
        tty.setraw(INPUT)
        yield
    finally:
        termios.tcsetattr(INPUT, termios.TCSADRAIN, before)
        sys.stdout.flush()
