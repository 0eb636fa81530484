"""The node's tasks: which failures its log hears of."""

import asyncio
from typing import Any

import pytest

from barchan.errors import BackendError, Conflict
from barchan.node.tasks import Tasks


@pytest.mark.parametrize(
    ("error", "is_said"), [(Conflict("it stays awake"), False), (BackendError("it broke"), True), (KeyError("x"), True)]
)
async def test_errors_of_callers_are_no_faults_of_the_node(error: Exception, is_said: bool) -> None:
    """They are told to whoever asked; a node's log would only bury its own under them."""
    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))

    async def fail() -> None:
        raise error

    task = Tasks().spawn(fail())
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [context["exception"] for context in said] == [error] * is_said
