"""Which acceleration guests have: what a trial boot gave, remembered for as long as it would give the same."""

import asyncio
from pathlib import Path

import pytest

from barchan.backends.microvm import acceleration
from barchan.backends.microvm.acceleration import FILE, choose
from barchan.errors import BootFailed


class Trial:
    """A boot that fails or not, and how often it was tried."""

    def __init__(self, *, works: bool) -> None:
        self.works = works
        self.count = 0

    async def boot(self) -> str:
        self.count += 1
        return "" if self.works else "no answer"


@pytest.fixture(autouse=True)
def _device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has the device, which says nothing."""
    (tmp_path / "kvm").touch()
    monkeypatch.setattr(acceleration, "HOST_DEVICE", str(tmp_path / "kvm"))


@pytest.mark.parametrize(("works", "name"), [(True, "kvm"), (False, "tcg")])
def test_a_trial_decides_and_is_not_repeated(tmp_path: Path, works: bool, name: str) -> None:
    """Whether a guest answers, not whether there is a device; the same host is not asked twice."""
    trial = Trial(works=works)
    found = [asyncio.run(choose(tmp_path, "host 1", trial.boot)).name for _ in range(2)]
    assert (found, trial.count) == ([name, name], 1)


def test_another_host_kernel_or_qemu_is_tried_anew(tmp_path: Path) -> None:
    """What was found holds for what was tried."""
    asyncio.run(choose(tmp_path, "host 1", Trial(works=False).boot))
    assert asyncio.run(choose(tmp_path, "host 2", Trial(works=True).boot)).name == "kvm"


def test_what_kept_a_trial_from_being_made_is_not_kept(tmp_path: Path) -> None:
    """A full disk, or no container, says nothing of KVM: the next node tries."""

    async def fails() -> str:
        raise BootFailed("no room")

    assert asyncio.run(choose(tmp_path, "host 1", fails)).name == "tcg"
    assert asyncio.run(choose(tmp_path, "host 1", Trial(works=True).boot)).name == "kvm"


def test_a_note_that_can_not_be_read_is_as_none(tmp_path: Path) -> None:
    """Another release's, or half a one."""
    (tmp_path / FILE).write_bytes(b"{")
    assert asyncio.run(choose(tmp_path, "host 1", Trial(works=True).boot)).name == "kvm"


def test_without_the_device_nothing_is_booted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to try."""
    monkeypatch.setattr(acceleration, "HOST_DEVICE", str(tmp_path / "none"))
    trial = Trial(works=True)
    assert (asyncio.run(choose(tmp_path, "host 1", trial.boot)).name, trial.count) == ("tcg", 0)
