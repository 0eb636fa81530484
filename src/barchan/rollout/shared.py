"""A run's folder that many processes write to: groups are claimed, lines appended, and every process sees the others'.

The files are those of `store.RunFolder`, and a folder per run more: `groups/`, a file per group. Whoever writes holds a
file's lock for one append only.
"""

import fcntl
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from barchan.errors import BackendError, Conflict, InvalidSpec, NotFound
from barchan.model.verdict import Verdict
from barchan.rollout.attempt import Job
from barchan.rollout.record import RolloutRecord
from barchan.rollout.store import FORMAT, ROLLOUTS, RUN, TASKS, RunInfo, artifact_path, begun_log, header_of, read_run
from barchan.rollout.task import Task
from barchan.trajectory.format import FOLDER, SUFFIX, log_path
from barchan.trajectory.writer import TrajectoryWriter

GROUPS = "groups"
POLICY = "trainer"
_WORD_CHARS_MAX = 32
_LOCK_WAIT_S = 30.0
_LOCK_POLL_S = 0.002
_encoder = msgspec.json.Encoder()
T = TypeVar("T")


class GroupInfo(Struct, frozen=True, kw_only=True):
    """What a group is; the same for everybody who asks for its key."""

    key: str
    n: int
    task: Task
    group_index: int


class _TaskLine(Struct, frozen=True):
    task_id: str


class Ended(Struct, frozen=True):
    """What is read of a record: which rollout, and what became of it."""

    rollout_id: str
    verdict: Verdict


def group_name(run_id: str, key: str) -> str:
    """A group's name, made from its run and key alone, so that every process makes the same: it begins the ids of the
    group's rollouts and sandboxes, and names its file.
    """
    digest = hashlib.sha256(f"{run_id}\0{key}".encode()).hexdigest()[:12]
    words = (re.sub(r"[^A-Za-z0-9_]+", "-", text)[:_WORD_CHARS_MAX].strip("-") for text in (run_id, key))
    return "-".join([word for word in words if word] + [digest])


def member_id(group: str, index: int, attempt: int) -> str:
    """The id of one attempt at one place of a group."""
    return f"{group}-{index}-{attempt}"


def member_of(rollout_id: str) -> tuple[str, int, int]:
    """A rollout's group, place and attempt.

    Raises:
        NotFound: No run gives such ids.
    """
    found = re.fullmatch(r"(.+)-([0-9]{1,6})-([0-9]{1,6})", rollout_id)
    if found is None:
        raise NotFound(f"there is no rollout {rollout_id!r}: a run's have ids like NAME-KEY-DIGEST-INDEX-ATTEMPT")
    return found[1], int(found[2]), int(found[3])


def other_group(key: str, *, is_of_other_size: bool) -> Conflict:
    what = "size" if is_of_other_size else "task"
    return Conflict(f"group {key!r} was asked for with another {what}", key=key)


class Lines(Generic[T]):
    """One file of JSON lines that many processes append to. `new()` gives a thread at a time what it has grown by."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._offset = 0

    def new(self) -> list[T]:
        """The whole lines that were not given before.

        Raises:
            InvalidSpec: One is none of ours.
        """
        with translated(self._path), open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            lines = [self._decoder.decode(line) for line in whole.splitlines()]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidSpec(f"{self._path}, after byte {self._offset}: {error}") from error
        self._offset += len(whole)
        return lines

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Keep others from appending; gives the descriptor to append to, what a killed writer left of a line cut off.

        Raises:
            Conflict: Another process does not let go: it is a run of its own that writes here.
        """
        with translated(self._path):
            fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock(fd, self._path)
                _cut_torn_line(fd)
                yield fd
            finally:
                os.close(fd)

    def append(self, value: object) -> None:
        with self.locked() as fd:
            self.append_to(fd, value)

    def append_to(self, fd: int, value: object) -> None:
        line = _encoder.encode(value) + b"\n"
        if os.write(fd, line) != len(line):
            raise BackendError(f"{self._path} can't be written: no space for a whole line")


class SharedFolder:
    """One run's folder as one process has it.

    Attributes:
        salt: The same in every process that has this folder, and in no other folder.

    Args:
        must_exist: Make no folder, and no run in it.

    Raises:
        InvalidSpec: It holds another run, or can't be made.
        NotFound: It holds no run, and has to.
    """

    def __init__(self, path: Path, run_id: str, version: str, *, must_exist: bool = False) -> None:
        self.path = path
        self._version = version
        info = RunInfo(
            run_id=run_id, task_set="", policy=POLICY, settings={}, barchan_version=version, started_unix_s=time.time()
        )
        if must_exist and not (path / RUN).exists():
            raise NotFound(f"{path} holds no run to attach to (try: attach=False, which begins one)")
        try:
            (path / GROUPS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSpec(f"{path}: {error.strerror}; give a folder for the run's results") from error
        _write_once(path / RUN, msgspec.json.format(_encoder.encode(info), indent=2) + b"\n")
        self.info = read_run(path)
        if (self.info.run_id, self.info.policy, self.info.format) != (run_id, POLICY, FORMAT):
            raise InvalidSpec(f"{path} holds the run {self.info.run_id!r} of {self.info.policy}: give another folder")
        # Of this folder alone: another folder's run of the same name has sandboxes of its own.
        self.salt = hashlib.sha256(repr(self.info.started_unix_s).encode()).hexdigest()[:8]
        self._rows: Lines[Ended] = Lines(path / ROLLOUTS, Ended)
        self._tasks: Lines[_TaskLine] = Lines(path / TASKS, _TaskLine)
        self._task_ids: set[str] = set()
        self._verdicts: dict[str, Verdict] = {}
        self._reading = threading.Lock()
        for lines in (self._rows, self._tasks):
            with lines.locked():
                pass  # makes the file

    def claim(self, name: str, key: str, n: int, task: Task) -> GroupInfo:
        """The group of this name, which is made if nobody asked for it before.

        Raises:
            Conflict: It was asked for with another task or size.
        """
        path = self.path / GROUPS / f"{name}.json"
        known = _read_group(path)
        if known is None:
            with self._tasks.locked() as fd:
                index = sum(1 for _ in path.parent.glob("*.json"))
                _write_once(path, _encoder.encode(GroupInfo(key=key, n=n, task=task, group_index=index)))
                known = _read_group(path)
                self._task_ids |= {line.task_id for line in self._tasks.new()}
                if task.task_id not in self._task_ids:
                    self._tasks.append_to(fd, task)
        assert known is not None
        if (known.key, known.n) != (key, n) or known.task != task:
            raise other_group(key, is_of_other_size=known.n != n)
        return known

    def group(self, name: str) -> GroupInfo:
        """A group that was asked for.

        Raises:
            NotFound: There is none of this name.
        """
        known = _read_group(self.path / GROUPS / f"{name}.json")
        if known is None:
            raise NotFound(f"{self.path} holds no group {name!r}")
        return known

    def add(self, record: RolloutRecord) -> None:
        """Append a rollout's line, unless it has one; it outlives this process from then on."""
        with self._rows.locked() as fd, self._reading:
            self._verdicts |= {row.rollout_id: row.verdict for row in self._rows.new()}
            if record.rollout_id not in self._verdicts:
                self._rows.append_to(fd, record)

    def verdict(self, rollout_id: str) -> Verdict | None:
        """What became of a rollout, whoever drove it; None: nothing yet."""
        with self._reading:  # the members of a group ask from threads
            if rollout_id not in self._verdicts:
                self._verdicts |= {row.rollout_id: row.verdict for row in self._rows.new()}
            return self._verdicts.get(rollout_id)

    def log(self, job: Job) -> TrajectoryWriter:
        """Start a rollout's log, or take it over.

        Raises:
            BlobCorrupt, BackendError: It can't be read, or written.
            Conflict: Somebody else is about to go on with it.
        """
        return begun_log(log_path(self.path, job.rollout_id), header_of(job, self.info, self._version))

    def log_as_of(self, rollout_id: str, head_hash: str) -> TrajectoryWriter:
        """Take a rollout's log over, as it was known.

        Raises:
            BlobCorrupt, BackendError: It can't be read, or written.
            Conflict: It has gone on since; whoever goes on with it is not disturbed.
        """
        return TrajectoryWriter.reopen(log_path(self.path, rollout_id), found_hash=head_hash)

    def add_artifact(self, rollout_id: str, data: bytes) -> None:
        """Keep an artifact that is no text."""
        path = artifact_path(self.path, rollout_id)
        path.parent.mkdir(exist_ok=True)
        _write_once(path, data)

    def unfinished(self) -> list[str]:
        """The rollouts that have a log and no line in the results, by their ids."""
        logs = sorted(path.name[: -len(SUFFIX)] for path in (self.path / FOLDER).glob(f"*{SUFFIX}"))
        return [rollout_id for rollout_id in logs if self.verdict(rollout_id) is None]

    def has_log(self, rollout_id: str) -> bool:
        return log_path(self.path, rollout_id).exists()


def _read_group(path: Path) -> GroupInfo | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=GroupInfo)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BackendError(f"{path} can't be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"{path}: {error}") from error


def _write_once(path: Path, data: bytes) -> None:
    """Whole, and only where there is no such file yet."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with translated(path):
        try:
            partial.write_bytes(data)
            try:
                os.link(partial, path)
            except FileExistsError:
                return
        finally:
            partial.unlink(missing_ok=True)


def _lock(fd: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Conflict(f"another process writes to {path}, and does not let go") from None
            time.sleep(_LOCK_POLL_S)


def _cut_torn_line(fd: int) -> None:
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return
    while size > 0:
        start = max(0, size - 65536)
        found = os.pread(fd, size - start, start).rfind(b"\n")
        if found >= 0:
            size = start + found + 1
            break
        size = start
    os.ftruncate(fd, size)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Inside, what goes wrong with a file raises `BackendError`, with its path."""
    try:
        yield
    except OSError as error:
        raise BackendError(f"{path} can't be used: {error.strerror}") from error
