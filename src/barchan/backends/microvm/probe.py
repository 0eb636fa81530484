"""What microVMs need of the host, beside what containers do. It takes some 60 ms."""

import shutil
from pathlib import Path

from barchan.backends.microvm import kernel
from barchan.backends.qemu import install
from barchan.errors import RequirementMissing
from barchan.image.tools import TOOL_PATH
from barchan.model.node import Requirement

MICROVM = "microvm"


def requirements(state_dir: Path) -> list[Requirement]:
    """See `Backend.probe`."""
    return [_qemu(state_dir), _kernel(state_dir), _mkfs()]


def _qemu(state_dir: Path) -> Requirement:
    found = install.find(state_dir)
    return Requirement(
        name="QEMU",
        ok=found is not None,
        needed_for=MICROVM,
        found=f"{found.version} in {found.root}" if found else f"none of version {install.MAJOR_MIN} or later",
        remedy="" if found else "barchan tools install qemu",
    )


def _kernel(state_dir: Path) -> Requirement:
    try:
        found = f"{kernel.find(state_dir).version}"
    except RequirementMissing as error:
        return Requirement(
            name="guest kernel", ok=False, needed_for=MICROVM, found=str(error), remedy="barchan kernel build"
        )
    return Requirement(name="guest kernel", ok=True, needed_for=MICROVM, found=found)


def _mkfs() -> Requirement:
    path = shutil.which("mkfs.ext4", path=TOOL_PATH)
    return Requirement(
        name="mkfs.ext4",
        ok=path is not None,
        needed_for=MICROVM,
        found=path or "none",
        remedy="" if path else "apt-get install e2fsprogs",
    )
