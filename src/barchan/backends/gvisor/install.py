"""A runsc of one known version, a static program; `barchan tools install runsc`."""

import re
import subprocess
from pathlib import Path

from msgspec import Struct

from barchan.backends import tools
from barchan.backends.tools import Installed
from barchan.image.tools import Progress

TOOL = "runsc"
PROGRAM = "root/usr/bin/runsc"
VERSION_TIMEOUT_S = 20.0


class Runsc(Struct, frozen=True):
    """A runsc that can be used: the program, and its version as "0.0~20240729.0"."""

    program: Path
    version: str


def find(state_dir: Path) -> Runsc | None:
    """The runsc of a node, asked for its version; None where none is installed. Blocks for some 20 ms."""
    for directory in tools.places(state_dir, TOOL):
        if version := _version_in(directory):
            return Runsc(directory / PROGRAM, version)
    return None


def install(directory: Path, progress: Progress) -> Installed:
    """See `tools.install`. Takes about 16 s and 30 MB."""
    return tools.install(directory, (TOOL,), _version_in, progress)


def _version_in(directory: Path) -> str:
    """What it says of itself; empty if it does not run."""
    try:
        argv: list[str | Path] = [directory / PROGRAM, "--version"]
        done = subprocess.run(argv, capture_output=True, timeout=VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(rb"runsc version (\S+)", done.stdout)
    return found[1].decode() if found is not None and done.returncode == 0 else ""
