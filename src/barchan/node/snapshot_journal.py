"""The node's snapshots on disk: a table of the journal's database, on the journal's terms."""

from pathlib import Path

import msgspec
from msgspec import Struct

from barchan.model.sandbox import SandboxSpec
from barchan.model.snapshot_info import SnapshotKind
from barchan.node.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS snapshot (
    id TEXT PRIMARY KEY, image TEXT NOT NULL, digest TEXT, parent TEXT NOT NULL, sandbox TEXT NOT NULL,
    row BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS snapshot_image ON snapshot (image);
CREATE INDEX IF NOT EXISTS snapshot_parent ON snapshot (parent);
CREATE INDEX IF NOT EXISTS snapshot_sandbox ON snapshot (sandbox);
"""


class SnapshotRow(Struct, frozen=True, kw_only=True):
    """One snapshot as journalled.

    Attributes:
        image: Name of its image.
        digest: Of the image; None: it is being made.
        is_named: Somebody chose the image's name; else it is the snapshot's alone.
        frozen_s: For how long its guest had stood still when its memory was stored.
    """

    snapshot_id: str
    kind: SnapshotKind
    image: str
    digest: str | None
    parent: str
    is_named: bool
    sandbox_id: str
    spec: SandboxSpec
    metadata: dict[str, str]
    created_unix_s: float
    memory_bytes: int = 0
    resident_bytes: int = 0
    frozen_s: float = 0.0


class SnapshotJournal:
    """All methods are short and synchronous: tens of microseconds each, and per row."""

    def __init__(self, path: Path) -> None:
        self._db = Database.open(path)
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    def write(self, row: SnapshotRow) -> None:
        """Before anything is made, with no digest; and when it is whole."""
        self._db.execute(
            "INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?, ?, ?)",
            (row.snapshot_id, row.image, row.digest, row.parent, row.sandbox_id, msgspec.json.encode(row)),
        )

    def remove(self, row: SnapshotRow) -> None:
        """Forget one; what came of it now comes of its parent."""
        for child in self._rows("WHERE parent = ?", row.snapshot_id):
            self.write(msgspec.structs.replace(child, parent=row.parent))
        self._db.execute("DELETE FROM snapshot WHERE id = ?", (row.snapshot_id,))

    def find(self, snapshot_id: str) -> SnapshotRow | None:
        """A whole one."""
        rows = self._rows("WHERE id = ? AND digest IS NOT NULL", snapshot_id)
        return rows[0] if rows else None

    def of_image(self, image: str) -> list[SnapshotRow]:
        """The whole ones whose image has, or had, this name."""
        return self._rows("WHERE image = ? AND digest IS NOT NULL", image)

    def of_sandbox(self, sandbox_id: str) -> list[SnapshotRow]:
        """The whole ones of a sandbox, the latest first."""
        rows = self._rows("WHERE sandbox = ? AND digest IS NOT NULL", sandbox_id)
        return sorted(rows, key=lambda row: -row.created_unix_s)

    def whole(self) -> list[SnapshotRow]:
        return self._rows("WHERE digest IS NOT NULL")

    def begun(self) -> list[SnapshotRow]:
        return self._rows("WHERE digest IS NULL")

    def _rows(self, where: str, *values: str) -> list[SnapshotRow]:
        found = self._db.execute("SELECT row FROM snapshot " + where, values)
        return [msgspec.json.decode(row, type=SnapshotRow) for (row,) in found]
