"""Cutting a sandbox's layer off, where the kernel or the guest does not play along."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from barchan.backends.container import cgroup, cut
from barchan.errors import BackendError, CapacityError


@pytest.fixture
def guest(tmp_path: Path) -> Path:
    """Stands for a cgroup, whose processes have stopped."""
    (tmp_path / "guest").mkdir()
    (tmp_path / "guest" / "cgroup.freeze").write_text("0")
    (tmp_path / "guest" / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    return tmp_path / "guest"


@pytest.fixture
async def cutter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[cut.Cutter]:
    """On directories of any file system: what lies in `cut` is removed as a directory."""
    monkeypatch.setattr(cut, "remove_snapshot", lambda directory, name: os.rmdir(name, dir_fd=directory))
    (tmp_path / "upper" / "sb").mkdir(parents=True)
    (tmp_path / "cut").mkdir()
    upper, cuts = (os.open(tmp_path / name, os.O_RDONLY) for name in ("upper", "cut"))
    cutter = cut.Cutter(upper, cuts, Path("/bin/false"))
    yield cutter
    await cutter.close()


class At(cgroup.Counters):
    """Counters whose files lie in a directory of the test's own."""

    def __init__(self, group: Path) -> None:
        super().__init__("node", "sb", "v2")
        self._group = str(group)

    @property
    def guest(self) -> str:
        return self._group


async def pack(cutter: cut.Cutter, guest: Path, target: Path, sandbox_id: str = "sb") -> None:
    await cutter.pack(sandbox_id, At(guest), asyncio.Lock(), target, 1 << 20)


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, CapacityError), (errno.EDQUOT, CapacityError), (errno.EIO, BackendError)]
)
async def test_a_failed_snapshot_lets_the_guest_go_on(
    cutter: cut.Cutter,
    guest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[Exception],
) -> None:
    """A full pool is a matter of capacity, anything else the platform's failure; the guest was stopped, and is not."""
    seen: list[str] = []

    def fail(source: int, directory: int, name: str) -> None:
        seen.append((guest / "cgroup.freeze").read_text()[:1])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cut, "make_snapshot", fail)
    with pytest.raises(error):
        await pack(cutter, guest, tmp_path / "image")
    assert seen == ["1"]
    assert (guest / "cgroup.freeze").read_text() == "0"


@pytest.mark.parametrize("dirty", [0, cut.FLUSH_BYTES - 1, cut.FLUSH_BYTES])
async def test_much_unwritten_data_is_written_before_the_guest_is_stopped(
    cutter: cut.Cutter, guest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dirty: int
) -> None:
    """By a first snapshot, which is dropped; the cut itself is always made of a guest that stands still."""
    (guest / "memory.stat").write_text(f"anon 5\nfile_dirty {dirty}\n")
    seen: list[str] = []

    def make(source: int, directory: int, name: str) -> None:
        seen.append((guest / "cgroup.freeze").read_text()[:1])
        os.mkdir(name, dir_fd=directory)

    monkeypatch.setattr(cut, "make_snapshot", make)
    await cutter.cut("sb", At(guest), asyncio.Lock(), "kept")
    assert seen == (["0", "1"] if dirty == cut.FLUSH_BYTES else ["1"])
    assert os.listdir(tmp_path / "cut") == ["kept"]
    assert (guest / "cgroup.freeze").read_text() == "0"
    await cutter.remove("kept")
    await cutter.remove("kept")
    assert os.listdir(tmp_path / "cut") == []


async def test_a_guest_that_was_stopped_before_stays_so(
    cutter: cut.Cutter, guest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stopped it lets it go on."""
    (guest / "cgroup.freeze").write_text("1\n")
    monkeypatch.setattr(cut, "make_snapshot", lambda source, directory, name: os.mkdir(name, dir_fd=directory))
    await cutter.cut("sb", At(guest), asyncio.Lock(), "kept")
    assert (guest / "cgroup.freeze").read_text().startswith("1")


async def test_a_guest_that_does_not_stop_is_let_go(
    cutter: cut.Cutter, guest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a bounded wait, as a matter of capacity that can be asked for again."""
    (guest / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    monkeypatch.setattr(cgroup, "FREEZE_S", 0.05)
    with pytest.raises(CapacityError) as caught:
        await pack(cutter, guest, tmp_path / "image")
    assert caught.value.details == {"retry_after_ms": 1000}
    assert (guest / "cgroup.freeze").read_text() == "0"


async def test_a_sandbox_that_is_gone_is_told(cutter: cut.Cutter, guest: Path, tmp_path: Path) -> None:
    """Its layer, or its cgroup, is not there any more."""
    with pytest.raises(BackendError, match="gone"):
        await pack(cutter, guest, tmp_path / "image", "gone")
    with pytest.raises(BackendError, match="freeze"):
        await pack(cutter, tmp_path / "no-group", tmp_path / "image")


async def test_closing_ends_what_is_being_packed(
    cutter: cut.Cutter, guest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packer is killed, and the cut removed with the descriptor that the close would take away."""
    monkeypatch.setattr(
        cut, "make_snapshot", lambda source, directory, name: os.makedirs(tmp_path / "cut" / name / "u")
    )
    removed: list[str] = []
    monkeypatch.setattr(
        cut, "remove_snapshot", lambda directory, name: removed.append(os.readlink(f"/proc/self/fd/{directory}"))
    )
    (tmp_path / "packer").write_text("#!/bin/sh\necho $$ > " + str(tmp_path / "pid") + "; exec sleep 100\n")
    (tmp_path / "packer").chmod(0o755)
    other = cut.Cutter(*(os.open(tmp_path / name, os.O_RDONLY) for name in ("upper", "cut")), tmp_path / "packer")
    task = asyncio.create_task(pack(other, guest, tmp_path / "image"))
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        await asyncio.sleep(0.01)
    await other.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert removed == [str(tmp_path / "cut")]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
