"""What an outer needs to run a gVisor guest, as a host layer: runsc, our starter of it, and the init of the guest."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from barchan.backends.gvisor.install import Runsc
from barchan.backends.hosted.outer import HostLayer

FOLDER = "gvisor"  # of a state directory
DIRECTORY = ".barchan"  # of the outer's root; the guest sees it read-only, and can't enter it
SPOOL = "spool"
RUNSC, STARTER, INIT = "runsc", "barchan-gvisor", "barchan-init"
INIT_UID = 65535
BINARIES = Path(__file__).parents[2] / "_guest"
NAME_DIGITS = 16


def layer(state_dir: Path, runsc: Runsc) -> HostLayer:
    """The layer of this release with that runsc, made where it is not there yet. Blocks for some 20 ms."""
    digest = hashlib.sha256(runsc.version.encode())
    for name in (STARTER, INIT):
        digest.update((BINARIES / name).read_bytes())
    name = f"gvisor-{digest.hexdigest()[:NAME_DIGITS]}"
    path = state_dir / FOLDER / name
    if not path.exists():
        _make(path, runsc)
    return HostLayer(name, path)


def others(state_dir: Path, current: HostLayer) -> list[HostLayer]:
    """Layers of other releases or of another runsc."""
    found = (state_dir / FOLDER).glob("gvisor-*")
    return [HostLayer(path.name, path) for path in found if path != current.path]


def _make(path: Path, runsc: Runsc) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix="part-", dir=path.parent))
    try:
        part.chmod(0o755)
        directory = part / DIRECTORY
        directory.mkdir()
        _place(runsc.program, directory / RUNSC)
        for name in (STARTER, INIT):
            shutil.copyfile(BINARIES / name, directory / name)
        for name in (RUNSC, STARTER, INIT):
            (directory / name).chmod(0o755)
        (directory / SPOOL).mkdir()
        directory.chmod(0o700)
        os.chown(directory, INIT_UID, INIT_UID)
        try:
            part.rename(path)
        except FileExistsError:  # another node has made it meanwhile
            pass
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _place(source: Path, target: Path) -> None:
    """The same file where that is possible: its pages are then in memory once."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
