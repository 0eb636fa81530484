"""Where a run's results go: a folder that says what the run is, with one line per rollout, each on disk as soon as the
rollout is over, and one trajectory log per rollout. docs/rollouts.md lists its files.
"""

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec import Struct

from barchan.errors import BackendError, Conflict, InvalidSpec, NotFound
from barchan.rollout.attempt import Job
from barchan.rollout.record import RolloutRecord
from barchan.rollout.summary import Summary
from barchan.rollout.table import TaskRow
from barchan.rollout.task import Task
from barchan.trajectory.format import FOLDER, Header, log_path
from barchan.trajectory.writer import TrajectoryWriter

FORMAT = "barchan.run/1"
RUN, TASKS, ROLLOUTS, SUMMARY, TABLE, ARTIFACTS = (
    "run.json",
    "tasks.jsonl",
    "rollouts.jsonl",
    "summary.json",
    "tasks.json",
    "artifacts",
)

_encoder = msgspec.json.Encoder()


class RunInfo(Struct, frozen=True, kw_only=True):
    """What a run is.

    Attributes:
        settings: All that must be the same when it is resumed.
    """

    run_id: str
    task_set: str
    policy: str
    settings: dict[str, str | int | float | None]
    barchan_version: str
    started_unix_s: float
    format: str = FORMAT


class RunFolder:
    """The one writer of a run's folder; used as a context. `create` and `resume` give it.

    Attributes:
        earlier: What a resumed run had already.
    """

    def __init__(self, path: Path, info: RunInfo, fd: int, earlier: Sequence[RolloutRecord] = ()) -> None:
        self.path = path
        self.info = info
        self.earlier = earlier
        self._fd = fd

    @classmethod
    def create(cls, path: Path, info: RunInfo, tasks: Iterable[Task]) -> "RunFolder":
        """Start a run.

        Raises:
            InvalidSpec: The folder can't be made, or holds a run already.
            BackendError: It can't be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            fd = _locked(path, os.O_CREAT | os.O_EXCL)  # an earlier run's results are never written over
        except FileExistsError as error:
            raise InvalidSpec(f"{path} holds a run already; resume it, or give another folder") from error
        except OSError as error:
            raise InvalidSpec(f"{path}: {error.strerror}; give a folder that holds no run yet") from error
        folder = cls(path, info, fd)
        try:
            write_tasks(path, tasks)
            _write(path / RUN, msgspec.json.format(_encoder.encode(info), indent=2) + b"\n")
        except BaseException:
            os.close(fd)
            raise
        return folder

    @classmethod
    def resume(cls, path: Path, asked: RunInfo, tasks: Sequence[Task]) -> "RunFolder":
        """Go on with a run, whose own id and start stay.

        Args:
            asked: What is asked now; it must be what was asked then.

        Raises:
            NotFound: The folder holds no run.
            InvalidSpec: It holds another one; the message names the difference.
            Conflict: A process writes to it.
        """
        info = read_run(path)
        if difference := _difference(info, asked) or _difference_of_tasks(read_tasks(path), tasks):
            raise InvalidSpec(f"{path} can't be resumed: {difference}")
        try:
            fd = _locked(path, 0)
        except OSError as error:
            raise InvalidSpec(f"{path / ROLLOUTS}: {error.strerror}") from error
        try:
            _cut_torn_line(fd)
            return cls(path, info, fd, read_rollouts(path))
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_unused = error is not None and os.fstat(self._fd).st_size == 0 and not (self.path / FOLDER).exists()
        os.close(self._fd)
        if is_unused:  # refused before anything started: the folder is free for the next try
            for name in (ROLLOUTS, TASKS, RUN):
                (self.path / name).unlink(missing_ok=True)
            with suppress(OSError):  # something else lies in it
                self.path.rmdir()

    @property
    def rollout_ids(self) -> frozenset[str]:
        """Ids of the rollouts that are over. Of another that there is a log of, the log says how far it came."""
        return frozenset(record.rollout_id for record in self.earlier)

    def add(self, record: RolloutRecord) -> None:
        """Append a line and hand it to the kernel, so that a killed run keeps it.

        Raises:
            BackendError: It can't be written; a run that can't keep its results should not go on.
        """
        line = _encoder.encode(record) + b"\n"
        before = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, line) != len(line):
                os.ftruncate(self._fd, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            why = f"the results can't be written to {self.path}: {error.strerror}"
            raise BackendError(f"{why} (try: make room, and --resume {self.path})") from error

    def add_artifact(self, rollout_id: str, data: bytes) -> None:
        """Keep an artifact that is no text.

        Raises:
            BackendError: It can't be written.
        """
        path = artifact_path(self.path, rollout_id)
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise BackendError(f"{path.parent} can't be made: {error.strerror}") from error
        _write(path, data)

    async def open_log(self, job: Job) -> TrajectoryWriter:
        """Start a rollout's trajectory log, or take over the one that there is; whoever asked closes it."""
        header = header_of(job, self.info, self.info.barchan_version)
        return await opened_log(lambda: begun_log(log_path(self.path, job.rollout_id), header))

    def finish(self, summary: Summary, rows: Sequence[TaskRow]) -> None:
        """Write the run in numbers, as a whole and by task."""
        for name, value in ((SUMMARY, summary), (TABLE, rows)):
            _write(self.path / name, msgspec.json.format(_encoder.encode(value), indent=2) + b"\n")


def begun_log(path: Path, header: Header) -> TrajectoryWriter:
    """A log from its beginning; or from its end on, where there is one: then nobody else can append to it any more.

    Raises:
        BlobCorrupt, BackendError: It can't be read, or written.
        Conflict: Somebody is about to go on with it.
    """
    try:
        return TrajectoryWriter.create(path, header)
    except Conflict:
        return TrajectoryWriter.reopen(path)


async def opened_log(opening: Callable[[], TrajectoryWriter]) -> TrajectoryWriter:
    """Open a log in a thread, since that waits for the disk. Where nobody waits any more, it is closed again."""
    task = asyncio.ensure_future(asyncio.to_thread(opening))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_close_unused)
        raise


def _close_unused(opening: "asyncio.Task[TrajectoryWriter]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().let_go()


def artifact_path(folder: Path, rollout_id: str) -> Path:
    """Where the artifact of a rollout lies that is no text."""
    return folder / ARTIFACTS / f"{rollout_id}.tar"


def write_tasks(folder: Path, tasks: Iterable[Task]) -> None:
    """Write the tasks of a run, whole: a finished run can be graded again from its folder. Only the user can read them,
    since their variables may be secrets.

    Raises:
        BackendError: They can't be written.
    """
    _write(folder / TASKS, b"".join(_encoder.encode(task) + b"\n" for task in tasks), 0o600)


def read_tasks(folder: Path) -> list[Task]:
    """The tasks of a run's folder.

    Raises:
        NotFound: There are none.
        InvalidSpec: A line is no task; the message names it.
    """
    return list(_lines(folder / TASKS, Task))


def read_run(folder: Path) -> RunInfo:
    """What the run of a folder is.

    Raises:
        NotFound: There is none.
        InvalidSpec: It is of another format.
    """
    path = folder / RUN
    try:
        info = msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except OSError as error:
        raise NotFound(
            f"{folder} holds no run: {RUN}: {error.strerror} (try: the folder that the run has as its --out)"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"{path}: {error}") from error
    if info.format != FORMAT:
        raise InvalidSpec(f"{path}: its format is {info.format}, not {FORMAT}")
    return info


def read_rollouts(folder: Path) -> list[RolloutRecord]:
    """The records of a run's folder. A last line that was cut short by a crash is left out.

    Raises:
        NotFound: There are none.
        InvalidSpec: Another line is no record; the message names it.
    """
    return list(iter_rollouts(folder))


def iter_rollouts(folder: Path) -> Iterator[RolloutRecord]:
    """The same, one by one."""
    return _lines(folder / ROLLOUTS, RolloutRecord)


def _lines(path: Path, kind: type[Any]) -> Iterator[Any]:
    decoder = msgspec.json.Decoder(kind)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise InvalidSpec(f"{path}:{number}: {error}") from error
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from error


def _locked(folder: Path, flags: int) -> int:
    """The results' file, opened to append, held by this process alone until it is closed or the process ends."""
    fd = os.open(folder / ROLLOUTS, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise Conflict(f"another process writes to the run in {folder}") from error
    return fd


def _cut_torn_line(fd: int) -> None:
    """Drop what a killed writer left of its last line."""
    with os.fdopen(os.dup(fd), "rb") as file:
        whole = sum(len(line) for line in file if line.endswith(b"\n"))
    os.ftruncate(fd, whole)


def _difference(was: RunInfo, asked: RunInfo) -> str:
    then = {"task set": was.task_set, "policy": was.policy, **was.settings}
    now = {"task set": asked.task_set, "policy": asked.policy, **asked.settings}
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            return f"its {name} is {then.get(name)}, and {now.get(name)} is asked"
    return ""


def _difference_of_tasks(was: Sequence[Task], asked: Sequence[Task]) -> str:
    for before, now in zip(was, asked, strict=False):
        if before.task_id != now.task_id:
            return f"its task {before.task_id} is {now.task_id} now"
        if before != now:
            return f"task {before.task_id} has changed"
    return f"it has {len(was)} tasks, and {len(asked)} are asked" if len(was) != len(asked) else ""


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
        partial.rename(path)
    except OSError as error:
        raise BackendError(f"{path} can't be written: {error.strerror}") from error


def header_of(job: Job, info: RunInfo, version: str) -> Header:
    """The first line of a rollout's log.

    Args:
        version: Of the release that writes it, which in a run that goes on may be a later one.
    """
    return Header(
        rollout_id=job.rollout_id,
        run_id=info.run_id,
        task_id=job.task.task_id,
        group_index=job.group_index,
        sample_index=job.sample_index,
        epoch=0,
        created_unix_s=time.time(),
        barchan_version=version,
        policy=info.policy,
    )
