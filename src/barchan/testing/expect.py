"""What a check expects, said so that a failure explains itself without any test framework."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

_SHOWN = 400
_LOOK_S = 0.05


class NotConforming(AssertionError):
    """Something is not as it was promised; the message says what was expected, and what was seen."""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def equal(actual: object, expected: object, what: str = "") -> None:
    """Raise unless both are equal."""
    if actual != expected:
        raise NotConforming(f"{what + ': ' if what else ''}expected {_shown(expected)}, got {_shown(actual)}")


def holds(condition: object, what: str) -> None:
    """Raise unless it is true; `what` says what should be."""
    if not condition:
        raise NotConforming(f"it should be that {what}")


def present(value: T | None, what: str) -> T:
    """The value, which must be there."""
    if value is None:
        raise NotConforming(f"there is no {what}")
    return value


async def raises(kind: type[E] | tuple[type[E], ...], call: Awaitable[object]) -> E:
    """Await a call that must be refused so; returns the error. Another error is passed on."""
    names = kind.__name__ if isinstance(kind, type) else " or ".join(each.__name__ for each in kind)
    try:
        value = await call
    except kind as error:
        return error
    raise NotConforming(f"expected {names}, got {_shown(value)}")


async def until(probe: Callable[[], Awaitable[object]], what: str, within_s: float) -> None:
    """Ask until the answer is true."""
    deadline = time.monotonic() + within_s
    while not await probe():
        if time.monotonic() > deadline:
            raise NotConforming(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(_LOOK_S)
