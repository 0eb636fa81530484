"""The kernel of microVMs: one of our own making, or a distribution's with its drivers as modules."""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from barchan.backends.microvm import initrd
from barchan.errors import RequirementMissing

DIRECTORY = "kernels"  # in a state directory
SHARED_STATE_DIR = Path("/var/lib/barchan")
CONFIG = Path(__file__).with_name("kernel.config")
RECORD, VMLINUX, MODULES = "kernel.json", "vmlinux", "modules"
PART_PREFIX = ".part-"


class Record(Struct, frozen=True, kw_only=True):
    """What is known of a kernel on disk, beside it.

    Attributes:
        version: As the kernel says itself, as `6.1.176-barchan`.
        package: What it was made of, with its version.
        config: sha256 of our configuration, or empty: it has the distribution's.
        vmlinux: sha256 of the kernel.
        modules: File names in the order in which they are loaded.
    """

    version: str
    package: str
    config: str = ""
    vmlinux: str
    modules: tuple[str, ...] = ()


class Kernel(Struct, frozen=True, kw_only=True):
    """A kernel that can be booted, with what comes with it.

    Attributes:
        digest: Names all that a guest's memory depends on; equal where everything is.
        needs_modules: It is a distribution's, and takes twice as long to boot.
    """

    vmlinux: Path
    initrd: Path
    version: str
    digest: str
    needs_modules: bool


def find(state_dir: Path) -> Kernel:
    """The best kernel of this host: of our own making and of today's configuration, else a distribution's. Blocking.

    What others have installed for the whole host counts; the initial file system is made in `state_dir`.

    Raises:
        RequirementMissing: There is none; the message says how to get one.
    """
    found = best(state_dir)
    if found is None:
        raise RequirementMissing(
            "a microVM needs a kernel, and there is none (try: sudo barchan kernel install, half a minute; "
            "or sudo barchan kernel build, some minutes, for one that boots in half the time)"
        )
    directory, record = found
    modules = [directory / MODULES / name for name in record.modules]
    path, digest = initrd.make(state_dir / DIRECTORY, modules)
    return Kernel(
        vmlinux=directory / VMLINUX,
        initrd=path,
        version=record.version,
        digest=hashlib.sha256(f"{record.vmlinux} {digest}".encode()).hexdigest(),
        needs_modules=bool(record.modules),
    )


def best(state_dir: Path) -> tuple[Path, Record] | None:
    """Where the best one is, and what it is; None where there is none."""
    wanted = config_digest()
    usable = [(path, record) for path, record in installed(state_dir) if record.config in ("", wanted)]
    return max(usable, key=lambda item: (item[1].config == wanted, _order(item[1].version)), default=None)


def installed(state_dir: Path) -> Iterator[tuple[Path, Record]]:
    """All kernels, with whether they are of today's configuration or not."""
    for directory in dict.fromkeys((state_dir, SHARED_STATE_DIR)):
        for path in sorted((directory / DIRECTORY).glob(f"[!.]*/{RECORD}")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=Record)
            except (OSError, msgspec.MsgspecError):
                continue  # another user's, or an earlier release's: as if it were not there
            if (path.parent / VMLINUX).exists():
                yield path.parent, record


def config_digest() -> str:
    return hashlib.sha256(CONFIG.read_bytes()).hexdigest()


def keep(part: Path, record: Record, state_dir: Path, name: str) -> Path:
    """Make the finished directory `part` one of the kernels, in place of one of the same name."""
    (part / RECORD).write_bytes(msgspec.json.encode(record))
    part.chmod(0o755)
    target = state_dir / DIRECTORY / name
    if target.exists():
        old = part.with_name(f"{part.name}-old")
        target.rename(old)
        part.rename(target)
        part = old
        _remove(part)
    else:
        part.rename(target)
    return target


def _remove(directory: Path) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            Path(folder, name).unlink()
        Path(folder).rmdir()


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
