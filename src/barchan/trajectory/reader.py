"""Reads a log and checks it as it goes: nothing is returned that the chain does not vouch for."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import BackendError, BlobCorrupt, NotFound
from barchan.trajectory.format import FORMAT, GENESIS, BadLine, Entry, Header, unseal
from barchan.trajectory.ids import Ids
from barchan.trajectory.values import from_json


class Chain:
    """The state of a log after some of its lines: what the next line must follow."""

    def __init__(self) -> None:
        self.header: Header | None = None
        self.next_seq = 0
        self.head_hash = GENESIS
        self.epoch = -1
        self.size_bytes = 0
        self.open_intents: dict[int, Entry] = {}
        self.ids = Ids()

    def take(self, line: bytes) -> Entry:
        """Check one whole line and move on; bodies come back as they were given to the writer.

        Raises:
            BadLine: It is not the line that was written here.
        """
        entry, digest = unseal(line)
        if entry.seq != self.next_seq:
            raise BadLine(f"seq {entry.seq} stands where {self.next_seq} belongs")
        if entry.prev_hash != self.head_hash:
            raise BadLine("it does not continue the line before it")
        self._check(entry)
        body = self.ids.unfold(entry.seq, entry.kind, entry.body, entry.of)
        try:
            entry = replace(entry, body=from_json(body))
        except (ValueError, msgspec.ValidationError, RecursionError) as error:
            raise BadLine(f"its body holds a value that is none: {error}") from error
        self.advance(entry, digest, len(line))
        return entry

    def advance(self, entry: Entry, digest: str, size_bytes: int) -> None:
        """Move past an entry that is known to follow."""
        if entry.part == "header":
            self.header, self.epoch = msgspec.convert(entry.body, Header), entry.epoch
        elif entry.part == "intent":
            self.open_intents[entry.seq] = entry
        elif entry.of is not None:
            del self.open_intents[entry.of]
        self.next_seq = entry.seq + 1
        self.head_hash = digest
        self.size_bytes += size_bytes

    def _check(self, entry: Entry) -> None:
        if entry.part == "header":
            try:
                header = msgspec.convert(entry.body, Header)
            except msgspec.ValidationError as error:
                raise BadLine(f"the header is none: {error}") from error
            if header.format != FORMAT:
                raise BadLine(f"the format is {header.format!r}; this version reads {FORMAT}")
            if header.epoch != entry.epoch or entry.epoch <= self.epoch:
                raise BadLine(f"a header of epoch {entry.epoch} can't follow epoch {self.epoch}")
            return
        if self.header is None:
            raise BadLine("the log does not start with a header")
        if entry.epoch != self.epoch:
            raise BadLine(f"an entry of epoch {entry.epoch} stands in epoch {self.epoch}")
        if entry.kind is None:
            raise BadLine("the entry has no kind")
        if entry.part == "result":
            intent = self.open_intents.get(-1 if entry.of is None else entry.of)
            if intent is None or intent.kind != entry.kind:
                raise BadLine(f"a result of {entry.of}, which is no open {entry.kind}")
        elif entry.of is not None:
            raise BadLine(f"an {entry.part} refers to {entry.of}")


class Verification(Struct, frozen=True, kw_only=True):
    """What became of a check.

    Attributes:
        entries: Whole, good lines before the first bad one.
        bad_seq: Place of the first bad line, counted from 0.
        torn_bytes: Length of a last line without an end, which a killed writer leaves; it was never acknowledged, so it
            does not make a log bad.
        open_intents: Intents without a result.
        head_hash: Hash of the last good line: who keeps it elsewhere can also tell whether whole last lines are
            missing.
    """

    ok: bool
    entries: int
    bad_seq: int | None = None
    why: str = ""
    torn_bytes: int = 0
    open_intents: tuple[int, ...] = ()
    head_hash: str = GENESIS


class Trajectory(Struct, frozen=True, kw_only=True):
    """A whole log in memory. `open_intents` are those whose result is not known."""

    header: Header
    entries: list[Entry]
    open_intents: tuple[Entry, ...]
    torn_bytes: int


def scan(lines: Iterable[bytes], chain: Chain) -> Iterator[Entry]:
    """The entries of a log's lines, each checked; a last line without its newline is left out."""
    for line in lines:
        if not line.endswith(b"\n"):
            return
        yield chain.take(line)


def read(path: Path) -> Iterator[Entry]:
    """A log's entries in order.

    Raises:
        NotFound: There is no such file.
        BlobCorrupt: The log is broken at this place; `details["seq"]` says which.
    """
    chain = Chain()
    with _opened(path) as file:
        try:
            yield from scan(file, chain)
        except BadLine as error:
            raise _broken(path, chain, error) from error


def load(path: Path) -> Trajectory:
    """A whole log.

    Raises:
        NotFound: There is no such file.
        BlobCorrupt: It is broken, or has no header.
    """
    chain = Chain()
    with _opened(path) as file:
        try:
            entries = list(scan(file, chain))
        except BadLine as error:
            raise _broken(path, chain, error) from error
        torn_bytes = file.seek(0, 2) - chain.size_bytes
    if chain.header is None:
        raise BlobCorrupt(f"{path}: it holds no header", seq=0)
    return Trajectory(
        header=chain.header, entries=entries, open_intents=tuple(chain.open_intents.values()), torn_bytes=torn_bytes
    )


class Following:
    """A log that somebody still writes to, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chain = Chain()

    def new(self) -> list[Entry]:
        """The whole entries since the last call. Half an entry is left for later: its writer is about to finish it, or
        the next writer cuts it.

        Raises:
            NotFound: There is no such file.
            BlobCorrupt: The log is broken.
        """
        with _opened(self._path) as file:
            file.seek(self._chain.size_bytes)
            try:
                return list(scan(file, self._chain))
            except BadLine as error:
                raise _broken(self._path, self._chain, error) from error


def verify(path: Path, *, head_hash: str | None = None) -> Verification:
    """Check a log from its first line to its last.

    Args:
        head_hash: The last line's hash as kept elsewhere; without it, whole lines missing at the end can't be seen.

    Raises:
        NotFound: There is no such file.
    """
    chain, why = Chain(), ""
    with _opened(path) as file:
        try:
            for _ in scan(file, chain):
                pass
            torn_bytes = file.seek(0, 2) - chain.size_bytes
            if chain.header is None:
                why = "it holds no header"
            elif head_hash is not None and head_hash != chain.head_hash:
                why = "the log ends before the entry that was its last"
        except BadLine as error:
            why, torn_bytes = str(error), 0
    return Verification(
        ok=not why,
        entries=chain.next_seq,
        bad_seq=chain.next_seq if why else None,
        why=why,
        torn_bytes=torn_bytes,
        open_intents=tuple(chain.open_intents),
        head_hash=chain.head_hash,
    )


def _broken(path: Path, chain: Chain, error: BadLine) -> BlobCorrupt:
    seq = chain.next_seq
    return BlobCorrupt(f"{path}: entry {seq}: {error} (try: barchan trajectory verify)", seq=seq)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise NotFound(f"there is no trajectory log {path} (try: a run's folder)") from error
    except OSError as error:
        raise BackendError(f"the trajectory log {path} can't be read: {error.strerror}") from error
