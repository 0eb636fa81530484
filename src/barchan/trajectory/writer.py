"""Appends to a rollout's log: one line per call, in the kernel's hands before the call returns."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from barchan.errors import BackendError, BlobCorrupt, Conflict, InvalidSpec, LocalProtocolError, NotFound
from barchan.trajectory.commits import Commits
from barchan.trajectory.format import GENESIS, BadLine, Entry, Header, Kind, Part, is_whole, seal
from barchan.trajectory.reader import Chain, load, scan
from barchan.trajectory.values import to_json

LOCK_WAIT_S = 1.0
LOCK_POLL_S = 0.001


class TrajectoryWriter:
    """The one writer of a log, as a context or with `close()`. Threads of its process append one after the other.

    `found_hash` is that of the last entry when this writer took the log over, before its own header.

    An entry that a call returned for outlives the death of this process. It outlives the death of the machine once
    `committed()` or `close()` returned, or at once with `durable`.
    """

    def __init__(self, fd: int, path: Path, *, durable: bool) -> None:
        """Not called by users: `create` and `reopen` give writers."""
        self.path = path
        self.found_hash = GENESIS
        self._fd = fd
        self._commits = Commits(fd, path)
        self._durable = durable
        self._chain = Chain()
        self._is_over = False
        self._appending = threading.Lock()  # the file's lock keeps other processes out, and no thread of this one

    @classmethod
    def create(cls, path: Path, header: Header, *, durable: bool = False) -> "TrajectoryWriter":
        """Start a log; its folder is made where it is missing.

        Args:
            durable: Wait for the disk at every entry.

        Raises:
            Conflict: There is one already.
            BackendError: It can't be written.
        """
        with _translated(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            writer = cls(_open(path, os.O_CREAT), path, durable=durable)
        with writer._closed_on_error(), writer._locked():
            if writer._first_line().endswith(b"\n"):
                raise Conflict(f"the trajectory log {path} is there already")
            os.ftruncate(writer._fd, 0)  # the torn first line of a writer that was killed
            writer._write_header(header)
        return writer

    @classmethod
    def reopen(
        cls, path: Path, *, epoch: int | None = None, durable: bool = False, found_hash: str | None = None
    ) -> "TrajectoryWriter":
        """Take a log over, behind its last whole line; what a killed writer left of a line is cut.

        Args:
            epoch: Higher than the log's last; None: the next. From now on writers of lower ones can't append.
            found_hash: That of its last entry; a log that has gone on since is left to whoever goes on with it.

        Raises:
            NotFound: There is no such log.
            Conflict: A writer of this epoch or a higher one has it, or it has gone on.
            BlobCorrupt: The log is broken.
        """
        with _translated(path):
            writer = cls(_open(path, 0), path, durable=durable)
        with writer._closed_on_error():
            with suppress(BlobCorrupt):  # a line that is being cut meanwhile; what is really broken is so below, too
                writer._catch_up()  # most of it without keeping its writer waiting
            with writer._locked():
                writer._take_over(epoch, found_hash)
        return writer

    def _take_over(self, epoch: int | None, found_hash: str | None) -> None:
        last = self._catch_up()
        epoch = last.epoch + 1 if epoch is None else epoch
        if epoch <= last.epoch:
            raise Conflict(f"the trajectory log {self.path} is at epoch {last.epoch}, and this writer's is {epoch}")
        if found_hash is not None and found_hash != self.head_hash:
            raise Conflict(f"the trajectory log {self.path} has gone on since")
        os.ftruncate(self._fd, self._chain.size_bytes)
        self.found_hash = self.head_hash
        self._write_header(replace(last, epoch=epoch))

    @property
    def header(self) -> Header:
        if self._chain.header is None:
            raise LocalProtocolError("a log without a header has no writer")
        return self._chain.header

    @property
    def head_hash(self) -> str:
        """Hash of the last entry; kept elsewhere, it shows whether the log was cut short."""
        return self._chain.head_hash

    @property
    def epoch(self) -> int:
        """This writer's: higher than that of any before it."""
        return self.header.epoch

    @property
    def is_begun(self) -> bool:
        """Whether another writer has begun it."""
        return self.found_hash != GENESIS

    @property
    def open_intents(self) -> tuple[Entry, ...]:
        """Intents without a result, of earlier writers too."""
        return tuple(self._chain.open_intents.values())

    def intent(self, kind: Kind, args: Mapping[str, Any], *, op_id: str | None = None) -> int:
        """Say what is about to be done, before it is; returns the seq that `result` refers to.

        Raises:
            Conflict: A later writer took the log over: whoever holds this one must not act any more.
            InvalidSpec: `args` hold something that can't be logged.
            BackendError: It can't be written; the writer is closed.
        """
        return self._append("intent", kind, args, op_id=op_id)

    def result(self, seq: int, outcome: Mapping[str, Any]) -> int:
        """Say what came of an intent. Raises what `intent` does, and LocalProtocolError if `seq` is no open intent."""
        intent = self._chain.open_intents.get(seq)
        if intent is None or intent.kind is None:
            raise LocalProtocolError(f"entry {seq} is no intent that waits for a result")
        return self._append("result", intent.kind, outcome, of=seq)

    def entry(self, kind: Kind, body: Mapping[str, Any]) -> int:
        """Record what has no effect on a sandbox, or is known only after the fact. Raises what `intent` does."""
        return self._append("entry", kind, body)

    async def committed(self, seq: int | None = None) -> None:
        """Wait until an entry is on disk, and with it all before it. All who wait in this process, for whatever logs,
        share what the disk does.

        Args:
            seq: None: the last one.

        Raises:
            BackendError: The disk failed, or the writer was closed by a failure before. Nothing more can be appended.
        """
        await self._commits.wait(self._chain.next_seq - 1 if seq is None else seq)

    def entries(self) -> list[Entry]:
        """All of the log, earlier writers' part too.

        Raises:
            BlobCorrupt: It is broken.
        """
        return load(self.path).entries

    def check(self) -> None:
        """Ask whether this is still the log's writer.

        Raises:
            Conflict: A later writer took the log over: whoever holds this one must not act any more.
        """
        if self._fd < 0:
            raise LocalProtocolError(f"the trajectory log {self.path} is closed")
        if os.fstat(self._fd).st_size != self._chain.size_bytes:
            raise Conflict(f"another writer took the trajectory log {self.path} over")

    def close(self) -> None:
        """Wait for the disk and let go of the file; idempotent."""
        with self._appending:
            if self._fd < 0:
                return
            try:
                self._commits.sync()
            finally:
                self._release()

    def let_go(self) -> None:
        """Let go of the file, and leave it to the kernel when it is on disk; idempotent."""
        with self._appending:
            if self._fd >= 0:
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(
        self, part: Part, kind: Kind | None, body: Mapping[str, Any], *, of: int | None = None, op_id: str | None = None
    ) -> int:
        try:
            plain = to_json(body, is_whole=is_whole(part, kind))
        except TypeError as error:
            raise InvalidSpec(f"entry {self._chain.next_seq} ({kind}): {error}") from error
        with self._appending:
            if self._fd < 0:
                raise LocalProtocolError(f"the trajectory log {self.path} is closed")
            if self._is_over:
                raise LocalProtocolError(f"the trajectory log {self.path} has its verdict, and goes on no more")
            seq = self._append_alone(part, kind, plain, of=of, op_id=op_id)
            self._is_over = kind == "verdict"
            return seq

    def _append_alone(
        self, part: Part, kind: Kind | None, plain: dict[str, Any], *, of: int | None, op_id: str | None
    ) -> int:
        with self._locked():
            self.check()
            return self._write(part, kind, plain, of=of, op_id=op_id, epoch=self._chain.epoch)

    def _write_header(self, header: Header) -> None:
        self._write("header", None, to_json(header), of=None, op_id=None, epoch=header.epoch)

    def _write(
        self, part: Part, kind: Kind | None, body: dict[str, Any], *, of: int | None, op_id: str | None, epoch: int
    ) -> int:
        entry = Entry(
            seq=self._chain.next_seq,
            part=part,
            kind=kind,
            of=of,
            op_id=op_id,
            epoch=epoch,
            unix_ns=time.time_ns(),
            mono_ns=time.monotonic_ns(),
            body=self._chain.ids.fold(self._chain.next_seq, kind, body, of),
            prev_hash=self._chain.head_hash,
        )
        line, digest = seal(entry)
        with self._closed_on_error():
            if os.write(self._fd, line) != len(line):
                raise BackendError(f"the trajectory log {self.path} can't be written: no space for a whole entry")
            self._commits.appended(entry.seq)
            if self._durable:
                self._commits.sync()
        # Only open intents are kept, to check results against; their bodies are in the file.
        self._chain.advance(entry if part == "header" else replace(entry, body={}), digest, len(line))
        return entry.seq

    def _first_line(self) -> bytes:
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            return file.readline()

    def _catch_up(self) -> Header:
        """Read the log to its end, from where it was read to before."""
        with open(os.dup(self._fd), "rb") as file:
            file.seek(self._chain.size_bytes)
            try:
                for _ in scan(file, self._chain):
                    pass
            except BadLine as error:
                seq = self._chain.next_seq
                raise BlobCorrupt(f"{self.path}: entry {seq}: {error}", seq=seq) from error
        if self._chain.header is None:
            raise BlobCorrupt(f"{self.path}: it holds no header", seq=0)
        return self._chain.header

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers out for one append: a lock for longer would let a stalled writer hold the log."""
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Conflict(f"another writer holds the trajectory log {self.path}") from None
                time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """After a failed write the file may end in half a line; the next writer cuts it, this one must not go on."""
        try:
            with _translated(self.path):
                yield
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        self._fd = -1
        self._commits.close()


def _open(path: Path, flags: int) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"there is no trajectory log {path}") from error
    except OSError as error:
        raise BackendError(f"the trajectory log {path} can't be written: {error.strerror}") from error
