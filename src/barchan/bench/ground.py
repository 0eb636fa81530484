"""Common ground of all contenders: the same static programs in the same root file system."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from barchan.errors import RequirementMissing
from barchan.image.directory import import_directory
from barchan.image.store import ImageStore
from barchan.image.template import TemplateConfig

TEMPLATE = "bench"
PROGRAMS = ("payload", "true", "pause")
DYNAMIC = "true-dynamic"  # linked like most programs are, with the host's own C library beside it
_CFLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror")


class Ground(Struct, frozen=True, kw_only=True):
    """Where one benchmark run keeps its things; all of it goes at the end.

    Attributes:
        programs: Compiled helpers: `bare`, `bare-init`, `forkexec`.
        rootfs: A directory with /payload, /true and /pause and the mount points a container needs.
        layer: The same as an EROFS file.
        state_dir: For a node of this run's own.
    """

    programs: Path
    rootfs: Path
    layer: Path
    state_dir: Path


@contextmanager
def prepare(sources: Path) -> Iterator[Ground]:
    """Compile the programs in `sources` (bench/bare of the source tree) and make the root file system of them.

    Raises:
        RequirementMissing: The sources or the compiler are not there.
    """
    if not (sources / "bare.c").exists():
        raise RequirementMissing(f"no {sources}/bare.c: run this in Barchan's source tree")
    with TemporaryDirectory(prefix="barchan-bench-", dir="/var/tmp") as name:
        root = Path(name)
        programs, rootfs, state_dir = root / "programs", root / "rootfs", root / "state"
        for directory in (programs, rootfs, state_dir):
            directory.mkdir()
        for program in ("bare", "forkexec"):
            _compile("cc", sources / f"{program}.c", programs / program)
        musl = shutil.which("musl-gcc")  # what guest/Makefile builds the guest's init with where it is installed
        include = () if musl is None else ("-idirafter", "/usr/include", *_multiarch())
        _compile(musl or "cc", sources / "init.c", programs / "bare-init", *include)
        for program in PROGRAMS:
            _compile("cc", sources / f"{program}.c", rootfs / program)
        _compile("cc", sources / "true.c", rootfs / DYNAMIC, static=False)
        _copy_libraries(rootfs / DYNAMIC, rootfs)
        for mount_point in ("proc", "sys", "dev", "tmp", "etc", "run"):
            (rootfs / mount_point).mkdir()
        (rootfs / "etc" / "passwd").write_text("root:x:0:0:root:/:/true\nagent:x:1000:1000::/:/true\n")
        (rootfs / "etc" / "group").write_text("root:x:0:\nagent:x:1000:\n")
        root.chmod(0o755)  # crun and bwrap enter it as other users
        store = ImageStore(state_dir / "images")
        config = TemplateConfig(name=TEMPLATE, user="agent", source="bench")
        template = import_directory(store, rootfs, config, "erofs", lambda _: None)
        yield Ground(programs=programs, rootfs=rootfs, layer=store.layer_path(template.layers[0]), state_dir=state_dir)


def _multiarch() -> tuple[str, ...]:
    name = subprocess.run(["cc", "-print-multiarch"], check=True, capture_output=True, text=True).stdout.strip()
    return ("-idirafter", f"/usr/include/{name}") if name else ()


def _copy_libraries(program: Path, rootfs: Path) -> None:
    """Put the loader and libraries that a program names where it looks for them."""
    listed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    for path in (word for line in listed.splitlines() for word in line.split() if word.startswith("/")):
        target = rootfs / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def _compile(compiler: str, source: Path, target: Path, *options: str, static: bool = True) -> None:
    link = ("-static",) if static else ()
    command = [compiler, *options, *_CFLAGS, *link, "-o", os.fspath(target), os.fspath(source)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise RequirementMissing("no C compiler (Debian package gcc)") from error
    except subprocess.CalledProcessError as error:
        raise RequirementMissing(f"{source} does not compile: {error.stderr.decode()[-400:]}") from error
