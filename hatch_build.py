"""Build hook: compiles `guest/` into the wheel as `barchan/_guest/`, or says which tool is missing.

A wheel with the guest binaries is of one platform; without them (not Linux, or `BARCHAN_NO_GUEST=1`) it holds the
client only and is of any. An editable install gets the binaries in `src/barchan/_guest/`; `make` keeps them fresh.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAMS = ("barchan-init", "barchan-boot", "barchan-gvisor", "barchan-supervisor", "barchan-pack", "barchan-criu.so")
CLIENT_ONLY = "With BARCHAN_NO_GUEST=1 the client alone is built, which needs no C."


class GuestBuildError(SystemExit):
    """Ends the build with one message and no traceback: what is missing and how to get it."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\nbarchan: {message}\n")


class GuestBuildHook(BuildHookInterface[Any]):
    """Adds the compiled guest programs to a wheel."""

    scratch: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not sys.platform.startswith("linux") or os.environ.get("BARCHAN_NO_GUEST") == "1":
            return
        root = Path(self.root)
        compiler = find_tools()
        check_static(compiler)
        if version == "editable":
            out = root / "src/barchan/_guest"
        else:
            self.scratch = tempfile.TemporaryDirectory(prefix="barchan-build-")
            out = Path(self.scratch.name)
            build_data["force_include"].update({str(out / name): f"barchan/_guest/{name}" for name in PROGRAMS})
        compile_guest(root / "guest", out, compiler)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.scratch is not None:
            self.scratch.cleanup()


def find_tools() -> str:
    """The C compiler to use; ends the build if it or make is missing."""
    compiler = os.environ.get("CC", "gcc")
    for tool, package in ((compiler.split()[0], "gcc"), ("make", "make")):
        if shutil.which(tool) is None:
            raise GuestBuildError(
                f"building the guest programs needs `{tool}`, which is not installed (Debian package: {package}). "
                + CLIENT_ONLY
            )
    return compiler


def check_static(compiler: str) -> None:
    """End the build unless a static program can be linked."""
    with tempfile.TemporaryDirectory(prefix="barchan-build-") as folder:
        source = Path(folder, "probe.c")
        source.write_text('#include <linux/types.h>\n#include <stdio.h>\nint main(void) { return puts("") < 0; }\n')
        command = [*compiler.split(), "-static", "-o", str(source.with_suffix("")), str(source)]
        probe = subprocess.run(command, capture_output=True, text=True)
    if probe.returncode != 0:
        raise GuestBuildError(
            "building the guest programs needs a static C library with its headers (Debian package: libc6-dev). "
            f"{CLIENT_ONLY}\n`{' '.join(command[:-3])}` said: {probe.stderr.strip()[-400:]}"
        )


def compile_guest(guest: Path, out: Path, compiler: str) -> None:
    """Run the guest's own Makefile; ends the build with its output when it fails."""
    command = ["make", "-C", str(guest), f"OUT={out}", f"CC={compiler}", "all"]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if made.returncode != 0:
        raise GuestBuildError(f"compiling the guest programs failed:\n{made.stdout.strip()[-4000:]}")
    for name in PROGRAMS:
        if not os.access(out / name, os.X_OK):
            raise GuestBuildError(f"guest/Makefile made no {name} in OUT")
