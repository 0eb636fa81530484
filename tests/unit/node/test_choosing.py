"""What a node's `auto` makes of backends that fail, and of a snapshot whose processes only one can go on with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from barchan import backends
from barchan.backends.base import Backend
from barchan.backends.container.lazy import ReaderSettings
from barchan.errors import BarchanError, BootFailed, InvalidSpec, RequirementMissing
from barchan.image.store import ImageStore
from barchan.image.template import Template
from barchan.model.sandbox import Need, SandboxSpec
from barchan.node.choosing import Choosing

TEMPLATE = cast(Template, SimpleNamespace(name="debian", kind="root", digest="sha256:0", needs=frozenset()))


class _Node:
    """A node of which backends start, or fail to with what is given. See `backends.base.Host`."""

    def __init__(self, state_dir: Path, failing: dict[str, Exception], stored: str | None = None) -> None:
        self.state_dir = state_dir
        self.images = ImageStore(state_dir / "images")
        self.weaken: tuple[str, ...] = ()
        self.reader = ReaderSettings()
        self.tree = SimpleNamespace(backend_of=lambda spec: stored)
        self._failing = failing
        self._started: dict[str, Backend] = {}

    async def backend(self, name: str) -> Backend:
        if name in self._failing:
            raise self._failing[name]
        return self._started.setdefault(name, backends.load(name, self))

    def running_backend(self, name: str) -> Backend | None:
        return self._started.get(name)


def choosing(state_dir: Path, failing: dict[str, Exception], stored: str | None = None) -> Choosing:
    return Choosing(cast(Any, _Node(state_dir, failing, stored)))


class _Broken:
    def load(self) -> object:
        raise ImportError("no module named x")


async def test_a_backend_that_fails_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it fails with, and a stranger's that can't be loaded; all are named with their words."""
    monkeypatch.setattr(backends, "added", lambda: {"strange": _Broken()})
    failing: dict[str, Exception] = {"microvm": BootFailed("no answer"), "gvisor": OSError(28, "No space left")}
    spec, reason = await choosing(tmp_path, failing).settle(SandboxSpec(template="debian", backend="auto"), TEMPLATE)
    assert spec.backend == "container"
    for told in ("strange: it can't be loaded: ImportError", "microvm: it did not start: no answer", "No space left"):
        assert told in reason
    failing |= {"container": BarchanError("gone"), "function": BarchanError("too")}
    with pytest.raises(RequirementMissing, match="container: it did not start: gone"):
        await choosing(tmp_path, failing).settle(SandboxSpec(template="debian", backend="auto"), TEMPLATE)


@pytest.mark.parametrize("needs", [(), ("own_kernel",)])
async def test_what_stored_memory_must_be_what_is_asked_for(tmp_path: Path, needs: tuple[Need, ...]) -> None:
    """Only the one that stored it goes on with it, and never where a stronger isolation was asked for."""
    spec = SandboxSpec(template="snapshot:x", backend="auto", needs=needs, start_within_s=0.001)
    settled = choosing(tmp_path, {}, "container").settle(spec, TEMPLATE)
    if not needs:
        assert (await settled)[0].backend == "container"
        return
    with pytest.raises(InvalidSpec, match=r"stored by the container backend .* it has no own_kernel"):
        await settled
