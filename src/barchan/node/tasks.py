"""The tasks of a node: kept until they end, cancelled together, their failures said to the node's log."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from barchan.errors import BarchanError, CallerError

_log = logging.getLogger(__name__)


class Tasks:
    """Tasks that nobody waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    async def cancel(self) -> None:
        """Cancel all of them, and wait for their ends; what they give to others to tidy up then is done, too."""
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reap(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or isinstance(error, CallerError):
            return  # an error of a caller is told to that one, and no fault of the node
        if isinstance(error, BarchanError):  # it says what happened, on one line whatever its words are
            _log.warning(
                "%s: %s: %s",
                getattr(task.get_coro(), "__qualname__", ""),
                type(error).__name__,
                " ".join(str(error).split()),
            )
            return
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a task of the node failed", "exception": error, "task": task}
        )
