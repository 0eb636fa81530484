"""The node's truth about its sandboxes, on disk: SQLite in WAL mode, written before a fact is acknowledged.

`synchronous=OFF`: a killed process loses nothing; a machine that loses power loses its sandboxes anyway.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from barchan.errors import (
    BackendError,
    BarchanError,
    BlobUnavailable,
    CapacityError,
    RequirementMissing,
    SandboxExpired,
    SandboxLost,
)
from barchan.image.template import Template
from barchan.model.lease import Preemption
from barchan.model.node import LeaseInfo, LeaseRequest
from barchan.model.sandbox import Phase, SandboxInfo, SandboxSpec
from barchan.node.database import Database
from barchan.node.rest import Stored, Used

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sandbox (
    id TEXT PRIMARY KEY, create_id TEXT UNIQUE, spec BLOB NOT NULL, template BLOB NOT NULL, phase TEXT NOT NULL,
    created_unix_s REAL NOT NULL, create_ms REAL NOT NULL DEFAULT 0, ended_unix_s REAL, end_cause TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sandbox_ended ON sandbox (ended_unix_s) WHERE ended_unix_s IS NOT NULL;
CREATE TABLE IF NOT EXISTS lease (id TEXT PRIMARY KEY, grace_s REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lease_terms (
    id TEXT PRIMARY KEY, request BLOB NOT NULL, sandbox_s REAL NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lease_state (
    id TEXT PRIMARY KEY, tokens BLOB, preemption BLOB
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lease_over (
    id TEXT PRIMARY KEY, ended_unix_s REAL NOT NULL, info BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sandbox_rest (
    id TEXT PRIMARY KEY, asleep_s REAL NOT NULL DEFAULT 0, since_unix_s REAL, is_asked INTEGER NOT NULL DEFAULT 0,
    stored BLOB, own_layers INTEGER NOT NULL DEFAULT 0, is_published INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sandbox_before (id TEXT PRIMARY KEY, used BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
ENDED_KEPT_S = 3600.0
LEASES_KEPT_S = 86_400.0  # that are over: whoever looks for an abandoned run's sandboxes comes on the next morning
LEASES_KEPT_MAX = 1000
FORMAT = "1"
_WHY = {
    "lease_ended": ", for its client ended its lease, or was gone for longer than the grace time (barchan ps --runs)",
    "budget": ", for the seconds or tokens of its lease's budget are used up (barchan ps --runs)",
}


class Row(Struct, frozen=True, kw_only=True):
    """One sandbox as journalled.

    Attributes:
        asleep_s: For how long it has slept before, all added up.
        since_unix_s: Since when it sleeps now; None: it is awake.
        is_asked: It sleeps because somebody asked for it.
        stored: Where it is, hibernated.
        own_layers: How many of its template's layers, from the top, it has written itself.
        is_published: It is, or was, in the blob store, for other nodes to take.
        before: What it had used when it came back from disk the last time.
    """

    sandbox_id: str
    spec: SandboxSpec
    template: Template
    phase: Phase
    created_unix_s: float
    create_ms: float
    ended_unix_s: float | None
    end_cause: str | None
    asleep_s: float = 0.0
    since_unix_s: float | None = None
    is_asked: bool = False
    stored: Stored | None = None
    own_layers: int = 0
    is_published: bool = False
    before: Used = Used()

    @property
    def awake_s(self) -> float:
        """For how long it has been awake, all added up."""
        now = self.ended_unix_s or time.time()
        sleeps_s = 0.0 if self.since_unix_s is None else max(0.0, now - self.since_unix_s)
        return max(0.0, now - self.created_unix_s - self.asleep_s - sleeps_s)

    def error(self) -> BarchanError:
        """What whoever still wants the sandbox is told."""
        cause = self.end_cause or "ending"
        text = f"sandbox {self.sandbox_id} has ended: {cause}{_WHY.get(cause, '')}"
        if self.phase == "lost":
            kind = BlobUnavailable if cause.startswith("blob_unavailable") else SandboxLost
            return kind(text, sandbox_id=self.sandbox_id, cause=cause)
        return SandboxExpired(text, sandbox_id=self.sandbox_id, cause=cause)

    def info(self, node_id: str) -> SandboxInfo:
        """What a node says of a sandbox that is no more."""
        return SandboxInfo(
            sandbox_id=self.sandbox_id,
            node_id=node_id,
            phase=self.phase,
            template=self.template.name,
            template_digest=self.template.digest,
            spec=self.spec,
            created_unix_s=self.created_unix_s,
            age_s=(self.ended_unix_s or time.time()) - self.created_unix_s,
            idle_s=0.0,
            create_ms=self.create_ms,
            processes_running=0,
            end_cause=self.end_cause,
        )


class LeaseRow(Struct, frozen=True, kw_only=True):
    """One lease as journalled. `tokens`: by holder; `sandbox_s`: of its ended sandboxes."""

    terms: LeaseRequest
    sandbox_s: float
    tokens: dict[str, int] = {}
    preemption: Preemption | None = None


class Journal:
    """All methods are short and synchronous: tens of microseconds each.

    Those that write raise `CapacityError` or `BackendError`, and have then written nothing.
    """

    def __init__(self, path: Path) -> None:
        self._db = Database.open(path)
        self._ends: dict[str, tuple[Phase, str, float, float]] = {}  # not written yet
        self._uses: dict[str, float] = {}
        self._tokens: dict[str, dict[str, int]] = {}
        self._over: dict[str, tuple[float, bytes]] = {}
        self._dropped: set[str] = set()  # leases
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.executescript(_SCHEMA)
        found = self.meta("format", FORMAT)
        if found != FORMAT:
            raise RequirementMissing(
                f"{path} was written by another release (format {found}, this one has {FORMAT}): "
                "end its sandboxes with that release, or use another state directory"
            )

    def close(self) -> None:
        self._db.close()

    def meta(self, name: str, default: str) -> str:
        """A remembered value; the default is remembered when there is none."""
        self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (name, default))
        (value,) = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return str(value)

    def begin(self, sandbox_id: str, spec: SandboxSpec, template: Template, own_layers: int = 0) -> None:
        """Before anything is made: so that a sandbox that comes to be is always known."""
        with self._db:
            self._begin(sandbox_id, spec, template)
            if own_layers:
                self._db.execute("INSERT INTO sandbox_rest (id, own_layers) VALUES (?, ?)", (sandbox_id, own_layers))

    def _begin(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> None:
        self._db.execute(
            "INSERT INTO sandbox (id, create_id, spec, template, phase, created_unix_s) "
            "VALUES (?, ?, ?, ?, 'booting', ?)",
            (sandbox_id, spec.create_id, msgspec.json.encode(spec), msgspec.json.encode(template), time.time()),
        )

    def end(self, sandbox_id: str, phase: Phase, cause: str, create_ms: float = 0.0) -> None:
        """Never fails, for no sandbox stays because the disk is full: see `settle`. The first end stands."""
        if sandbox_id not in self._ends:
            self._ends[sandbox_id] = (phase, cause, time.time(), create_ms)
        self._settle_quietly()

    def settle(self) -> None:
        """Write what could not be written when it happened."""
        for sandbox_id, end in list(self._ends.items()):
            self._db.execute(
                "UPDATE sandbox SET phase = ?, end_cause = ?, ended_unix_s = ?, create_ms = ? "
                "WHERE id = ? AND ended_unix_s IS NULL",
                (*end, sandbox_id),
            )
            del self._ends[sandbox_id]
        for lease_id, sandbox_s in list(self._uses.items()):
            self._db.execute("UPDATE lease_terms SET sandbox_s = ? WHERE id = ?", (sandbox_s, lease_id))
            del self._uses[lease_id]
        for lease_id, tokens in list(self._tokens.items()):
            self._db.execute(
                "INSERT INTO lease_state (id, tokens) VALUES (?, ?) "
                "ON CONFLICT (id) DO UPDATE SET tokens = excluded.tokens",
                (lease_id, msgspec.json.encode(tokens)),
            )
            del self._tokens[lease_id]
        for lease_id, over in list(self._over.items()):
            self._db.execute("INSERT OR REPLACE INTO lease_over VALUES (?, ?, ?)", (lease_id, *over))
            del self._over[lease_id]
        for lease_id in list(self._dropped):
            self._lease_remove(lease_id)
            self._dropped.discard(lease_id)

    def _settle_quietly(self) -> None:
        with suppress(CapacityError, BackendError):  # the sweep tries again, and says so
            self.settle()

    def prune(self) -> None:
        """Forget what ended long ago."""
        self._db.execute("DELETE FROM sandbox WHERE ended_unix_s < ?", (time.time() - ENDED_KEPT_S,))
        for table in ("sandbox_rest", "sandbox_before"):
            self._db.execute(f"DELETE FROM {table} WHERE id NOT IN (SELECT id FROM sandbox)")
        self._db.execute(
            "DELETE FROM lease_over WHERE ended_unix_s < ? OR id NOT IN "
            "(SELECT id FROM lease_over ORDER BY ended_unix_s DESC LIMIT ?)",
            (time.time() - LEASES_KEPT_S, LEASES_KEPT_MAX),
        )

    def pause(self, sandbox_id: str, *, is_asked: bool) -> None:
        """It has stopped, with its memory kept."""
        with self._db:
            self._set_phase(sandbox_id, "paused")
            self._db.execute(
                "INSERT INTO sandbox_rest (id, since_unix_s, is_asked) VALUES (?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET since_unix_s = excluded.since_unix_s, is_asked = excluded.is_asked",
                (sandbox_id, time.time(), is_asked),
            )

    def still(self, sandbox_id: str) -> None:
        """It stands still for a moment, for its memory is stored; `wake` tells the end of that."""
        self._db.execute(
            "INSERT INTO sandbox_rest (id, since_unix_s) VALUES (?, ?) "
            "ON CONFLICT (id) DO UPDATE SET since_unix_s = excluded.since_unix_s",
            (sandbox_id, time.time()),
        )

    def asked(self, sandbox_id: str) -> None:
        """Somebody wants it to be asleep, as it is."""
        self._db.execute("UPDATE sandbox_rest SET is_asked = 1 WHERE id = ?", (sandbox_id,))

    def hibernate(self, sandbox_id: str, stored: Stored) -> None:
        """All of it is on disk: from now on the processes that are left may go."""
        with self._db:
            self._set_phase(sandbox_id, "hibernated")
            self._db.execute(
                "INSERT INTO sandbox_rest (id, since_unix_s, stored) VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
                "stored = excluded.stored, since_unix_s = coalesce(since_unix_s, excluded.since_unix_s)",
                (sandbox_id, time.time(), msgspec.json.encode(stored)),
            )

    def published(self, sandbox_id: str) -> None:
        """It is about to be told of in the blob store."""
        self._db.execute(
            "INSERT INTO sandbox_rest (id, is_published) VALUES (?, 1) ON CONFLICT (id) DO UPDATE SET is_published = 1",
            (sandbox_id,),
        )

    def take(self, sandbox_id: str, spec: SandboxSpec, template: Template, stored: Stored) -> None:
        """A sandbox of another node came from the blob store, on disk; it may have been here before."""
        with self._db:
            for table in ("sandbox", "sandbox_rest", "sandbox_before"):
                self._db.execute(f"DELETE FROM {table} WHERE id = ?", (sandbox_id,))
            self._begin(sandbox_id, spec, template)
            self._set_phase(sandbox_id, "hibernated")
            self._db.execute(
                "INSERT INTO sandbox_rest (id, since_unix_s, is_asked, stored, is_published) VALUES (?, ?, 1, ?, 1)",
                (sandbox_id, time.time(), msgspec.json.encode(stored)),
            )

    def wake(self, sandbox_id: str) -> None:
        """It is about to run again."""
        with self._db:
            self._wake(sandbox_id)

    def came_back(self, sandbox_id: str, template: Template, own_layers: int, before: Used) -> None:
        """It is about to run again: where it was stored does not count any more.

        Args:
            template: What it is made of from now on, with `own_layers` of its own.
            before: What it has used before.
        """
        with self._db:
            self._db.execute(
                "UPDATE sandbox SET template = ? WHERE id = ?", (msgspec.json.encode(template), sandbox_id)
            )
            self._db.execute("UPDATE sandbox_rest SET own_layers = ? WHERE id = ?", (own_layers, sandbox_id))
            self._db.execute(
                "INSERT OR REPLACE INTO sandbox_before (id, used) VALUES (?, ?)",
                (sandbox_id, msgspec.json.encode(before)),
            )
            self._wake(sandbox_id)

    def _wake(self, sandbox_id: str) -> None:
        self._set_phase(sandbox_id, "booting")
        self._db.execute(
            "UPDATE sandbox_rest SET asleep_s = asleep_s + max(0, ? - since_unix_s), since_unix_s = NULL, "
            "is_asked = 0, stored = NULL WHERE id = ? AND since_unix_s IS NOT NULL",
            (time.time(), sandbox_id),
        )

    def _set_phase(self, sandbox_id: str, phase: Phase) -> None:
        """Of one that lives; those that are awake are all `booting` here."""
        self._db.execute("UPDATE sandbox SET phase = ? WHERE id = ? AND ended_unix_s IS NULL", (phase, sandbox_id))

    def find(self, sandbox_id: str) -> Row | None:
        return self._one("WHERE sandbox.id = ?", sandbox_id)

    def find_create(self, create_id: str) -> Row | None:
        """Of what was made under that id; mostly nothing, which is found out with the least work."""
        if self._db.execute("SELECT 1 FROM sandbox WHERE create_id = ?", (create_id,)).fetchone() is None:
            return None
        return self._one("WHERE create_id = ?", create_id)

    def live(self) -> list[Row]:
        return self._rows("WHERE ended_unix_s IS NULL")

    def rehold(self, sandbox_id: str, spec: SandboxSpec) -> None:
        """A sandbox went over to another lease."""
        self._db.execute("UPDATE sandbox SET spec = ? WHERE id = ?", (msgspec.json.encode(spec), sandbox_id))

    def lease_save(self, lease_id: str, request: LeaseRequest) -> None:
        """A new one; nothing of an earlier one of its id counts any more."""
        with self._db:
            self._lease_remove(lease_id)
            self._db.execute("INSERT INTO lease VALUES (?, ?)", (lease_id, request.grace_s))
            self._db.execute(
                "INSERT INTO lease_terms (id, request) VALUES (?, ?)", (lease_id, msgspec.json.encode(request))
            )
        self._dropped.discard(lease_id)

    def _lease_remove(self, lease_id: str) -> None:
        for table in ("lease", "lease_terms", "lease_state"):
            self._db.execute(f"DELETE FROM {table} WHERE id = ?", (lease_id,))

    def lease_use(self, lease_id: str, sandbox_s: float) -> None:
        """The seconds of a lease's ended sandboxes; those of live ones follow from when they were created. Never fails,
        as `end`.
        """
        self._uses[lease_id] = sandbox_s
        self._settle_quietly()

    def lease_tokens(self, lease_id: str, tokens: dict[str, int]) -> None:
        """What its holders have used. Written by the next `settle`: at worst a node that is killed at that moment hears
        it again with the next beat.
        """
        self._tokens[lease_id] = tokens

    def lease_preempt(self, lease_id: str, preemption: Preemption) -> None:
        self._db.execute(
            "INSERT INTO lease_state (id, preemption) VALUES (?, ?) "
            "ON CONFLICT (id) DO UPDATE SET preemption = excluded.preemption",
            (lease_id, msgspec.json.encode(preemption)),
        )

    def lease_drop(self, lease_id: str, over: LeaseInfo) -> None:
        """It has ended; how is kept for a while. Never fails, as `end`."""
        assert over.end is not None
        self._tokens.pop(lease_id, None)
        self._uses.pop(lease_id, None)
        self._over[lease_id] = (over.end.at_unix_s, msgspec.json.encode(over))
        self._dropped.add(lease_id)
        self._settle_quietly()

    def leases_over(self) -> list[LeaseInfo]:
        """Those that have ended of late, the latest last."""
        self._settle_quietly()
        found = self._db.execute("SELECT info FROM lease_over ORDER BY ended_unix_s")
        return [msgspec.json.decode(info, type=LeaseInfo) for (info,) in found]

    def lease_over(self, lease_id: str) -> LeaseInfo | None:
        """One that has ended of late."""
        self._settle_quietly()
        found = self._db.execute("SELECT info FROM lease_over WHERE id = ?", (lease_id,)).fetchone()
        return msgspec.json.decode(found[0], type=LeaseInfo) if found else None

    def leases(self) -> dict[str, LeaseRow]:
        """By their ids. One without a request is plain."""
        found = self._db.execute(
            "SELECT lease.id, grace_s, request, sandbox_s, tokens, preemption FROM lease "
            "LEFT JOIN lease_terms USING (id) LEFT JOIN lease_state USING (id)"
        )
        return {
            lease_id: LeaseRow(
                terms=msgspec.json.decode(request, type=LeaseRequest) if request else LeaseRequest(grace_s=grace_s),
                sandbox_s=sandbox_s or 0.0,
                tokens=msgspec.json.decode(tokens, type=dict[str, int]) if tokens else {},
                preemption=msgspec.json.decode(preemption, type=Preemption) if preemption else None,
            )
            for lease_id, grace_s, request, sandbox_s, tokens, preemption in found
        }

    def _one(self, where: str, value: str) -> Row | None:
        rows = self._rows(where, value)
        return rows[0] if rows else None

    def _rows(self, where: str, *values: str) -> list[Row]:
        query = (
            "SELECT sandbox.id, spec, template, phase, created_unix_s, create_ms, ended_unix_s, end_cause, "
            "asleep_s, since_unix_s, is_asked, stored, own_layers, is_published, used "
            "FROM sandbox LEFT JOIN sandbox_rest ON sandbox_rest.id = sandbox.id "
            "LEFT JOIN sandbox_before ON sandbox_before.id = sandbox.id " + where
        )
        return [self._row(found) for found in self._db.execute(query, values)]

    def _row(self, found: tuple[Any, ...]) -> Row:
        phase, end_cause, ended_unix_s, create_ms = found[3], found[7], found[6], found[5]
        if ended_unix_s is None and found[0] in self._ends:
            phase, end_cause, ended_unix_s, create_ms = self._ends[found[0]]
        return Row(
            sandbox_id=found[0],
            spec=msgspec.json.decode(found[1], type=SandboxSpec),
            template=msgspec.json.decode(found[2], type=Template),
            phase=phase,
            created_unix_s=found[4],
            create_ms=create_ms,
            ended_unix_s=ended_unix_s,
            end_cause=end_cause,
            asleep_s=found[8] or 0.0,
            since_unix_s=found[9],
            is_asked=bool(found[10]),
            stored=msgspec.json.decode(found[11], type=Stored) if found[11] else None,
            own_layers=found[12] or 0,
            is_published=bool(found[13]),
            before=msgspec.json.decode(found[14], type=Used) if found[14] else Used(),
        )
