"""Classes and functions of a user's own, named as `module:name`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from barchan.errors import InvalidSpec


def load_class(name: str, what: str) -> type:
    """The class that `module:Class` names.

    Args:
        what: What it is to be, for the message.

    Raises:
        InvalidSpec: There is none.
    """
    found = _load(name, what, "module:Class")
    if not isinstance(found, type):
        raise InvalidSpec(f"{what} {name}: it is no class")
    return found


def load_function(name: str, what: str) -> Callable[..., Any]:
    """The function, or whatever else can be called, that `module:function` names.

    Args:
        what: What it is to be, for the message.

    Raises:
        InvalidSpec: There is none.
    """
    found = _load(name, what, "module:function")
    if not callable(found):
        raise InvalidSpec(f"{what} {name}: it can't be called")
    return found


def _load(name: str, what: str, form: str) -> object:
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise InvalidSpec(f"no {what} {name!r}: give one of ours, or {form}")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever a module does when it is imported
        raise InvalidSpec(f"{what} {name}: {type(error).__name__}: {error}") from error
