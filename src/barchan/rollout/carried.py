"""A live rollout's state as bytes, for a pickle of it: read back as values only."""

import io
import pickle
from collections import Counter, defaultdict
from dataclasses import fields, is_dataclass
from typing import Any

from msgspec import Struct

from barchan.errors import BlobCorrupt
from barchan.rollout.limits import Meter
from barchan.rollout.state import AttemptState


def _rebuild(kind: type[Struct], fields: dict[str, Any]) -> Struct:
    """What pickles of Structs name to make one; `kind` was looked up here, too."""
    return kind(**fields)


_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "Counter"): Counter,
    ("collections", "defaultdict"): defaultdict,
    ("builtins", "float"): float,
    ("msgspec._utils", "rebuild"): _rebuild,
}


def dump(state: AttemptState) -> bytes:
    return pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)


def load(data: bytes) -> AttemptState:
    """The state that `dump` was given.

    Raises:
        BlobCorrupt: It is none, or of another release.
    """
    try:
        state = _Values(io.BytesIO(data)).load()
    except Exception as error:  # whatever a broken or foreign pickle makes of the reader
        raise BlobCorrupt(f"a rollout's state can't be read: {error}") from error
    if not isinstance(state, AttemptState):
        raise BlobCorrupt(f"a rollout's state is a {type(state).__name__}")
    if vars(state).keys() != {field.name for field in fields(AttemptState)}:
        raise BlobCorrupt("a rollout's state was written by another release")
    return state


class _Values(pickle.Unpickler):
    """Makes values of ours and nothing else: bytes of a run must not be able to run a program."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module.startswith(("barchan.rollout.", "barchan.model.", "barchan.sdk.aio.shell")):
            found = super().find_class(module, name)
            if isinstance(found, type) and (issubclass(found, Struct) or is_dataclass(found) or found is Meter):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no value of a rollout's state")
