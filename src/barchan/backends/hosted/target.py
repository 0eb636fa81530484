"""Files that what runs a guest fills on the node's disk: bounded, and never to the last byte of it."""

import errno
import os
from pathlib import Path

from barchan.snapshot.shelf import FREE_BYTES_MIN

CHECK_BYTES = 16 << 20  # between two looks at the room that the disk has


class Target:
    """A new file on the node's disk, of which nothing is written any more where that is nearly full. Close it."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._unchecked = CHECK_BYTES

    def __enter__(self) -> "Target":
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)

    def will_have(self, more: int) -> None:
        """Before so many bytes are written, at most `CHECK_BYTES`. Raises `OSError`: there is no room."""
        self._unchecked += more
        if self._unchecked >= CHECK_BYTES:
            self._unchecked = 0
            room = os.fstatvfs(self.fd)
            if room.f_bavail * room.f_frsize < FREE_BYTES_MIN + CHECK_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
