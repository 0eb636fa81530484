"""What live sandboxes are made of, told to every process that changes the same image store.

    LIVE/HOLDER/lock      held for as long as the holder lives
    LIVE/HOLDER/SHA256    empty; a layer of that digest is in use
    LIVE/HOLDER/stored    only where some of the sandboxes are on disk: the path of the journal that knows them
    LIVE/HOLDER/ended     its time is when somebody first saw that the holder was dead

A layer that is noted here stays in the store, however it is kept and whatever becomes of its images. What a dead holder
noted stays for as long as its sandboxes may live without it, and so that the next one of its name finds it; where some
are on disk, for as long as their journal is there.
"""

import fcntl
import os
import shutil
import time
from pathlib import Path

EXPIRY_S = 120.0  # longer than sandboxes wait for their next node
_LOCK, _STORED, _ENDED = "lock", "stored", "ended"
_FIXED = frozenset({_LOCK, _STORED, _ENDED})


class Holder:
    """The notes of one node. Made under the store's lock; what an earlier node of that name noted is still there."""

    def __init__(self, live: Path, name: str) -> None:
        self._path = live / name
        self._path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # an earlier one may be about to end
        (self._path / _ENDED).unlink(missing_ok=True)
        self.noted = _notes(self._path)

    def note(self, digest: str) -> None:
        if digest not in self.noted:
            os.close(os.open(self._path / digest, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            self.noted.add(digest)

    def drop(self, digest: str) -> None:
        (self._path / digest).unlink(missing_ok=True)
        self.noted.discard(digest)

    def tell_stored(self, journal: Path | None) -> None:
        """Whether some of the sandboxes are on disk: then they outlive the holder for as long as this file is there."""
        if journal is None:
            (self._path / _STORED).unlink(missing_ok=True)
        else:
            (self._path / _STORED).write_text(str(journal), "utf-8")

    def close(self) -> None:
        os.close(self._lock)


def held(live: Path) -> set[str]:
    """Digests that holders have noted; what one left that is dead for good goes. For whoever has the store's lock."""
    found: set[str] = set()
    for path in live.iterdir() if live.exists() else ():
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found |= _notes(path)
        else:
            noted = _notes(path)
            if noted and _may_return(path):
                found |= noted
            else:
                shutil.rmtree(path)
        finally:
            os.close(lock)
    return found


def _notes(path: Path) -> set[str]:
    return set(os.listdir(path)) - _FIXED


def _may_return(path: Path) -> bool:
    """Whether a holder that is dead may still have sandboxes."""
    try:
        if Path((path / _STORED).read_text("utf-8")).exists():
            return True
    except FileNotFoundError:
        pass
    ended = path / _ENDED
    try:
        return time.time() - ended.stat().st_mtime < EXPIRY_S
    except FileNotFoundError:
        ended.touch()
        return True
