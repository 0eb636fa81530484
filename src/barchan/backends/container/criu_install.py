"""Bringing a CRIU that runs beside whatever release the host is: Debian 13's program with the libraries of its own."""

import os
import shutil
import tempfile
from pathlib import Path

from barchan.backends.container.criu import Criu, installed, version_of
from barchan.errors import BackendError, RequirementMissing
from barchan.image.debian import host_sources
from barchan.image.tools import Progress, in_namespaces, require, run

SUITE = "trixie"
LEFT_OUT = ("/usr/share/doc", "/usr/share/info", "/usr/share/lintian", "/usr/share/locale", "/usr/share/man")
WRAPPER = """#!/bin/sh
exec {command} "$@"
"""


def install(directory: Path, progress: Progress) -> Criu:
    """Install it as `directory`, whole or not at all; at once where it is there and runs. Takes about 20 s.

    Raises:
        RequirementMissing: Not root, or mmdebstrap is missing.
        BackendError: The packages could not be had, or what they hold does not run here.
    """
    found = installed(directory)
    if found and (version := version_of(found)):
        return Criu(found, version)
    if os.geteuid() != 0:
        raise RequirementMissing("installing CRIU needs root (try: sudo barchan tools install criu)")
    mmdebstrap = require("mmdebstrap", "mmdebstrap", needed_for="installing CRIU")
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix="criu-", dir=directory.parent))
    try:
        part.chmod(0o755)
        progress(f"fetching CRIU from Debian's {SUITE}")
        argv: list[str | Path] = [
            mmdebstrap,
            "--mode=root",
            "--variant=extract",
            "--format=directory",
            "--include=criu",
        ]
        argv += ["--components=main", *(f"--dpkgopt=path-exclude={path}/*" for path in LEFT_OUT)]
        run(in_namespaces([*argv, SUITE, part / "root", *host_sources(SUITE)]))
        command = installed(part)
        version = version_of(command) if command else ""
        if not version:
            raise BackendError("the CRIU of the packages does not run on this host")
        if directory.exists():
            shutil.rmtree(directory)
        part.rename(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    command = installed(directory)
    wrapper = directory / "criu"
    wrapper.write_text(WRAPPER.format(command=" ".join(f"'{word}'" for word in command)))
    wrapper.chmod(0o755)
    return Criu(command, version)
