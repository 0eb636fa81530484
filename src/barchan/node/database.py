"""The node's SQLite database as its journals use it: what it can't do is one of the node's own errors."""

import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from barchan.errors import BackendError, BarchanError, CapacityError

RETRY_MS = 1000


class Database(sqlite3.Connection):
    """In WAL mode or not, as whoever opens it says; each statement stands alone, unless it is inside `with`."""

    @classmethod
    def open(cls, path: Path) -> "Database":
        try:
            return sqlite3.connect(path, isolation_level=None, factory=cls)
        except sqlite3.Error as error:
            raise _told(error) from error

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        """Raises CapacityError where the disk is full, BackendError where it fails otherwise; nothing is written."""
        try:
            return super().execute(sql, parameters)
        except sqlite3.Error as error:
            raise _told(error) from error

    def __enter__(self) -> "Database":
        self.execute("BEGIN")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> Literal[False]:
        try:
            return super().__exit__(kind, error, place)
        except sqlite3.Error as failure:
            raise _told(failure) from failure


def _told(error: sqlite3.Error) -> BarchanError:
    if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE):
        return CapacityError("the node can't note it: the disk of its state directory is full", retry_after_ms=RETRY_MS)
    return BackendError(f"the node can't note it in its journal: {error}")
