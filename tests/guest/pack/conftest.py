"""The program, built fresh unless BARCHAN_INIT names another build, and images mounted for as long as a test runs."""

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILT = ROOT / "guest" / "build" / "barchan-pack"
TIMEOUT_S = 60

Pack = Callable[..., "subprocess.CompletedProcess[str]"]
Mount = Callable[[Path], Path]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "BARCHAN_INIT" in os.environ:
        return Path(os.environ["BARCHAN_INIT"]).with_name("barchan-pack")
    with open(tmp_path_factory.getbasetemp().parent / "barchan-pack.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        BUILT.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["make", "-s", "-C", ROOT / "guest", "build/barchan-pack"], check=True)
    return BUILT


@pytest.fixture
def pack(program: Path) -> Pack:
    """Packs a directory into an image; what the program says and how it ends is the caller's to look at."""

    def run(
        tree: Path, image: Path, bytes_max: int = 1 << 30, options: tuple[str, ...] = ()
    ) -> "subprocess.CompletedProcess[str]":
        argv = [program, *options, tree, image, str(bytes_max)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    return run


@contextmanager
def mounted(source: str, kind: str, at: Path, options: str) -> Iterator[Path]:
    at.mkdir()
    subprocess.run(["mount", "-t", kind, "-o", options, source, at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts an image, read-only."""
    with ExitStack() as stack:
        yield lambda image: stack.enter_context(mounted(str(image), "erofs", image.with_suffix(".mnt"), "ro"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with mounted("tmpfs", "tmpfs", tmp_path / "small", "size=256k") as path:
        yield path
