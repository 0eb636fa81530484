"""A QEMU of one known version, whose root file system outers see as a layer; `barchan tools install qemu`."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from msgspec import Struct

from barchan.backends import tools
from barchan.backends.tools import Installed
from barchan.image.tools import Progress

TOOL = "qemu"
PACKAGES = ("qemu-system-x86", "qemu-utils")
MAJOR_MIN = 10
VERSION_TIMEOUT_S = 20.0
EMULATOR = "/usr/bin/qemu-system-x86_64"  # in its root
IMG = "/usr/bin/qemu-img"
FIRMWARE = ("/usr/share/qemu", "/usr/share/seabios")
_LEFT_OUT = (*tools.LEFT_OUT, "/usr/share/bash-completion", "/usr/share/icons", "/usr/share/alsa")
_OF_OTHERS = ("*.dtb", "*.lid", "openbios-*", "s390-*", "slof.bin", "hppa-*", "QEMU,*", "efi-*", "npcm*", "u-boot*")
_PROGRAMS_KEPT = ("qemu-system-x86_64", "qemu-img")
_LINKS = ("bin", "lib", "lib64")


class Qemu(Struct, frozen=True):
    """A QEMU that can be used: its root directory, and its version as "10.0.13"."""

    root: Path
    version: str


def find(state_dir: Path) -> Qemu | None:
    """The QEMU of a node, asked for its version; None where none is installed. Blocks for some 50 ms."""
    for directory in tools.places(state_dir, TOOL):
        if version := _version_in(directory):
            return Qemu(directory / "root", version)
    return None


def command(root: Path, program: str) -> list[str]:
    """How a program of that root is run on the host, whose C library may be an older one."""
    libraries = root / "usr/lib/x86_64-linux-gnu"
    return [os.fspath(libraries / "ld-linux-x86-64.so.2"), "--library-path", os.fspath(libraries), f"{root}{program}"]


def install(directory: Path, progress: Progress) -> Installed:
    """See `tools.install`. Takes about 30 s and 120 MB."""
    return tools.install(directory, PACKAGES, _version_in, progress, left_out=_LEFT_OUT, finish=_tidy)


def _version_in(directory: Path) -> str:
    """What it says of itself; empty if it does not run, or is too old."""
    try:
        argv = [*command(directory / "root", EMULATOR), "--version"]
        done = subprocess.run(argv, capture_output=True, timeout=VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(rb"version (\d+)((?:\.\d+)*)", done.stdout)
    if found is None or done.returncode != 0 or int(found[1]) < MAJOR_MIN:
        return ""
    return (found[1] + found[2]).decode()


def _tidy(root: Path) -> None:
    """Leave what an emulator of this architecture needs, and make a root of it that a container can run in."""
    for path in (root / "usr/bin").iterdir():
        if path.name not in _PROGRAMS_KEPT:
            path.unlink()
    for pattern in _OF_OTHERS:
        for path in (root / "usr/share/qemu").glob(pattern):
            path.unlink()
    for name in ("var", "usr/sbin", "etc/init.d"):
        shutil.rmtree(root / name, ignore_errors=True)
    for name in _LINKS:
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    for name in ("proc", "dev", "sys", "tmp", "run"):
        (root / name).mkdir(exist_ok=True)
