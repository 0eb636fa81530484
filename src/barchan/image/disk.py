"""What is done to the disk that images lie on."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from barchan.errors import CapacityError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
RETRY_AFTER_MS = 1000


@contextmanager
def needs_room(root: Path, what: str = "the image") -> Iterator[None]:
    """Make a full disk what it is to a caller: no room now."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise CapacityError(
            f"no room for {what} in {root}: {error.strerror} (try: barchan image gc --unused-for 7d)",
            retry_after_ms=RETRY_AFTER_MS,
        ) from error


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def size_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(os.lstat(os.path.join(top, name)).st_size for top, _, names in os.walk(path) for name in names)


def sync_tree(path: Path) -> None:
    """Force a finished layer to disk before it gets its name."""
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    else:
        os.sync()  # one call for a tree of files: fsync of each takes far longer


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
