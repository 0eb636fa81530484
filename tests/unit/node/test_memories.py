"""What a backend that stores no memory says of it."""

from types import SimpleNamespace
from typing import cast

import pytest

from barchan.backends.base import Backend
from barchan.backends.container.backend import ContainerBackend
from barchan.backends.function.backend import FunctionBackend
from barchan.backends.gvisor.backend import GvisorBackend
from barchan.errors import InvalidSpec, RequirementMissing
from barchan.node.memories import check_backend


def of(kind: type) -> Backend:
    return cast(Backend, SimpleNamespace(capabilities=kind.capabilities))  # type: ignore[attr-defined]


def test_who_could_on_another_host_is_told_apart_from_who_never_can() -> None:
    """Only for the former is there something to be mended on the host."""
    check_backend(of(GvisorBackend), "gvisor")
    with pytest.raises(RequirementMissing, match="barchan doctor"):
        check_backend(of(ContainerBackend), "container")  # as it is before it has found out
    with pytest.raises(InvalidSpec, match="the function backend never stores"):
        check_backend(of(FunctionBackend), "function")
