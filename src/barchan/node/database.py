"""The node's SQLite database as its journals use it: what it can't do is one of the node's own errors."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from barchan.errors import BackendError, CapacityError

RETRY_MS = 1000


class Database(sqlite3.Connection):
    """In WAL mode or not, as whoever opens it says; each statement stands alone, unless it is inside `with`."""

    @classmethod
    def open(cls, path: Path) -> "Database":
        with _told():
            return sqlite3.connect(path, isolation_level=None, factory=cls)

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        """Raises CapacityError where the disk is full, BackendError where it fails otherwise; nothing is written."""
        with _told():
            return super().execute(sql, parameters)

    def __enter__(self) -> "Database":
        self.execute("BEGIN")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> Literal[False]:
        with _told():
            return super().__exit__(kind, error, place)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE):
            raise CapacityError(
                "the node can't note it: the disk of its state directory is full", retry_after_ms=RETRY_MS
            ) from error
        raise BackendError(f"the node can't note it in its journal: {error}") from error
