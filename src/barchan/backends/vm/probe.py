"""What machines need of this host."""

from collections.abc import Sequence
from pathlib import Path

from barchan.backends.qemu import install
from barchan.image import agent
from barchan.model.node import Requirement


def requirements(state_dir: Path) -> Sequence[Requirement]:
    """Whether each holds; blocks for some 50 ms."""
    qemu = install.find(state_dir)
    has_agent = agent.PROGRAM.exists()
    return [
        Requirement(
            name="QEMU",
            ok=qemu is not None,
            needed_for="vm",
            found=qemu.version if qemu is not None else f"none of version {install.MAJOR_MIN}",
            remedy="" if qemu is not None else "sudo barchan tools install qemu",
        ),
        Requirement(
            name="agent",
            ok=has_agent,
            needed_for="vm",
            found=agent.PROGRAM.name if has_agent else "not built",
            remedy="" if has_agent else "make setup, or install barchan again",
        ),
    ]
