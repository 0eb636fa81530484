"""Classes of a user's own, named as `module:Class`."""

from importlib import import_module

from barchan.errors import InvalidSpec


def load_class(name: str, what: str) -> type:
    """The class that `module:Class` names.

    Args:
        what: What it is to be, for the message.

    Raises:
        InvalidSpec: There is none.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise InvalidSpec(f"no {what} {name!r}: give one of ours, or module:Class")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidSpec(f"{what} {name}: {error}") from error
    if not isinstance(found, type):
        raise InvalidSpec(f"{what} {name}: {attribute} is no class")
    return found
