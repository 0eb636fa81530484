"""The node's tasks: which failures its log hears of, and how they end."""

import asyncio
import logging
from typing import Any

import pytest

from barchan.errors import BackendError, Conflict, ReadTimeout
from barchan.node.tasks import Tasks


@pytest.mark.parametrize(
    ("error", "line", "is_traced"),
    [
        (Conflict("it stays awake"), "", False),
        (BackendError("it\nbroke"), "BackendError: it broke", False),
        (ReadTimeout("not done in 15 s"), "ReadTimeout: not done in 15 s", False),
        (KeyError("x"), "", True),
    ],
)
async def test_what_a_nodes_log_has_of_a_failure(
    error: Exception, line: str, is_traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of a caller's error, which is told to whoever asked; one line of what says itself what happened."""
    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))

    async def fail() -> None:
        raise error

    task = Tasks().spawn(fail())
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [context["exception"] for context in said] == [error] * is_traced
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [f"test_what_a_nodes_log_has_of_a_failure.<locals>.fail: {line}"] * bool(line)


async def test_what_a_cancelled_task_leaves_to_be_tidied_is_done() -> None:
    """A task that is begun while the others are cancelled comes to its end first."""
    tasks, done = Tasks(), []

    async def tidy() -> None:
        await asyncio.sleep(0.01)
        done.append("tidied")

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tasks.spawn(tidy())

    tasks.spawn(work())
    await asyncio.sleep(0)
    await tasks.cancel()
    assert done == ["tidied"]
