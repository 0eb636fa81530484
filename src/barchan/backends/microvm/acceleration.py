"""Whether this host's KVM runs our guests, found by booting one, not by asking whether there is a device."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from barchan.backends.qemu.device import DEVICE, HOST_DEVICE
from barchan.backends.tools import SHARED_STATE_DIR
from barchan.errors import BarchanError

FOLDER, FILE = "microvm", "acceleration.json"
PROBE_S = 4.0  # for a guest to boot and answer, which takes one that is accelerated well under one

Name = Literal["kvm", "tcg"]


class Acceleration(Struct, frozen=True, kw_only=True):
    """How processors of guests are had.

    Attributes:
        key: Of what was tried: another kernel, QEMU or guest kernel is tried anew.
        why: What the trial gave.
    """

    name: Name
    key: str
    why: str

    @property
    def arguments(self) -> tuple[str, str]:
        """QEMU's accelerator and model of processor."""
        return (f"kvm,device={DEVICE}", "host") if self.name == "kvm" else ("tcg,tb-size=16", "max")


KVM = Acceleration(name="kvm", key="", why="")


def key_of(*versions: str) -> str:
    """Of this host as it is booted now, and of what else matters."""
    return " ".join((os.uname().release, Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *versions))


def place(state_dir: Path) -> Path:
    """The directory in which it is noted what was found: for the whole host, where we may write there."""
    is_shared = os.access(SHARED_STATE_DIR, os.W_OK)
    return (SHARED_STATE_DIR if is_shared else state_dir) / FOLDER


async def choose(folder: Path, key: str, boot: Callable[[], Awaitable[str]]) -> Acceleration:
    """What was found before, or a trial now, which takes up to `PROBE_S`.

    Args:
        boot: Boots a guest with KVM, and says why it did not answer; nothing: it did. Where it raises, no guest could
            be tried: that says nothing of KVM, and nothing is kept.
    """
    path = folder / FILE
    known = await asyncio.to_thread(_read, path)
    if known is not None and known.key == key:
        return known
    try:
        found = await _try(key, boot)
    except (BarchanError, OSError, TimeoutError) as error:
        return Acceleration(name="tcg", key=key, why=f"no guest could be tried with KVM now: {error}"[:500])
    await asyncio.to_thread(_write, path, found)
    return found


async def _try(key: str, boot: Callable[[], Awaitable[str]]) -> Acceleration:
    if not await asyncio.to_thread(os.path.exists, HOST_DEVICE):
        return Acceleration(name="tcg", key=key, why=f"there is no {HOST_DEVICE}")
    why_not = await boot()
    if why_not:
        return Acceleration(name="tcg", key=key, why=f"no guest boots with KVM here: {why_not}"[:500])
    return Acceleration(name="kvm", key=key, why="a guest booted with KVM")


def _read(path: Path) -> Acceleration | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Acceleration)
    except (OSError, msgspec.MsgspecError):
        return None  # never tried, or by another release


def _write(path: Path, found: Acceleration) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(msgspec.json.encode(found))
    part.rename(path)
