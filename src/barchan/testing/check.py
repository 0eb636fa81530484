"""A check: one promise of the contract, tried out in a sandbox of a real node."""

import inspect
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from barchan.testing.lab import Lab

Body = Callable[["Lab"], Awaitable[None]]


class Check(Struct, frozen=True):
    """One check.

    Attributes:
        needs: What a backend may lack that this one is about, in the words of `profiles.LACKABLE`. None: no backend may
            fail.
        body: Raises unless the promise holds. Sandboxes made through the lab end with it.
    """

    name: str
    area: str
    needs: str | None
    summary: str
    body: Body


def check(needs: str | None = None) -> Callable[[Body], Check]:
    """Makes a function a check of the area that its module is named after; its docstring says what is promised."""

    def make(body: Body) -> Check:
        summary = inspect.getdoc(body)
        if not summary:
            raise TypeError(f"the check {body.__name__} says nothing of what it promises")
        area = body.__module__.rpartition(".")[2]
        return Check(body.__name__, area, needs, summary, body)

    return make


def checks_of(modules: tuple[ModuleType, ...]) -> tuple[Check, ...]:
    """Every check that these modules define, in the order of their source."""
    return tuple(value for module in modules for value in vars(module).values() if isinstance(value, Check))
