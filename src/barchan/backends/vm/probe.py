"""What machines need of this host."""

from collections.abc import Sequence
from pathlib import Path

from barchan.backends.qemu import install
from barchan.image import agent
from barchan.model.node import Requirement


def requirements(state_dir: Path) -> Sequence[Requirement]:
    """Whether each holds; blocks for some 50 ms."""
    qemu = install.find(state_dir)
    return [
        Requirement(
            name="QEMU",
            ok=qemu is not None,
            needed_for="vm",
            found=qemu.version if qemu is not None else f"none of version {install.MAJOR_MIN}",
            remedy="sudo barchan tools install qemu",
        ),
        Requirement(
            name="agent",
            ok=agent.PROGRAM.exists(),
            needed_for="vm",
            found=agent.PROGRAM.name if agent.PROGRAM.exists() else "not built",
            remedy="make setup, or install barchan again",
        ),
    ]
