"""Bringing a CRIU that runs beside whatever release the host is: Debian 13's program with the libraries of its own."""

from pathlib import Path

from barchan.backends import tools
from barchan.backends.container.criu import installed, version_of
from barchan.backends.tools import Installed
from barchan.image.tools import Progress

WRAPPER = """#!/bin/sh
exec {command} "$@"
"""


def install(directory: Path, progress: Progress) -> Installed:
    """Install it as `directory`; see `tools.install`."""
    found = tools.install(directory, ["criu"], _version, progress)
    wrapper = directory / "criu"
    if not wrapper.exists():
        wrapper.write_text(WRAPPER.format(command=" ".join(f"'{word}'" for word in installed(directory))))
        wrapper.chmod(0o755)
    return found


def _version(directory: Path) -> str:
    command = installed(directory)
    return version_of(command) if command else ""
