"""Programs of other projects that backends use: Debian packages of a release that runs here, in directories of ours."""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from barchan.errors import BackendError, RequirementMissing
from barchan.image.debian import host_sources
from barchan.image.tools import Progress, in_namespaces, require, run

FOLDER = "tools"  # of a state directory, with one directory per tool
SHARED_STATE_DIR = Path("/var/lib/barchan")  # where those are looked for that the node's own state directory lacks
SUITE = "trixie"
LEFT_OUT = ("/usr/share/doc", "/usr/share/info", "/usr/share/lintian", "/usr/share/locale", "/usr/share/man")


class Installed(NamedTuple):
    """A tool that can be used: `path` is its directory."""

    version: str
    path: Path


def places(state_dir: Path, tool: str) -> tuple[Path, ...]:
    """Directories in which a tool may be, the node's own first."""
    return tuple(dict.fromkeys(parent / FOLDER / tool for parent in (state_dir, SHARED_STATE_DIR)))


def install(
    directory: Path,
    packages: Sequence[str],
    version_in: Callable[[Path], str],
    progress: Progress,
    *,
    left_out: Sequence[str] = LEFT_OUT,
    finish: Callable[[Path], None] = lambda root: None,
) -> Installed:
    """Unpack Debian packages, and what they depend on, as `directory/root`: whole or not at all, and at once where that
    is there. Takes half a minute or more.

    Args:
        version_in: Runs the tool of such a directory and returns its version; empty: it is not there or does not run.
        left_out: Directories that are not needed.
        finish: Is given the new root before anything of it is run.

    Raises:
        RequirementMissing: Not root, or mmdebstrap is missing.
        BackendError: The packages could not be had, or what they hold does not run here.
    """
    tool = directory.name
    if version := version_in(directory):
        return Installed(version, directory)
    if os.geteuid() != 0:
        raise RequirementMissing(f"installing {tool} needs root (try: sudo barchan tools install {tool})")
    mmdebstrap = require("mmdebstrap", "mmdebstrap", needed_for=f"installing {tool}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{tool}-", dir=directory.parent))
    try:
        part.chmod(0o755)
        progress(f"fetching {tool} from Debian's {SUITE}")
        argv: list[str | Path] = [mmdebstrap, "--mode=root", "--variant=extract", "--format=directory"]
        argv += [f"--include={','.join(packages)}", "--components=main"]
        argv += [f"--dpkgopt=path-exclude={path}/*" for path in left_out]
        run(in_namespaces([*argv, SUITE, part / "root", *host_sources(SUITE)]))
        finish(part / "root")
        version = version_in(part)
        if not version:
            raise BackendError(f"the {tool} of the packages does not run on this host")
        if directory.exists():
            shutil.rmtree(directory)
        part.rename(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Installed(version, directory)
