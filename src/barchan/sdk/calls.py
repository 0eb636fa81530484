"""The synchronous face of calls."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Unpack

from barchan.errors import BarchanError
from barchan.model.calls import CallResult, CallsInfo
from barchan.sdk.aio.calls import CONCURRENCY, Callee, CallOptions
from barchan.sdk.background import BACKGROUND, run
from barchan.sdk.checks import check_count

if TYPE_CHECKING:
    from barchan.sdk.aio.client import AsyncClient


class Calling:
    """A part of `Client`."""

    _twin: "AsyncClient"

    def call(self, what: Callee, *args: Any, **options: Unpack[CallOptions]) -> CallResult:
        """Run source, or a function with its arguments, and wait for its end.

        It runs in a fork of an interpreter of the template that has the imports loaded: in files, processes, memory and
        random numbers of its own, of which nothing stays, without network, as a user without rights. The node keeps
        such interpreters, and a call waits for its turn as long as it takes.

        A function goes by its name where it is of the standard library or of a module in `imports`, by cloudpickle
        where that is in `imports`, and else by its source, which then must be all it needs: a function of a module's
        top level, whose imports are inside. Arguments are pickled.

        Args:
            what: Source of a program, or a function.
            kwargs: Further arguments of the function.
            template: The image.
            imports: Modules that are loaded before; the first call with a new list waits for that.
            stdin: What the call reads; text is sent in UTF-8.
            env: Variables beside those of the image.
            timeout_s: From when it begins; then it is killed.
            cpu_s: CPU time of each of its processes; beyond it, the call dies of SIGXCPU.
            memory_mib: With what it writes to files.
            pids_max: Processes and threads at once.
            disk_mib: Of files, which can be written below /tmp.
            max_output_bytes: Of each stream; beyond it the head and the tail are kept, half each.
            pickled: Take the function's value as a pickle. **The code that is called can then run code here**: only for
                what you trust. Else a value is plain data: numbers, text, bytes, lists, tuples, sets, dicts.

        Raises:
            CapacityError: Too many calls wait on the node.
            InvalidSpec: There is no such interpreter, or the function can't be sent: the message says why.
        """
        return run(self._twin.call(what, *args, **options))

    def map(
        self,
        function: Callable[..., Any],
        items: Iterable[Any],
        *,
        concurrency: int = CONCURRENCY,
        **options: Unpack[CallOptions],
    ) -> Iterator[CallResult | BarchanError]:
        """Call a function with each item, so many at once, and give the results in the items' order.

        An item whose call can't be made gives the error in its place. Leaving the iteration early ends what runs.
        """
        check_count(concurrency=concurrency)
        running: deque[Future[CallResult]] = deque()
        try:
            for item in items:
                call = self._twin.call(function, item, **options)
                running.append(asyncio.run_coroutine_threadsafe(call, BACKGROUND.loop()))
                if len(running) >= concurrency:
                    yield _outcome(running.popleft())
            while running:
                yield _outcome(running.popleft())
        finally:
            for future in running:
                future.cancel()

    def call_info(self) -> CallsInfo:
        """The node's calls: what is there, and what became of all so far."""
        return run(self._twin.call_info())


def _outcome(future: "Future[CallResult]") -> CallResult | BarchanError:
    try:
        return future.result()
    except BarchanError as error:
        return error
