"""What has to be undone when an await is cancelled, done before the cancellation is seen."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from barchan.errors import BarchanError

CLEANUP_S = 10.0


async def clean_up(cause: BaseException, work: Coroutine[Any, Any, None], what: str) -> None:
    """Do the work however often this is cancelled, for at most 10 s.

    Args:
        cause: The error that made it necessary and is about to be raised again; a failure of the work is noted on it.
        what: What may be left behind if the work fails.
    """
    task = asyncio.ensure_future(asyncio.wait_for(work, CLEANUP_S))
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            continue
    if task.cancelled():
        cause.add_note(f"{what}: the event loop ended first")
    elif isinstance(error := task.exception(), BarchanError | TimeoutError):
        cause.add_note(f"{what}: {error!r}")
    elif error is not None:
        raise error


def forget_error(task: "asyncio.Future[Any]") -> None:
    """A done callback for a task whose error counts only if somebody asks for it: asyncio need not log it."""
    if not task.cancelled():
        task.exception()
