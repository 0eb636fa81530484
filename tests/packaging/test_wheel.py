"""What `pip install` of this project builds, and how it says what it lacks."""

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tidy.source import ROOT

pytestmark = pytest.mark.requires("static-libc")

PROGRAMS = {f"barchan/_guest/barchan-{name}" for name in ("init", "boot", "gvisor", "supervisor", "pack", "criu.so")}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is needed to build, so that nothing is left in the working tree."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("src", "guest"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("_guest", "__pycache__", "build*"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    return copy


def build(checkout: Path, out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel without an isolated environment, so that no package registry is asked."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    return subprocess.run(command, cwd=checkout, env={**os.environ, **env}, capture_output=True, text=True)


def test_wheel_brings_the_guest_programs(checkout: Path, tmp_path: Path) -> None:
    """The wheel is of this platform and holds the guest programs, executable and linked with nothing of this host."""
    built = build(checkout, tmp_path)
    assert (built.returncode, built.stderr) == (0, built.stderr)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-linux_{os.uname().machine}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert names >= {"barchan/__init__.py", "barchan/py.typed", *PROGRAMS}
        assert not any(name.endswith((".c", ".h", ".o", ".pyc")) for name in names)
        for name in PROGRAMS:
            assert archive.getinfo(name).external_attr >> 16 & 0o777 == 0o755
            assert archive.read(name).startswith(b"\x7fELF")
            assert b"/ld-linux" not in archive.read(name)
    assert not (checkout / "src/barchan/_guest").exists()


def test_client_only_wheel_needs_no_compiler(checkout: Path, tmp_path: Path) -> None:
    """With BARCHAN_NO_GUEST=1 and no tools at all the client is built, for any platform."""
    built = build(checkout, tmp_path, BARCHAN_NO_GUEST="1", PATH=str(tmp_path))
    assert (built.returncode, built.stderr) == (0, built.stderr)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert PROGRAMS.isdisjoint(archive.namelist())


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_missing_compiler_is_named(checkout: Path, tmp_path: Path) -> None:
    """Without gcc the build ends with one message that names it and its Debian package, and no traceback."""
    built = build(checkout, tmp_path / "out", PATH=str(tmp_path))
    assert built.returncode != 0
    assert "needs `gcc`, which is not installed (Debian package: gcc)" in built.stderr
    assert "Traceback" not in built.stderr


def test_a_missing_make_is_named(checkout: Path, tmp_path: Path) -> None:
    """Without make the message names make."""
    script(tmp_path / "gcc", "exit 0")
    built = build(checkout, tmp_path / "out", PATH=str(tmp_path))
    assert built.returncode != 0
    assert "needs `make`, which is not installed (Debian package: make)" in built.stderr


def test_a_missing_static_libc_is_named(checkout: Path, tmp_path: Path) -> None:
    """A compiler that cannot link statically leads to libc6-dev, with what the compiler said."""
    script(tmp_path / "gcc", "echo 'cannot find -lc' >&2; exit 1")
    script(tmp_path / "make", "exit 0")
    built = build(checkout, tmp_path / "out", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert built.returncode != 0
    assert "needs a static C library with its headers (Debian package: libc6-dev)" in built.stderr
    assert "cannot find -lc" in built.stderr


def test_a_failed_compilation_shows_the_compiler(checkout: Path, tmp_path: Path) -> None:
    """When the guest's Makefile fails, its output is the message, and no scratch folder stays behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script(tmp_path / "make", "echo 'init.c: a bad line'; exit 2")
    built = build(checkout, tmp_path / "out", PATH=f"{tmp_path}:/usr/bin:/bin", TMPDIR=str(scratch))
    assert built.returncode != 0
    assert "compiling the guest programs failed:\ninit.c: a bad line" in built.stderr
    assert list(scratch.iterdir()) == []
