"""A live rollout's state as bytes: kept beside its log for whoever goes on with it, and read back as values only."""

import io
import os
import pickle
from collections import Counter, defaultdict
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from barchan.errors import BackendError, BlobCorrupt
from barchan.rollout.limits import Meter
from barchan.rollout.state import AttemptState
from barchan.trajectory.format import FOLDER

SUFFIX = ".state"


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
    """Makes values of ours and nothing else: a file in a run's folder must not be able to run a program."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module.startswith(("barchan.rollout.", "barchan.model.", "barchan.sdk.aio.shell")):
            found = super().find_class(module, name)
            if isinstance(found, type) and (issubclass(found, Struct) or is_dataclass(found) or found is Meter):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no value of a rollout's state")


def state_path(run_folder: Path, rollout_id: str) -> Path:
    return run_folder / FOLDER / f"{rollout_id}{SUFFIX}"


def keep(run_folder: Path, rollout_id: str, data: bytes) -> None:
    """Replace what was kept, in one step.

    Raises:
        BackendError: It can't be written.
    """
    path = state_path(run_folder, rollout_id)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.rename(path)
    except OSError as error:
        raise BackendError(f"{path} can't be written: {error.strerror}") from error


def kept(run_folder: Path, rollout_id: str) -> bytes | None:
    """What was kept last; None: nothing."""
    path = state_path(run_folder, rollout_id)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BackendError(f"{path} can't be read: {error.strerror}") from error


def drop(run_folder: Path, rollout_id: str) -> None:
    state_path(run_folder, rollout_id).unlink(missing_ok=True)
