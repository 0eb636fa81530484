"""How isolation is done: one folder per backend, found by name."""

from importlib import import_module
from pathlib import Path
from typing import cast

from barchan.backends.base import Backend
from barchan.backends.container.lazy import ReaderSettings
from barchan.errors import InvalidSpec
from barchan.image.store import ImageStore

BACKENDS = {"container": "barchan.backends.container.backend:ContainerBackend"}


def load(name: str, state_dir: Path, images: ImageStore, weaken: tuple[str, ...], reader: ReaderSettings) -> Backend:
    """Import a backend on demand. `weaken`: protections to switch off, for the tests that show they matter.

    Raises:
        InvalidSpec: There is no such backend; the message lists those there are.
    """
    target = BACKENDS.get(name)
    if target is None:
        raise InvalidSpec(f"no backend {name!r}; there are: {', '.join(BACKENDS)}")
    module, _, attribute = target.partition(":")
    return cast(Backend, getattr(import_module(module), attribute)(state_dir, images, weaken, reader))
