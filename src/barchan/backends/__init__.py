"""How isolation is done: one folder per backend, found by name."""

from functools import cache
from importlib import import_module, metadata
from typing import cast

from barchan.backends.base import Backend, Host
from barchan.errors import InvalidSpec

GROUP = "barchan.backends"  # of entry points, by which installed packages add theirs
BACKENDS = {
    "container": "barchan.backends.container.backend:ContainerBackend",
    "function": "barchan.backends.function.backend:FunctionBackend",
    "gvisor": "barchan.backends.gvisor.backend:GvisorBackend",
    "microvm": "barchan.backends.microvm.backend:MicrovmBackend",
    "vm": "barchan.backends.vm.backend:VmBackend",
}


@cache
def added() -> dict[str, metadata.EntryPoint]:
    """Those of other packages. None of them takes the name of one of ours."""
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP) if entry.name not in BACKENDS}


def names() -> tuple[str, ...]:
    """Of all backends that this installation has, whether or not this host can run them."""
    return (*BACKENDS, *added())


def load(name: str, host: Host) -> Backend:
    """Import a backend on demand.

    Raises:
        InvalidSpec: There is no such backend; the message lists those there are.
    """
    if name in BACKENDS:
        module, _, attribute = BACKENDS[name].partition(":")
        made = getattr(import_module(module), attribute)(host)
    elif name in added():
        made = added()[name].load()(host)
    else:
        raise InvalidSpec(f"no backend {name!r}; there are: {', '.join(names())}")
    return cast(Backend, made)
