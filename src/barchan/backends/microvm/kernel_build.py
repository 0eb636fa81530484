"""Building the kernel of microVMs from Debian's kernel source, with our own configuration and nothing else in it."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from barchan.backends.microvm import packages
from barchan.backends.microvm.kernel import (
    CONFIG,
    DIRECTORY,
    PART_PREFIX,
    VMLINUX,
    Record,
    config_digest,
    installed,
    keep,
)
from barchan.errors import BackendError, RequirementMissing
from barchan.image.tools import TOOL_PATH, Progress, require, run

SOURCE = "linux-source"
TOOLS = (
    ("make", "make"),
    ("gcc", "gcc"),
    ("strip", "binutils"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("xz", "xz-utils"),
)
HEADERS = ((Path("/usr/include/libelf.h"), "libelf-dev"),)
FREE_BYTES = 3 << 30  # source and objects
TELL_EVERY = 25  # files
# Whoever builds it, and when: the kernel is the same.
BUILD = {"KBUILD_BUILD_TIMESTAMP": "1970-01-01", "KBUILD_BUILD_USER": "barchan", "KBUILD_BUILD_HOST": "barchan"}


def build(state_dir: Path, progress: Progress) -> Record:
    """Build it as one of the state directory's kernels; at once where it was built of this source and configuration.

    Takes some four minutes on two processors. Blocking.

    Raises:
        RequirementMissing: A tool is missing, all those that are, or there is no source.
        CapacityError: The disk has no room.
        BackendError: It failed: the source can't be had, or knows one of our settings no more.
    """
    package, version = packages.newest(SOURCE)
    config = config_digest()
    for _, record in installed(state_dir):
        if record.config == config and record.package == f"{package} {version}":
            return record
    _check_tools()
    kernels = state_dir / DIRECTORY
    kernels.mkdir(parents=True, exist_ok=True)
    _check_room(kernels)
    work = Path(tempfile.mkdtemp(dir=kernels, prefix=PART_PREFIX))
    try:
        progress(f"fetching {package} {version}")
        root = packages.fetch(package, version, work / "package")
        progress("unpacking the source")
        source = _unpack(root, work / "source")
        _configure(source)
        _compile(source, progress)
        part = work / "kernel"
        part.mkdir()
        run(["strip", "-o", part / VMLINUX, source / VMLINUX])
        record = Record(
            version=(source / "include/config/kernel.release").read_text().strip(),
            package=f"{package} {version}",
            config=config,
            vmlinux=hashlib.sha256((part / VMLINUX).read_bytes()).hexdigest(),
        )
        keep(part, record, state_dir, f"{package}_{version}-{config[:12]}")
        return record
    finally:
        shutil.rmtree(work)


def _check_tools() -> None:
    missing = [package for tool, package in TOOLS if shutil.which(tool, path=TOOL_PATH) is None]
    missing += [package for header, package in HEADERS if not header.exists()]
    if missing:
        raise RequirementMissing(f"building a kernel needs more tools (try: apt-get install {' '.join(missing)})")


def _check_room(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < FREE_BYTES:
        raise BackendError(f"building a kernel takes {FREE_BYTES >> 30} GiB in {directory}, which has {free >> 20} MiB")


def _unpack(root: Path, target: Path) -> Path:
    (archive,) = root.glob("usr/src/linux-source-*.tar.*")
    target.mkdir()
    run([require("tar", "tar", needed_for="building a kernel"), "-xf", archive, "-C", target])
    (source,) = target.iterdir()
    return source


def _make(source: Path, *words: str) -> list[str | Path]:
    return ["nice", "-n", "10", "make", "-C", source, f"-j{os.cpu_count() or 1}", *words]


def _configure(source: Path) -> None:
    environment = {**BUILD, "PATH": TOOL_PATH, "LC_ALL": "C.UTF-8", "KCONFIG_ALLCONFIG": os.fspath(CONFIG)}
    run(_make(source, "allnoconfig"), env=environment)
    has = set((source / ".config").read_text().splitlines())
    lacks = [line for line in CONFIG.read_text().splitlines() if line.startswith("CONFIG_") and line not in has]
    if lacks:
        raise BackendError(f"this kernel source does not take {', '.join(lacks)}")


def _compile(source: Path, progress: Progress) -> None:
    done = 0

    def on_line(line: str) -> None:
        nonlocal done
        done += line.startswith("CC ")
        if done % TELL_EVERY == 1 and line.startswith("CC "):
            progress(f"compiling, {done} files done")

    run(_make(source, VMLINUX), env={**BUILD, "PATH": TOOL_PATH, "LC_ALL": "C.UTF-8"}, on_line=on_line)
