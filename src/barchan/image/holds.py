"""What live sandboxes are made of, told to every process that changes the same image store.

    LIVE/HOLDER/lock      held for as long as the holder lives
    LIVE/HOLDER/SHA256    empty; a layer of that digest is in use

A layer that is noted here stays in the store, however it is kept and whatever becomes of its images.
"""

import fcntl
import os
import shutil
from pathlib import Path

_LOCK = "lock"


class Holder:
    """The notes of one node. Made under the store's lock; what an earlier node of that name noted is still there."""

    def __init__(self, live: Path, name: str) -> None:
        self._path = live / name
        self._path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # an earlier one may be about to end
        self.noted = set(os.listdir(self._path)) - {_LOCK}

    def note(self, digest: str) -> None:
        if digest not in self.noted:
            os.close(os.open(self._path / digest, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            self.noted.add(digest)

    def drop(self, digest: str) -> None:
        (self._path / digest).unlink(missing_ok=True)
        self.noted.discard(digest)

    def close(self) -> None:
        os.close(self._lock)


def held(live: Path) -> set[str]:
    """Digests that living holders have noted; what dead ones have left goes. For whoever has the store's lock."""
    found: set[str] = set()
    for path in live.iterdir() if live.exists() else ():
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found.update(os.listdir(path))
        else:
            shutil.rmtree(path)
        finally:
            os.close(lock)
    return found
