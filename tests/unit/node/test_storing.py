"""What storing a sandbox's memory takes of the host."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from barchan.backends.base import Capabilities
from barchan.errors import CapacityError, SandboxExpired
from barchan.model.sandbox import SandboxSpec
from barchan.node import hibernate, memories
from barchan.node.density import awake_mib, pressure
from barchan.node.rest import Rest

STORING_MIB = 64


async def test_it_counts_as_asked_for_and_is_not_begun_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it goes on, and no longer; one for which the host has no memory stays as it is."""
    counted = []

    async def dump(target: Path, *, keep: bool, cut: str | None) -> str:
        counted.append(awake_mib(sandboxes))
        return "stored"

    async def backend(name: str) -> Any:
        return SimpleNamespace(capabilities=Capabilities(storing_mib=STORING_MIB))

    spec = SandboxSpec(template="debian", memory_mib=100)
    live = cast(
        Any,
        SimpleNamespace(sandbox_id="sb_1", spec=spec, phase="paused", rest=Rest(), handle=SimpleNamespace(dump=dump)),
    )
    sandboxes = cast(Any, SimpleNamespace(live={"sb_1": live}, backend=backend))
    assert await memories.dump(sandboxes, live, Path("/memory"), "cut") == cast(Any, "stored")
    live.phase = "ready"
    await memories.dump(sandboxes, live, Path("/memory"), "cut")
    assert counted == [STORING_MIB, 100 + STORING_MIB]
    short = replace(pressure(), memory_available_mib=STORING_MIB - 1)
    monkeypatch.setattr(memories, "pressure", lambda: short)
    with pytest.raises(CapacityError, match="64 MiB more of the host's, and 63 are available"):
        await memories.dump(sandboxes, live, Path("/memory"), "cut")
    assert (len(counted), awake_mib(sandboxes)) == (2, 100)


async def test_one_that_ends_while_its_layers_are_held_is_not_noted_as_on_disk() -> None:
    """What was made of it goes, for nobody would look for it."""
    told: list[str] = []

    async def hold(sandbox_id: str, template: object, *, is_stored: bool = False) -> None:
        told.append("hold" if is_stored else "hold again")
        live.ending = object()

    async def give_up() -> None:
        told.append("give up")

    def get(sandbox_id: str) -> Any:
        raise SandboxExpired("it has ended")

    live = cast(Any, SimpleNamespace(sandbox_id="sb_1", template=object(), ending=None))
    holds = SimpleNamespace(hold=hold, release=lambda _: told.append("release"))
    journal = SimpleNamespace(hibernate=lambda *_: told.append("noted"))
    sandboxes = cast(Any, SimpleNamespace(holds=holds, journal=journal, get=get))
    with pytest.raises(SandboxExpired):
        await hibernate._put_down(
            sandboxes, live, cast(Any, SimpleNamespace(give_up=give_up)), cast(Any, SimpleNamespace(template=object()))
        )
    assert told == ["release", "hold", "release", "hold again", "give up"]
