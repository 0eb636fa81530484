"""Single packages of the host's own Debian release, unpacked and not installed."""

import os
import re
import subprocess
from pathlib import Path

from barchan.errors import BackendError, RequirementMissing
from barchan.image.tools import TOOL_PATH, require, run

NEEDED_FOR = "getting a kernel"


def newest(package: str) -> tuple[str, str]:
    """The package that this one stands for, as `linux-source-6.1` for `linux-source`, and its version.

    Raises:
        RequirementMissing: The host has no apt, or its lists know no such package.
    """
    require("apt-cache", "apt", needed_for=NEEDED_FOR)
    found = re.search(
        rf"^Depends: .*?\b({re.escape(package)}-[a-z0-9.+-]+|linux-image-[0-9][a-z0-9.+-]+)", _show(package), re.M
    )
    name = found[1] if found else package
    version = re.search(r"^Version: (\S+)", _show(name), re.M)
    if version is None:
        raise RequirementMissing(f"no package {name} is known here (try: apt-get update)", package=name)
    return name, version[1]


def _show(package: str) -> str:
    argv = ["apt-cache", "show", "--no-all-versions", package]
    environment = {"PATH": TOOL_PATH, "LC_ALL": "C.UTF-8"}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False).stdout


def fetch(package: str, version: str, directory: Path) -> Path:
    """Unpack it below the directory, which is made; returns where.

    Raises:
        BackendError: It could not be had.
        RequirementMissing: The host lacks Debian's tools.
    """
    apt_get = require("apt-get", "apt", needed_for=NEEDED_FOR)
    dpkg_deb = require("dpkg-deb", "dpkg", needed_for=NEEDED_FOR)
    directory.mkdir(parents=True)
    sandbox = f"APT::Sandbox::User={'root' if os.geteuid() == 0 else ''}"
    run(["env", "-C", directory, apt_get, "-q", "-o", sandbox, "download", f"{package}={version}"])
    archives = list(directory.glob("*.deb"))
    if len(archives) != 1:
        raise BackendError(f"apt-get brought {len(archives)} files for {package}, not one")
    root = directory / "root"
    run([dpkg_deb, "-x", archives[0], root])
    archives[0].unlink()
    return root
