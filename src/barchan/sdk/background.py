"""One event loop on a thread of its own per process: for synchronous calls, and what goes on while user code stalls."""

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from barchan.errors import LocalProtocolError

T = TypeVar("T")

_STOP_S = 5.0


class Background:
    """The loop is started by the first use, again in a forked child, and stopped when the interpreter ends."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._pid = 0
        self._has_stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Loops of parents, kept for ever: collecting one would touch the epoll instance it shares with the parent.
        self._inherited: list[object] = []

    def loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if loop is not None and self._pid == os.getpid():
            return loop
        with self._guard:
            if self._loop is None or self._pid != os.getpid():
                self._start()
            assert self._loop is not None
            return self._loop

    def _start(self) -> None:
        if self._has_stopped:
            raise LocalProtocolError("the interpreter is ending")
        if self._loop is not None:
            self._inherited.append(self._loop)
        loop = _new_loop()
        self._thread = threading.Thread(target=_serve, args=(loop,), name="barchan-sdk", daemon=True)
        self._thread.start()
        self._loop, self._pid = loop, os.getpid()

    def forked(self) -> None:
        """In a forked child: the guard may have been held by a thread that does not exist here."""
        self._guard = threading.Lock()

    def stop(self) -> None:
        """End the loop for good: its tasks are cancelled and their cleanup is waited for, up to 5 s."""
        self._has_stopped = True
        if self._loop is None or self._thread is None or self._pid != os.getpid():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._loop = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to the end and wait. An interrupt cancels it and is raised after its cleanup; a second one at once."""
        loop = self.loop()
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise LocalProtocolError("a synchronous call from the SDK's own thread would wait for itself")
        cancel, outcome = _submit(loop, coroutine)
        try:
            return outcome.result()
        except BaseException as error:
            if outcome.done() and outcome.exception() is error:
                raise
            cancel()
            outcome.exception()
            raise

    def start(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run on this loop without waiting; its end, an error too, is the coroutine's own affair."""
        _submit(self.loop(), coroutine)

    def iterate(self, generator: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The synchronous face of an asynchronous generator; closing one closes the other."""
        try:
            while (item := self.run(_next(generator))) is not None:
                yield item[0]
        finally:
            if not self._has_stopped:  # the loop closes its generators when it ends
                self.run(_close(generator))

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that has to run on this loop, from any loop. Cancelling waits for its cleanup."""
        loop = self.loop()
        if asyncio.get_running_loop() is loop:
            return await coroutine
        cancel, outcome = _submit(loop, coroutine)
        waiter = asyncio.wrap_future(outcome)
        waiter.add_done_callback(lambda done: done.exception())
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            cancel()
            await asyncio.wait({waiter})
            raise


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop where there is one: it takes a third off a synchronous exec."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _submit(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]
) -> tuple[Callable[[], None], "Future[T]"]:
    """Start a task on another thread's loop: how to cancel it, and a future that is done when it has really ended."""
    outcome: Future[T] = Future()
    tasks: list[asyncio.Task[T]] = []

    def start() -> None:
        task = loop.create_task(coroutine)
        tasks.append(task)
        task.add_done_callback(finish)

    def finish(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            outcome.set_exception(LocalProtocolError("the call was cancelled"))
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    def cancel() -> None:
        loop.call_soon_threadsafe(lambda: tasks[0].cancel())

    loop.call_soon_threadsafe(start)
    return cancel, outcome


async def _next(generator: AsyncGenerator[T, None]) -> tuple[T] | None:
    async for item in generator:
        return (item,)
    return None


async def _close(generator: AsyncGenerator[Any, None]) -> None:
    await generator.aclose()


BACKGROUND = Background()
run = BACKGROUND.run
iterate = BACKGROUND.iterate
os.register_at_fork(after_in_child=BACKGROUND.forked)
atexit.register(BACKGROUND.stop)
