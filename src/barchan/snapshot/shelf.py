"""The memory snapshots of one node on its disk.

    DIGEST.mem    a packed file, by its digest
    ID            a symbolic link to the file of the snapshot of that id
    *.part        not finished; what a killed process has left is removed at the next start

A file goes when no snapshot has it, and none has pages in it. Which do is said by the files alone, by their headers.
"""

import os
import re
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from barchan.errors import CapacityError, Conflict, NotFound, SnapshotCorrupt
from barchan.image.disk import RETRY_AFTER_MS, needs_room, size_bytes, sync_directory
from barchan.snapshot.form import Header
from barchan.snapshot.memory_file import MemoryFile, read_header
from barchan.snapshot.pack import TEMPORARY, PackedMemory, pack

FOLDER = "snapshots"  # in a node's state directory
FREE_BYTES_MIN = 256 << 20  # what stays free on the disk, for everything else that a node must be able to write
_MEMORY = ".mem"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_FOLDER_MODE = 0o700


class Entry(Struct, frozen=True, kw_only=True):
    """One snapshot: its file's digest and size, and the digests of the files that hold pages of it."""

    snapshot_id: str
    digest: str
    file_bytes: int
    bases: tuple[str, ...]


class ShelfStatistics(Struct, frozen=True, kw_only=True):
    """Snapshots, their files, those of the files that are kept for others only, and bytes of all files."""

    snapshots: int
    files: int
    bases: int
    file_bytes: int


class _Needs(NamedTuple):
    """The file of a snapshot, and those that it has pages in, by digest."""

    digest: str
    bases: tuple[str, ...]


class Shelf:
    """The snapshots of a folder. Its methods block, and may be called from any thread.

    One process changes it, the node, after `start`; any process may `open` what is on it.
    """

    def __init__(self, root: Path, *, free_bytes_min: int = FREE_BYTES_MIN) -> None:
        self.root = root
        self._free_bytes_min = free_bytes_min
        self._lock = threading.Lock()
        self._named: dict[str, _Needs] = {}
        self._headers: dict[str, Header] = {}  # of every whole file, by digest
        self._uses = Counter[str]()  # of each digest: by snapshots, as what they are or as their base, and by `holding`

    def start(self) -> list[str]:
        """Make the folder, remove what a killed process has left; returns the names of what is damaged.

        A damaged snapshot is kept for a person to look at; opening it fails.
        """
        with needs_room(self.root, "a memory snapshot"):
            self.root.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
        damaged, links = [], []
        with self._lock:
            for path in sorted(self.root.iterdir()):
                if path.name.endswith(TEMPORARY):
                    path.unlink()
                elif path.is_symlink():
                    links.append(path)
                elif path.suffix == _MEMORY:
                    header = _whole(path)
                    if header is None:
                        damaged.append(path.name)
                    else:
                        self._headers[header.digest] = header
            for path in links:
                digest = Path(os.readlink(path)).stem
                self._name(path.name, digest)
                if digest not in self._headers:
                    damaged.append(path.name)
            self._drop(set(self._headers))
        return damaged

    def pack(self, snapshot_id: str, memory: Path, *, base: str | None = None) -> PackedMemory:
        """Pack a memory directory as the snapshot of a new id, durably.

        Args:
            base: A snapshot whose pages need not be stored again; one that is damaged or not here is left aside.

        Raises:
            Conflict: There is a snapshot of that id.
            CapacityError: The disk is too full; nothing is left.
            BackendError: The directory is no whole dump. RequirementMissing: There is no zstd library.
        """
        self._check_new(snapshot_id)
        self.check_room(size_bytes(memory))
        with self._base(base) as opened:
            beside = self.beside()
            try:
                packed = pack(memory, beside, base=opened)
                with self.holding({packed.digest}):
                    self.take(beside)
                    self.name(snapshot_id, packed.digest)
            finally:
                beside.unlink(missing_ok=True)
        return packed

    def beside(self) -> Path:
        """A name for a new file that `take` may get; what is left under it goes at the next start."""
        return self.root / f"{secrets.token_hex(8)}{TEMPORARY}"

    def take(self, path: Path) -> None:
        """Take in a whole file that was written `beside`, and whose digest is held.

        Raises:
            SnapshotCorrupt: It is no packed file.
        """
        header = read_header(path)
        with self._lock:
            path.rename(self._file(header.digest))
            self._headers[header.digest] = header

    def name(self, snapshot_id: str, digest: str) -> None:
        """Make a file that is here, with its bases, the snapshot of a new id, durably.

        Raises:
            Conflict: There is a snapshot of that id.
            SnapshotCorrupt: The file, or one that it needs, is not here.
            CapacityError: The disk is full.
        """
        self._check_new(snapshot_id)
        with self._lock, needs_room(self.root, "a memory snapshot"):
            for needed in (digest, *read_header(self.find(digest)).bases):
                self.find(needed)
            try:
                (self.root / snapshot_id).symlink_to(self._file(digest).name)
            except FileExistsError:
                raise Conflict(f"there is a memory snapshot {snapshot_id} already") from None
            self._name(snapshot_id, digest)
            sync_directory(self.root)

    @contextmanager
    def holding(self, digests: Collection[str]) -> Iterator[None]:
        """Keep files of these digests, also such as come meanwhile, while something is made that may need them."""
        with self._lock:
            self._uses.update(digests)
        try:
            yield
        finally:
            with self._lock:
                self._uses.subtract(digests)
                self._drop(digests)

    def open(self, snapshot_id: str) -> MemoryFile:
        """Open a snapshot and what it needs; the caller closes it. It stays readable when it is removed meanwhile.

        Raises:
            NotFound: There is none of that id.
            SnapshotCorrupt: It is damaged, or a file that it needs is, or is not here.
        """
        path = self.root / snapshot_id
        if not _ID.fullmatch(snapshot_id) or not path.is_symlink():
            raise NotFound(f"no memory snapshot {snapshot_id}", snapshot=snapshot_id)
        try:
            return MemoryFile.open(path, self.find)
        except FileNotFoundError:
            raise SnapshotCorrupt(f"the file of memory snapshot {snapshot_id} is not here any more") from None

    def find(self, digest: str) -> Path:
        """The file of that digest. Raises `SnapshotCorrupt` if there is none."""
        path = self._file(digest)
        if not path.exists():
            raise SnapshotCorrupt(f"memory file {digest} is not here, and a snapshot needs pages of it")
        return path

    def has(self, digest: str) -> bool:
        """Whether a file of that digest is here, and not known to be damaged."""
        return digest in self._headers

    def remove(self, snapshot_id: str) -> None:
        """Forget a snapshot, durably; what others need of it stays until they are gone. If there is none, nothing."""
        with self._lock:
            needs = self._named.pop(snapshot_id, None)
            if needs is None:
                return
            (self.root / snapshot_id).unlink(missing_ok=True)
            files = {needs.digest, *needs.bases}
            self._uses.subtract(files)
            self._drop(files)
            sync_directory(self.root)

    def entry(self, snapshot_id: str) -> Entry:
        """One snapshot. Raises `NotFound`, `SnapshotCorrupt`."""
        needs = self._named.get(snapshot_id)
        if needs is None:
            raise NotFound(f"no memory snapshot {snapshot_id}", snapshot=snapshot_id)
        header = self._headers.get(needs.digest)
        if header is None:
            raise SnapshotCorrupt(f"the file of memory snapshot {snapshot_id} is damaged, or not here any more")
        return Entry(snapshot_id=snapshot_id, digest=needs.digest, file_bytes=header.file_bytes, bases=header.bases)

    def entries(self) -> list[Entry]:
        """Every snapshot that is not known to be damaged, by id."""
        with self._lock:
            return [self.entry(name) for name, needs in sorted(self._named.items()) if needs.digest in self._headers]

    def statistics(self) -> ShelfStatistics:
        with self._lock:
            return ShelfStatistics(
                snapshots=len(self._named),
                files=len(self._headers),
                bases=len(set(self._headers) - {needs.digest for needs in self._named.values()}),
                file_bytes=sum(header.file_bytes for header in self._headers.values()),
            )

    def _file(self, digest: str) -> Path:
        return self.root / f"{digest}{_MEMORY}"

    def _check_new(self, snapshot_id: str) -> None:
        if not _ID.fullmatch(snapshot_id):
            raise Conflict(f"{snapshot_id!r} can't be the id of a snapshot")
        if snapshot_id in self._named:
            raise Conflict(f"there is a memory snapshot {snapshot_id} already")

    def check_room(self, size: int) -> None:
        """Raises `CapacityError`: the disk has no room for a file of that many bytes, and what must stay free."""
        free = shutil.disk_usage(self.root).free
        if free < size + self._free_bytes_min:
            raise CapacityError(
                f"no room for a memory snapshot of up to {size >> 20} MiB in {self.root}: {free >> 20} MiB are free, "
                f"{self._free_bytes_min >> 20} MiB stay so (try: remove snapshots, barchan image gc --unused-for 7d)",
                retry_after_ms=RETRY_AFTER_MS,
            )

    @contextmanager
    def _base(self, snapshot_id: str | None) -> Iterator[MemoryFile | None]:
        """A base, open and kept on the disk, with its own, as long as a new file may come to need it."""
        with ExitStack() as entered:
            opened = None
            if snapshot_id is not None:
                try:
                    entry = self.entry(snapshot_id)
                    entered.enter_context(self.holding({entry.digest, *entry.bases}))
                    opened = entered.enter_context(self.open(snapshot_id))
                except (NotFound, SnapshotCorrupt):
                    opened = None
            yield opened

    def _name(self, snapshot_id: str, digest: str) -> None:
        header = self._headers.get(digest)
        needs = _Needs(digest, header.bases if header is not None else ())
        self._named[snapshot_id] = needs
        self._uses.update({digest, *needs.bases})

    def _drop(self, digests: Iterable[str]) -> None:
        """Remove those that nobody needs."""
        for digest in digests:
            if self._uses[digest] <= 0:
                del self._uses[digest]
                self._file(digest).unlink(missing_ok=True)
                self._headers.pop(digest, None)


def _whole(path: Path) -> Header | None:
    """The header of a file, if it has the digest that its name says; the rest is not looked at."""
    try:
        header = read_header(path)
    except SnapshotCorrupt:
        return None
    return header if header.digest == path.stem else None
